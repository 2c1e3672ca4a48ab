"""Annotated programs: what a line reveals to type checkers is what it is when it runs.

`tests/core/test_user_types.py` has the type checkers read the same programs.
"""

import collections
import os
import pathlib
import re
import runpy
import sys
import types
import typing

import pytest

import lossscale
from lossscale.diagnosis import report

FRAMEWORK = os.environ.get("LOSSSCALE_TEST_KERAS", os.environ["KERAS_BACKEND"])
PROGRAMS = {
    "tensorflow": ["with_keras"],
    "jax": ["with_keras", "with_optax"],
    "torch": ["with_keras", "with_torch", "with_grad_scaler"],
    "tf_keras": ["with_tf_keras"],
}


def is_of(value, kind):
    """Whether a value is of a type as an annotation has it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is typing.Any or origin is typing.Literal:
        return kind is typing.Any or value in arguments
    if isinstance(kind, types.UnionType):
        return any(is_of(value, each) for each in arguments)
    if not isinstance(value, type(None) if kind is None else origin or kind):
        return False
    if origin is dict:
        value, arguments = value.items(), [tuple[arguments]]
    elif origin is tuple:
        return all(map(is_of, value, arguments))
    return origin is None or all(is_of(each, arguments[0]) for each in value)


def named(library):
    """The types of a library by the names that type checkers print."""
    if library == "jax":
        import optax

        # Optax's class has no parameters.
        transformation = collections.defaultdict(lambda: optax.GradientTransformationExtraArgs)
        return {
            "Array": sys.modules["jax"].Array,
            "GradientTransformationExtraArgs": transformation,
            "LossScaleState": lossscale.optax.LossScaleState,
            "MasterWeightsState": lossscale.optax.MasterWeightsState,
        }
    if library == "torch":
        import torch

        schedule = torch.optim.lr_scheduler.ExponentialLR
        return {"Tensor": torch.Tensor, "Linear": torch.nn.Linear, "ExponentialLR": schedule}
    return {}


@pytest.mark.parametrize("program", PROGRAMS[FRAMEWORK])
def test_what_type_checkers_reveal_is_so_in_a_run(program, monkeypatch):
    path = pathlib.Path(__file__).with_name("annotated") / f"{program}.py"
    revealed = []

    def reveal(value):
        revealed.append((sys._getframe(1).f_lineno, value))
        return value

    monkeypatch.setattr(typing, "reveal_type", reveal)
    ran = runpy.run_path(str(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert {number for number, _ in revealed} == {
        number for number, line in enumerate(lines, 1) if "reveal_type(" in line
    }
    names = dict.fromkeys(["AroundKeras", "AroundTorch"], lossscale.LossScaleOptimizer)
    for module in (typing, lossscale, lossscale.monitoring, report, sys.modules.get("keras")):
        names |= vars(module) if module else {}
    names |= ran | named(FRAMEWORK)
    for number, value in revealed:
        said = re.search(r"# (.*?)(, mypy: .*)?$", lines[number - 1])[1]
        assert is_of(value, eval(said, names)), (lines[number - 1], type(value))
