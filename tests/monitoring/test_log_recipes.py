"""The lines of docs/monitoring.md for loggers that are not installed here, with stand-ins for them.

Those for TensorBoard write with tensorboardX.
"""

import pathlib
import re

import pytest
from tensorboardX import SummaryWriter

from lossscale.monitoring import StepRecord

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "monitoring.md"
RECIPES = re.findall(r"^```py\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


class Logger:
    """What both take: a dictionary of names and numbers, and the number of the step."""

    def __init__(self):
        self.logged = {}

    def log(self, metrics, *, step):
        assert all(isinstance(value, (int, float)) for value in metrics.values())
        self.logged[step] = metrics

    log_metrics = log


@pytest.mark.parametrize(("name", "call"), [("wandb", "log"), ("mlflow", "log_metrics")])
def test_the_lines_for_a_logger(name, call):
    (recipe,) = [source for source in RECIPES if "wandb.log(" in source]
    assert f"`{name}.{call}`" in PAGE.read_text("utf-8")
    scope = {name: Logger()}
    exec(recipe.replace("wandb.log(", f"{name}.{call}("), scope)
    scope["log"](StepRecord(3, 8.0, False, steps_skipped=1).to_dict())
    assert scope[name].logged == {3: {"loss_scale": 8.0, "steps_skipped": 1}}


def test_the_lines_for_tensorboard(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (recipe,) = [source for source in RECIPES if "SummaryWriter" in source]
    written = []

    class Writer(SummaryWriter):
        def add_scalar(self, tag, value, step):
            written.append((tag, value, step))
            return super().add_scalar(tag, value, step)

    scope = {"SummaryWriter": Writer}
    exec(recipe, scope)
    with scope["writer"]:
        scope["log"](StepRecord(3, 8.0, False, steps_skipped=1).to_dict())
    assert written == [("loss_scale", 8.0, 3), ("steps_skipped", 1, 3)]
    assert list((tmp_path / "runs" / "1").iterdir())
