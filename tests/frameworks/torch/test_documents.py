"""Examples in docstrings, programs on pages and of examples/torch: they print what they show."""

import contextlib
import doctest
import importlib
import importlib.util
import io
import pathlib
import pkgutil
import re
import runpy
import sys
import warnings

import pytest
import torch

import lossscale
import lossscale.torch
from pages import programs

PACKAGE = lossscale.torch
# That of the wrapper is found where its class says that it is.
# Its names are loaded when they are first used; the examples of two belong to the package.
PUBLIC = {name: getattr(PACKAGE, name) for name in PACKAGE.__all__}
MODULES = [PACKAGE.__name__]
MODULES += [m.name for m in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")]
TRIED = {}

BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("from_gradscaler.md", "trainers.md")
    for number, block in enumerate(programs(page), start=1)
    # These run in several processes, in cases_of_parallel.py.
    if not re.search("^(import ray|from torchtitan)", block, re.MULTILINE)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "torch": torch, "lossscale": lossscale}
    failed, TRIED[name] = doctest.testmod(
        module, globs=names, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0


def test_the_examples_are_found_and_all_that_is_public_has_some():
    with_examples = {name.rpartition(".")[2] for name, tried in TRIED.items() if tried}
    assert with_examples >= {"installation", "scheduler", "state_dict", "scale", "torch", "ranks"}
    for name, member in PUBLIC.items():
        assert ">>>" in (member.__doc__ or ""), name
    assert len(BLOCKS) >= 9


@pytest.mark.parametrize("source", BLOCKS)
def test_a_program_on_a_page_prints_what_it_says(source):
    expected = re.search(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)[1]
    # Where PyTorch alone is installed, there are no trainers.
    for name in re.findall(
        r"^(?:import|from) (accelerate|lightning|transformers)", source, re.MULTILINE
    ):
        pytest.importorskip(name)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        # Lightning and Accelerate warn of their surroundings; a page must not show our warnings.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="lossscale")
        exec(compile(source, "<page>", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip().splitlines()[-1] == expected


# The programs of examples/torch, and what the demo claims.

ROOT = pathlib.Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "torch"
FLOAT32, UNSCALED, FIXED, DYNAMIC = NAMES = (
    "float32",
    "float16, no scaling",
    "float16, fixed scale",
    "float16, dynamic scale",
)
STEPS_OF_AN_EPOCH = 22


def test_the_loop_takes_its_four_steps_and_the_policy_learns_the_best_action(capsys):
    runpy.run_path(str(FOLDER / "plain.py"))
    *steps, last = capsys.readouterr().out.splitlines()
    assert last == "8 4 4 8 - steps skipped: 1"
    assert [step.rpartition(" ")[2] for step in steps] == ["0.009", "0.009", "0.0081", "0.00729"]
    runpy.run_path(str(FOLDER / "policy_gradient.py"))
    share, skipped = re.search(r"(\d+)%, steps skipped: (\d+)$", capsys.readouterr().out).groups()
    assert (int(share) > 95, skipped) == (True, "0")


@pytest.fixture(scope="module")
def demo():
    # Where PyTorch alone is installed, these are not.
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("digits_example", FOLDER / "digits.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def printed(demo, tmp_path_factory):
    """What the program prints, and its picture."""
    picture, out = tmp_path_factory.mktemp("demo") / "digits.png", io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(out):
        patched.setattr(sys, "argv", ["digits.py", "--epochs", "4", "--output", str(picture)])
        demo.main()
    return out.getvalue(), picture


def cells_of(text):
    """The rows of the first table in a text, by the names in their first column."""
    rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    return {name: cells for name, *cells in rows if name in NAMES}


def check_claims(text, steps):
    """Checks what README says of the four runs."""
    rows = cells_of(text)
    assert tuple(rows) == NAMES
    accuracy = {name: float(cells[0].removesuffix("%")) for name, cells in rows.items()}
    flushed = {name: float(cells[1].removesuffix("%")) for name, cells in rows.items()}
    assert accuracy[FLOAT32] > 85
    assert accuracy[UNSCALED] < 30
    assert accuracy[FIXED] == pytest.approx(accuracy[FLOAT32], abs=5)
    assert accuracy[DYNAMIC] == pytest.approx(accuracy[FLOAT32], abs=5)
    assert (flushed[FLOAT32], flushed[UNSCALED]) == (0, 100)
    assert flushed[DYNAMIC] < flushed[FIXED] < 5
    assert rows[FLOAT32][2:] == rows[UNSCALED][2:] == ["", ""]
    assert rows[FIXED][2:] == [f"0 of {steps}", "2**20"]
    skipped, _, total = rows[DYNAMIC][2].split()
    # Each skip halves the scale, which starts at 2**40.
    assert total == str(steps)
    assert 0 < int(skipped) < 15
    assert 40 - int(skipped) <= int(rows[DYNAMIC][3].removeprefix("2**")) < 40


def test_float16_learns_only_with_a_loss_scale_as_readme_shows(printed):
    text, picture = printed
    check_claims(text, 4 * STEPS_OF_AN_EPOCH)
    check_claims((ROOT / "README.md").read_text(), 15 * STEPS_OF_AN_EPOCH)
    ends = [line.partition(" [")[0].strip() for line in text.splitlines() if " epoch 4/4" in line]
    assert ends == [*NAMES]
    assert f"Picture: {picture}\n" in text
    from matplotlib.image import imread

    assert imread(picture).shape[:2] == (960, 1320)


def test_the_average_is_why_float16_does_not_learn_and_changes_nothing_in_float32(demo):
    # The size of the gradients stops the second run, and not float16.
    data = demo.digits()
    run = demo.train(data, True, None, epochs=2, outputs=1)
    assert run.accuracy[-1] > 0.8
    assert run.flushed[-1] < 0.05
    plain, averaged = (
        demo.train(data, False, None, epochs=1, **settings) for settings in ({"outputs": 1}, {})
    )
    assert plain.accuracy == averaged.accuracy
