"""What a type checker knows of the public class, by a user's program, right and wrong."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """\
from typing import Any

import lossscale


def train(inner: Any, loss: Any, gradients: list[Any], weights: list[Any]) -> float:
    optimizer = lossscale.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=5)
    scaled = optimizer.get_scaled_loss(loss)
    unscaled = optimizer.get_unscaled_gradients([scaled])
    optimizer.apply_gradients(zip(unscaled, weights))
    optimizer.minimize(lambda: loss, weights)
    optimizer.learning_rate = 0.5
    skipped: int = int(optimizer.steps_skipped)
    rule: lossscale.ScaleRule = optimizer.rule
    again: lossscale.LossScaleOptimizer = type(optimizer).from_config(optimizer.get_config())
    return float(again.loss_scale) + skipped + float(rule.init().scale)


class Counting(lossscale.LossScaleOptimizer):
    def get_scaled_loss(self, loss: Any) -> Any:
        return super().get_scaled_loss(loss)


Counting(None, rule=lossscale.FixedScale(128.0))
"""
MISTAKES = {
    "lossscale.LossScaleOptimizer(None, initial_scal=3)": "call-arg",
    "lossscale.LossScaleOptimizer(None, dynamic='dynamic')": "arg-type",
    "lossscale.LossScaleOptimizer()": "call-arg",
    "lossscale.LossScaleOptimizer(None).get_scaled_loss()": "call-arg",
    "lossscale.LossScaleOptimizer(None).minimize(los=None)": "call-arg",
    "lossscale.LossScaleOptimizer(None).apply_gradients(3)": "arg-type",
    "lossscale.DynamicScale(initial_scale='high')": "arg-type",
}


def test_a_type_checker_knows_the_members_and_finds_mistakes(tmp_path):
    program = tmp_path / "program.py"
    first = PROGRAM.count("\n") + 1
    program.write_text(PROGRAM + "".join(f"{mistake}\n" for mistake in MISTAKES))
    # As the package itself is checked, so that what was found then need not be found again.
    settings = ["--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, "--follow-imports", "silent", str(program)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    found = re.findall(r"program\.py:(\d+): error: .* \[([a-z-]+)\]", done.stdout)
    expected = [(str(first + row), code) for row, code in enumerate(MISTAKES.values())]
    assert found == expected, done.stdout + done.stderr
