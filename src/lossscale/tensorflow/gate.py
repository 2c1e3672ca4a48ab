"""Skipping a step under XLA without a branch: assignments that keep the old value.

A branch around an optimizer makes XLA copy every variable. Instead each assignment chooses, by
element, between the new value and the old one. What is read afterwards is the chosen value, so a
skipped step is skipped whole, and XLA fuses the choice into the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lossscale import registry
from lossscale.tensorflow.tracing import in_xla

_KERASES = tuple(framework.root for framework in registry.kerases())


def can_gate(inner_optimizer: Any, gradients: Sequence[Any]) -> bool:
    """Whether the step that is being traced can be skipped by `gated`.

    Args:
        inner_optimizer: It must be one of Keras' own: another may write to variables that it does
            not list, or with operations that cannot be seen here. And it must not average
            variables: XLA would round the averages otherwise than without a choice before them.
        gradients: They must be dense: a scattered update has no old value to choose.
    """
    return (
        in_xla()
        and not tf.distribute.has_strategy()
        and not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        and all(
            type(part).__module__.partition(".")[0] in _KERASES
            and not getattr(part, "use_ema", False)
            for part in (inner_optimizer, *getattr(inner_optimizer, "optimizers", ()))
        )
    )


@contextlib.contextmanager
def gated(variables: Sequence[Any], finite: Any) -> Iterator[None]:
    """Within it assignments to these variables keep the old value unless `finite`.

    Args:
        variables: TensorFlow variables.
        finite: A boolean scalar tensor of the function being traced.
    """
    # A mixed precision variable of tf_keras passes assignments on to the one it holds.
    targets = list({id(v): v for v in (getattr(v, "_variable", v) for v in variables)}.values())
    for target in targets:
        target.__dict__.update(_gated_methods(target, finite))
    try:
        yield
    finally:
        for target in targets:
            for name in _METHODS:
                target.__dict__.pop(name, None)


_METHODS = ("assign", "assign_add", "assign_sub")


def _gated_methods(variable: Any, finite: Any) -> dict[str, Callable[..., Any]]:
    write = variable.assign

    def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
        old = variable.read_value()
        value = tf.convert_to_tensor(value, dtype=old.dtype)
        return write(tf.where(finite, value, old), *args, **kwargs)

    def assign_add(delta: Any, *args: Any, **kwargs: Any) -> Any:
        return assign(variable.read_value() + delta, *args, **kwargs)

    def assign_sub(delta: Any, *args: Any, **kwargs: Any) -> Any:
        return assign(variable.read_value() - delta, *args, **kwargs)

    return {"assign": assign, "assign_add": assign_add, "assign_sub": assign_sub}
