"""What shells, backends and the rows of the registry have to offer: mypy sees what is lacking."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
FRAMEWORKS = "src/lossscale/frameworks"
HELD = f"{FRAMEWORKS}/__init__.py"
"""Where shells and modules are held to what the registry expects."""

FAULTS = {
    # Asked for by migration, of Keras 3 alone.
    f"{FRAMEWORKS}/keras/persistence.py": ("def _can_load(", HELD, "type-abstract"),
    # Asked for by the monitor, of tf_keras alone.
    f"{FRAMEWORKS}/tf_keras/training.py": ("def _build_notes(", HELD, "type-abstract"),
    f"{FRAMEWORKS}/jax/exponents.py": ("def on_host(", HELD, "assignment"),
    f"{FRAMEWORKS}/keras/installing.py": ("def put_in_place(", HELD, "assignment"),
    f"{FRAMEWORKS}/tf_keras/diagnose.py": ("def measure(", HELD, "assignment"),
    f"{FRAMEWORKS}/keras/backends/torch_own_steps.py": (
        "def runner(",
        f"{FRAMEWORKS}/keras/backends/own_steps.py",
        "assignment",
    ),
    f"{FRAMEWORKS}/keras/backends/jax_counting.py": (
        "def random_state_kept(",
        f"{FRAMEWORKS}/keras/backends/counting.py",
        "assignment",
    ),
    # An attribute of the shell, by a name that it has not got.
    f"{FRAMEWORKS}/shell/training.py": (
        "self._state.read",
        f"{FRAMEWORKS}/shell/training.py",
        "attr-defined",
    ),
    f"{FRAMEWORKS}/keras/own_step.py": (
        "own_steps.load().runner",
        f"{FRAMEWORKS}/keras/own_step.py",
        "attr-defined",
    ),
}
"""By the file that is changed: what gets another name, and the error that mypy has to find."""


def test_a_type_checker_sees_what_a_shell_or_a_module_lacks(tmp_path):
    # One run for all, with what was found when the package itself was checked.
    shadows = []
    for number, (path, (name, _, _)) in enumerate(FAULTS.items()):
        source = (ROOT / path).read_text(encoding="utf-8")
        assert source.count(name) == 1, f"{path} has no {name!r}, or several"
        changed = tmp_path / f"{number}.py"
        other = re.sub(r"\w+(?=\(?$)", "another_name", name)
        changed.write_text(source.replace(name, other), encoding="utf-8")
        shadows += ["--shadow-file", path, str(changed)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *shadows], capture_output=True, text=True, cwd=ROOT
    )
    found = re.findall(r"^(\S+?):\d+: error: .* \[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    missed = [path for path, (_, *error) in FAULTS.items() if tuple(error) not in found]
    assert missed == [], done.stdout + done.stderr
    # The first makes one shell abstract, and the second two; then come three modules.
    for code, count in (("type-abstract", 3), ("assignment", 3)):
        assert found.count((HELD, code)) == count, done.stdout
