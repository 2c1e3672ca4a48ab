"""The lines of docs/monitoring.md for loggers that are not installed here, with stand-ins for them.

Those for TensorBoard run with its writer, on the page and in frameworks/keras/test_monitor.py.
"""

import pathlib
import re

import pytest

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


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_lines_for_a_logger(name):
    (recipe,) = [source for source in RECIPES if f"{name}." in source]
    scope = {name: Logger()}
    exec(recipe, scope)
    scope["log"](StepRecord(3, 8.0, False, steps_skipped=1).to_dict())
    assert scope[name].logged == {3: {"loss_scale": 8.0, "steps_skipped": 1}}
