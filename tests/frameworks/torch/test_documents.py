"""Examples in docstrings, programs on pages and of examples/torch: they print what they show."""

import contextlib
import importlib
import importlib.util
import io
import pathlib
import pkgutil
import re
import runpy
import sys

import pytest
import torch

import lossscale
import lossscale.torch
from frameworks.torch.support import run_page, train_step
from pages import examples_tried, programs

PACKAGE = lossscale.torch
PUBLIC = {name: getattr(PACKAGE, name) for name in PACKAGE.__all__}
# The examples of three classes are found where the classes say that they are, in the package.
vars(PACKAGE).update(PUBLIC)
MODULES = [PACKAGE.__name__]
MODULES += [m.name for m in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")]
TRIED = {}

ROOT = pathlib.Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "torch"
# test_trainers.py and cases_of_parallel.py have those of other pages.
BLOCKS = programs("from_gradscaler.md")
BLOCKS += [
    (FOLDER / f"{name}.py").read_text()
    for name in ("explain_lightning", "explain_trainer", "gradcache")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "torch": torch, "lossscale": lossscale}
    TRIED[name] = examples_tried(module, names)


def test_the_examples_are_found_and_all_that_is_public_has_some():
    with_examples = {name.rpartition(".")[2] for name, tried in TRIED.items() if tried}
    assert with_examples >= {"installation", "guarding", "state_dict", "scale", "torch", "ranks"}
    # Those of the methods are found, too.
    assert TRIED[PACKAGE.__name__] >= 40
    for name, member in PUBLIC.items():
        assert ">>>" in (member.__doc__ or ""), name
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("source", BLOCKS)
def test_a_program_on_a_page_prints_what_it_says(source):
    run_page(source)


# The programs of examples/torch, and what the demo claims.

FLOAT32, AUTOCAST, ALONE, REFUSED, FUSED, MASTERS = NAMES = (
    "float32",
    "float16 autocast, LossScaleOptimizer",
    "model.half(), AdamW alone",
    "model.half(), torch.amp.GradScaler",
    "model.half(), torch.amp.GradScaler, fused AdamW",
    "model.half(), LossScaleOptimizer(MasterWeights(...))",
)
STEPS_OF_AN_EPOCH = 22


@pytest.fixture
def threads():
    """Puts the number of PyTorch's threads back."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def test_the_loop_takes_its_four_steps(capsys):
    runpy.run_path(str(FOLDER / "plain.py"))
    *steps, last = capsys.readouterr().out.splitlines()
    assert last == "8 4 4 8 - steps skipped: 1"
    assert [step.rpartition(" ")[2] for step in steps] == ["0.009", "0.009", "0.0081", "0.00729"]


def ratios_of(text):
    """The rows of the table of importance ratios in a text: (bfloat16, float16) in percent."""
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+)% \| ([\d.]+)% \|$", text, re.MULTILINE)
    return {name: (float(bfloat16), float(float16)) for name, bfloat16, float16 in rows}


def test_a_float16_model_samples_and_learns_and_its_ratios_are_near_1(capsys, threads):
    runpy.run_path(str(FOLDER / "policy_gradient.py"), run_name="__main__")
    text = capsys.readouterr().out
    shown = ratios_of((ROOT / "docs/why_float16.md").read_text())
    # The figures depend on the machine, and what the page says of them does not.
    for rows in (shown, ratios_of(text)):
        assert [*rows] == [*ratios_of(text)]
        copied, one, other = rows.values()
        assert all(half < wide / 3 for wide, half in (copied, other))
        assert all(less < more for less, more in zip(one, copied, strict=True))
    shares = re.findall(r"(\d+)% of the tokens are rewarded", text)
    worst, skipped = re.search(r"at most ([\d.]+)%; steps skipped: (\d+)$", text).groups()
    assert int(shares[0]) < 20
    assert int(shares[1]) > 80
    assert float(worst) < 5
    assert skipped == "0"


def test_fused_adam_alone_moves_float16_weights_too_far_as_the_recipe_says(threads):
    torch.set_num_threads(1)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, 10, (256,), generator=torch.Generator().manual_seed(2))

    def moved(half, wrap=lambda adam: adam):
        """How far a weight moves on average, in 300 steps."""
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)
        model, batch = torch.nn.Sequential(*layers), x
        if half:
            model, batch = model.half(), x.half()
        start = [p.detach().float().clone() for p in model.parameters()]
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        optimizer = lossscale.LossScaleOptimizer(wrap(adam))
        for _ in range(300):
            train_step(optimizer, torch.nn.functional.cross_entropy(model(batch).float(), y))
        pairs = zip(model.parameters(), start, strict=True)
        return float(
            torch.cat([(p.detach().float() - old).flatten() for p, old in pairs]).abs().mean()
        )

    page = (ROOT / "docs/pytorch_recipes.md").read_text()
    alone, wide = re.search(
        r"weights moved ([\d.]+)\s+instead of ([\d.]+) on average", page
    ).groups()
    assert moved(half=False) == pytest.approx(float(wide), rel=0.1)
    assert moved(True, lossscale.torch.MasterWeights) == pytest.approx(float(wide), rel=0.1)
    # How far depends on the kernel's rounding.
    assert moved(half=True) > float(alone) / 2


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
    """The rows of the demo's table in a text, by the names in their first column."""
    rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    return {name.replace("`", ""): cells for name, *cells in rows if name.replace("`", "") in NAMES}


def check_claims(text, steps):
    """Checks what README says of the runs."""
    rows = cells_of(text)
    assert tuple(rows) == NAMES
    learned = {name: float(cells[0].rstrip("%")) for name, cells in rows.items() if name != REFUSED}
    assert learned[FLOAT32] > 90
    for name in (AUTOCAST, MASTERS):
        assert learned[name] == pytest.approx(learned[FLOAT32], abs=2)
        assert float(rows[name][1]) == pytest.approx(float(rows[FLOAT32][1]), abs=0.1)
        skipped, _, total = rows[name][2].split()
        assert (int(skipped) < 20, total) == (True, str(steps))
    for name in (ALONE, FUSED):
        assert learned[name] < 30
        assert int(rows[name][1].removeprefix("NaN in step ")) < STEPS_OF_AN_EPOCH
    assert rows[REFUSED][:2] == ["-", "ValueError: Attempting to unscale FP16 gradients."]


def test_a_float16_model_learns_as_in_float32_only_with_masters_as_readme_shows(printed):
    text, picture = printed
    check_claims(text, 4 * STEPS_OF_AN_EPOCH)
    check_claims((ROOT / "README.md").read_text(), 15 * STEPS_OF_AN_EPOCH)
    ends = [line.partition(" [")[0].strip() for line in text.splitlines() if " epoch 4/4" in line]
    assert ends == [FLOAT32, AUTOCAST, MASTERS]
    assert f"Picture: {picture}\n" in text
    from matplotlib.image import imread

    assert imread(picture).shape[:2] == (600, 1320)


def test_adamw_alone_is_lost_by_its_epsilon_which_is_0_in_float16(demo):
    run = demo.train(demo.digits(), demo.RUNS[ALONE], epochs=2, eps=1e-4)
    assert (run.ended, run.accuracy[-1][1] > 0.8) == ("", True)
