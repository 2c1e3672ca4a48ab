"""What measuring the gradients of a model takes in both generations of Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lossscale.diagnostics.measurement import NARROW
from lossscale.diagnostics.tapping import replaced
from lossscale.errors import ArgumentError
from lossscale.keras_common.own_step import has_own_step

_WIDER = ("float32", "float64", "bfloat16")


def check_ready(model: Any, base: Any, *, is_compiled: bool, input_name: str) -> None:
    """Checks that the gradients of a model can be measured.

    Args:
        model: The model.
        base: The library's class of models.
        is_compiled: Whether it was compiled.
        input_name: What the library calls what gives a model its variables.

    Raises:
        ArgumentError: If it is not compiled or has no variables. It is a `ValueError`.
    """
    if not is_compiled:
        raise ArgumentError(
            f"The model {model.name!r} is not compiled, so its loss is not known. "
            "Call model.compile(optimizer, loss) first."
        )
    is_built = model.built
    if not is_built and has_own_step(model, base):
        # One that is trained by a step of its own may be none that can be called.
        is_built = all(layer.built for layer in model._flatten_layers(include_self=False))
    if not is_built or not model.trainable_variables:
        yet = f" yet. Call it on a batch, or give it {input_name}, first."
        raise ArgumentError(
            f"The model {model.name!r} has no trainable variables{'.' if is_built else yet}"
        )


def without_a_loss(model: Any) -> ArgumentError:
    """Returns the error about a model that has nothing to differentiate."""
    return ArgumentError(
        f"The model {model.name!r} was compiled without a loss. "
        "Call model.compile(optimizer, loss) with one."
    )


@contextlib.contextmanager
def computing_in_float32(
    layers: Iterable[Any], is_kept: Callable[[Any], bool], attributes: Mapping[str, Any]
) -> Iterator[None]:
    """Within it no layer computes in a 16-bit format, unless it says so itself.

    Args:
        layers: All layers of a model.
        is_kept: Whether a layer has to compute as it does.
        attributes: What makes a layer compute in float32, by attribute.
    """
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if layer.compute_dtype in NARROW and not is_kept(layer):
                for name, value in attributes.items():
                    stack.enter_context(replaced(layer, name, value))
        yield


@contextlib.contextmanager
def computing_in_float16(
    layers: Iterable[Any],
    is_kept: Callable[[Any], bool],
    attributes: Callable[[Any], Mapping[str, Any]],
) -> Iterator[None]:
    """Within it a model computes as it is trained in float16.

    If one of its layers is in float16 already, that is the way it is; otherwise all of them are
    as `mixed_float16` would make them.

    Args:
        layers: All layers of a model.
        is_kept: Whether a layer has to compute as it does.
        attributes: What makes a layer compute in float16, by attribute.
    """
    found = list(layers)
    with contextlib.ExitStack() as stack:
        if not any(layer.compute_dtype == "float16" for layer in found):
            for layer in found:
                if layer.compute_dtype in _WIDER and not is_kept(layer):
                    for name, value in attributes(layer).items():
                        stack.enter_context(replaced(layer, name, value))
        yield
