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
    for name in RECIPES:
        if re.search(rf"\b{name}\b", source):
            # Where PyTorch alone is installed, with no trainer.
            pytest.importorskip(name)
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


# What the recipes without loss scaling and float16 have in place of each line.
IN_FLOAT32 = {
    r"lossscale\.torch\.LossScaleOptimizer\(inner.*\)": "inner",
    r"with torch\.autocast.*:$": "if True:",
    "fp16=True": "fp16=False",
    r"self\.optimizers\(\)\.backward\(loss\)": "loss.backward()",
    r"scaling\.scale_loss\(loss\)": "loss",
    # The wrapper clips these itself.
    r"max_steps=3,(\n *accelerator=\"cpu\")": r"max_steps=3, gradient_clip_val=1.0,\1",
    r"^    optimizer\.step\(\)$": "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    "    optimizer.step()",
    r"^( *scheduler = lossscale| *plugins=|trainer\.accelerator\.|accelerator\.scaler"
    r"|lossscale\.torch\.report|print\().*\n?": "",
}


def in_float32(source):
    """A recipe without loss scaling and float16."""
    for pattern, instead in IN_FLOAT32.items():
        source = re.sub(pattern, instead, source, flags=re.MULTILINE)
    return source


def with_sgd(source):
    """A recipe whose weights show what multiplies a gradient, and whose loss does not overflow."""
    source = re.sub(r"AdamW\((\w+\.parameters\(\))\)", r"SGD(\1, lr=0.1)", source)
    # The drop-in begins at 2**16, which the loss of some may overflow.
    source = re.sub(r"GradScaler\((.*)\)", r"GradScaler(\1, init_scale=8.0)", source)
    return source.replace('float("inf")', "1.0")


def test_each_trainer_has_two_recipes():
    assert {name: len(sources) for name, sources in RECIPES.items()} == dict.fromkeys(RECIPES, 2)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_recipe_computes_in_float16(name, number):
    _, dtypes = ran(RECIPES[name][number])
    assert dtypes == {torch.float16}


@pytest.mark.parametrize("number", range(2), ids=["wrapper", "drop-in"])
def test_hugging_faces_trainer_clips_and_logs_unscaled_gradients(number):
    source = with_sgd(RECIPES["transformers"][number])
    scaled, plain = (ran(each)[0] for each in (source, in_float32(source)))
    norms = [
        [entry["grad_norm"] for entry in names["trainer"].state.log_history if "grad_norm" in entry]
        for names in (scaled, plain)
    ]
    assert len(norms[0]) == 3
    # Above the limit, so that they are clipped.
    assert min(norms[0]) > 1
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_recipe_ends_with_the_weights_of_float32(name, number):
    source = with_sgd(RECIPES[name][number])
    (scaled, dtypes), (plain, plain_dtypes) = ran(source), ran(in_float32(source))
    assert (dtypes, plain_dtypes) == ({torch.float16}, {torch.float32})
    models = [names.get("module", names.get("model")) for names in (scaled, plain)]
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-3)
