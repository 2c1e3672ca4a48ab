"""The recipes of docs/trainers.md compute in float16, and clip and log unscaled gradients."""

import contextlib
import io
import re
import warnings

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from pages import programs

RECIPES = {
    name: [source for source in programs("trainers.md") if re.search(pattern, source, re.MULTILINE)]
    for name, pattern in {
        "lightning": "^import lightning",
        "accelerate": "^from accelerate",
        "transformers": "^import transformers",
    }.items()
}
CASES = [(name, number) for name in RECIPES for number in range(2)]


def ran(source):
    """Runs a recipe; returns its names, and the dtypes of what its layers returned."""
    dtypes = set()

    def note(module, inputs, output):
        if isinstance(module, torch.nn.Linear):
            dtypes.add(output.dtype)

    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    hook = register_module_forward_hook(note)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            exec(compile(source, "<page>", "exec"), names)
    finally:
        hook.remove()
    return names, dtypes


def in_float32(source):
    """The recipe of Hugging Face's Trainer without loss scaling and float16."""
    source = source.replace("lossscale.torch.LossScaleOptimizer(inner)", "inner")
    source = re.sub(r"^( *)scheduler = lossscale.*\n", "", source, flags=re.MULTILINE)
    source = re.sub(r"^( *)with torch.autocast.*:$", r"\1if True:", source, flags=re.MULTILINE)
    source = source.replace("fp16=True", "fp16=False")
    lines = [line for line in source.splitlines() if not line.startswith("trainer.accelerator.")]
    return "\n".join(line for line in lines if not line.startswith("print("))


def test_each_trainer_has_two_recipes():
    assert {name: len(sources) for name, sources in RECIPES.items()} == dict.fromkeys(RECIPES, 2)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_recipe_computes_in_float16(name, number):
    _, dtypes = ran(RECIPES[name][number])
    assert dtypes == {torch.float16}


@pytest.mark.parametrize("number", range(2), ids=["wrapper", "drop-in"])
def test_hugging_faces_trainer_clips_and_logs_unscaled_gradients(number):
    source = RECIPES["transformers"][number]
    # The drop-in begins at 2**16, which this loss may overflow.
    scaled, dtypes = ran(source.replace('GradScaler("cpu")', 'GradScaler("cpu", init_scale=8.0)'))
    plain, plain_dtypes = ran(in_float32(source))
    assert (dtypes, plain_dtypes) == ({torch.float16}, {torch.float32})
    norms = [
        [entry["grad_norm"] for entry in names["trainer"].state.log_history if "grad_norm" in entry]
        for names in (scaled, plain)
    ]
    assert len(norms[0]) == 3
    # Above the limit, so that they are clipped.
    assert min(norms[0]) > 1
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    for ours, expected in zip(*(m["model"].parameters() for m in (scaled, plain)), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-4)
