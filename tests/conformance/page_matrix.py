"""The matrix of TensorFlow's pages: what they say of their optimizer, and which wrapper keeps it.

The words stand in `page_cells.toml`, what asks a wrapper for them in `page_cells.py`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CURRENT, EXPERIMENTAL = "current", "experimental"


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one function asks a wrapper for; page_cells.toml says what the fields are."""

    members: dict[str, list[str]]
    again: Sequence[str] = ()
    forms: Sequence[str] = (CURRENT, EXPERIMENTAL)
    step: bool | str = False
    test: Sequence[str] = ()
    lacks: Sequence[str] = ()
    because: str = ""
    error: str | None = None

    def ways(self, column: str) -> list[tuple[str, bool]]:
        """The documented classes that it is asked of, and whether inside a `tf.function`."""
        eager = [(form, False) for form in self.forms]
        if not self.step or column in ("keras-jax", "keras-torch"):
            return eager
        # What both classes do there is the same code.
        return [*(eager if self.step is True else ()), (self.forms[0], True)]


def entries() -> dict[str, Entry]:
    """Returns the entries by the names of their functions."""
    text = pathlib.Path(__file__).with_name("page_cells.toml").read_text("utf-8")
    settings = {field.name for field in dataclasses.fields(Entry)}
    return {
        name: Entry(
            {key: value for key, value in given.items() if key not in settings},
            **{key: value for key, value in given.items() if key in settings},
        )
        for name, given in tomllib.loads(text).items()
    }


class Program:
    """A wrapper in one of its documented forms, and the functions of its framework."""

    def __init__(self, column: str, form: str, in_function: bool) -> None:
        import keras

        import lossscale.experimental

        self.form, self.in_function = form, in_function
        self.backend = column.removeprefix("keras-")
        self.lossscale, self.experimental = lossscale, lossscale.experimental
        package = lossscale if form == CURRENT else lossscale.experimental
        self.wrapper = package.LossScaleOptimizer
        self.keras: Any = keras
        if column.startswith("tf_keras"):
            import tf_keras

            self.keras = tf_keras
        legacy = column == "tf_keras-legacy"
        self.optimizers = self.keras.optimizers.legacy if legacy else self.keras.optimizers
        self.ops = keras.ops if self.backend in ("jax", "torch") else self.tensorflow()

    def tensorflow(self) -> Any:
        """The module `tensorflow`, where it is what computes."""
        if self.backend in ("jax", "torch"):
            raise LookupError("TensorFlow does not compute here.")
        import tensorflow as tf

        return tf

    def inner(self, name: str = "SGD", **settings: Any) -> Any:
        """Returns an optimizer of the framework."""
        rate = {"learning_rate": 0.25} if name == "SGD" else {}
        return getattr(self.optimizers, name)(**{**rate, **settings})

    def new(self, inner: Any = None, scale: float = 8.0, period: Any = None, fixed: Any = 0) -> Any:
        """Returns the documented optimizer around `inner`."""
        inner = self.inner() if inner is None else inner
        if self.form == CURRENT:
            return self.wrapper(inner, not fixed, scale, period)
        dynamic = self.experimental.DynamicLossScale
        return self.wrapper(inner, scale if fixed else dynamic(scale, period or 2000))

    def case(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Callable[[], Any]]:
        """Returns an optimizer, a variable, and the square of it as a loss: a step halves it."""
        var = self.variable()
        return self.new(*args, **kwargs), var, lambda: var**2

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function as it is run here: as it is, or as a `tf.function`."""
        return self.ops.function(function, autograph=False) if self.in_function else function

    def gradients(self, loss: Callable[[], Any], variables: list[Any]) -> list[Any]:
        """The gradients of a loss, taken by hand: with a tape, `jax.grad` or `torch.autograd`."""
        if self.backend == "torch":
            import torch

            return list(torch.autograd.grad(loss(), [each.value for each in variables]))
        if self.backend != "jax":
            with self.ops.GradientTape() as tape:
                value = loss()
            return list(tape.gradient(value, variables))
        import jax

        def computed(values: list[Any]) -> Any:
            with self.keras.StatelessScope(list(zip(variables, values, strict=True))):
                return loss()

        return list(jax.grad(computed)([each.value for each in variables]))

    def variable(self, value: Any = 1.0) -> Any:
        """Returns a new variable."""
        return (self.ops if hasattr(self.ops, "Variable") else self.keras).Variable(value)

    def tensor(self, value: Any, dtype: str = "float32") -> Any:
        """Returns a constant."""
        return self.ops.cast(self.ops.convert_to_tensor(value), dtype)

    def array(self, value: Any) -> Any:
        """The value of a tensor or a variable."""
        value = self.ops.convert_to_tensor(value)
        return np.array(
            value if hasattr(self.ops, "function") else self.ops.convert_to_numpy(value)
        )

    def number(self, value: Any) -> Any:
        """The value of a scalar."""
        return self.array(value).item()

    def loss_scale(self, optimizer: Any) -> Any:
        """The loss scale, read as the documented class reads it."""
        return optimizer.loss_scale if self.form == CURRENT else optimizer.loss_scale()

    def state(self, optimizer: Any, *variables: Any) -> list[Any]:
        """Everything that a step can change."""
        return [self.array(each) for each in (*optimizer.variables, *variables)]
