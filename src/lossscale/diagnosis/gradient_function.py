"""What a diagnosis needs of a framework: one function that returns gradients."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from lossscale.errors import ArgumentError, ArgumentTypeError

LOSS = "loss"
"""The name of the loss if there is only one."""
TARGETS = "the targets"
"""The name in `outputs` of the targets, in the dtype of the output that they are compared with."""
LARGEST = 65504.0
"""The largest number of float16."""


@dataclasses.dataclass(frozen=True)
class OutputRange:
    """The range of the numbers that an operation of the forward pass returned.

    Attributes:
        largest: The largest finite magnitude, 0 if there is none.
        finite: Whether every element is finite.
    """

    largest: float
    finite: bool

    @classmethod
    def by_name(cls, pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, OutputRange]:
        """Returns the ranges that a compiled pass computed, by name: pairs of scalar arrays."""
        ranges = pairs.items()
        return {name: cls(float(largest), bool(finite)) for name, (largest, finite) in ranges}

    @property
    def room(self) -> float:
        """Bits between the largest magnitude and 65,504."""
        return math.log2(LARGEST / self.largest) if self.largest else math.inf


class LossGradients(NamedTuple):
    """A loss and its gradients, from one forward and backward pass.

    Attributes:
        gradients: Name of each variable to the gradient of the scaled loss, a NumPy array of
            float32 (of a sparse gradient, the rows that it has); None if the loss does not depend
            on the variable.
        loss: The unscaled loss.
        outputs: Name of each operation to the range of its output, in the order of the forward
            pass; empty unless requested. In float16, only operations that returned float16.
    """

    gradients: Mapping[str, Any]
    loss: float
    outputs: Mapping[str, OutputRange] = {}


class GradientFunction(Protocol):
    """Computes the gradients of the losses of a model on a batch.

    It leaves the model, its optimizer and the framework's random states unchanged, bit for bit,
    also if the model raises. Each call draws the same random numbers, in float16 those of float32.
    """

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False
    ) -> dict[str, LossGradients]:
        """Returns the gradients of each loss by its name; a loss without a name is `LOSS`.

        Args:
            batch: One of the batches.
            scale: Multiplies each loss before it is differentiated.
            half: Whether to compute as training in float16 does; otherwise in float32.
            watch: Whether to return the ranges of the outputs of operations.
        """


def numbered(name: str, counts: Counter[str]) -> str:
    """Counts a name, and returns it with its number unless it is the first."""
    counts[name] += 1
    return name if counts[name] == 1 else f"{name}, {counts[name]}"


def checked_losses(
    returned: Any, is_tensor: Callable[[Any], bool], parameters: Iterable[str]
) -> dict[str, Any]:
    """Returns the losses that a loss function returned, by their names.

    Args:
        returned: The returned value.
        is_tensor: Whether a value is a tensor of the framework.
        parameters: The names of losses that the argument `parameters` has.

    Raises:
        ArgumentTypeError: If a loss is not a tensor.
        ArgumentError: If a loss is not a floating-point scalar, or `parameters` names no loss.
    """
    wanted = (
        "`loss_fn` must return the loss, a floating-point tensor with one element, or a dictionary "
        "of such losses."
    )
    losses = dict(returned) if isinstance(returned, dict) and returned else {LOSS: returned}
    for loss in losses.values():
        if not is_tensor(loss):
            advice = ""
            if isinstance(loss, (list, tuple)):
                advice = " Return the loss alone, a sum, or a dictionary of losses."
            elif hasattr(loss, "loss"):
                advice = " Return the loss in it, such as `output.loss`."
            raise ArgumentTypeError(f"{wanted} Received: a {type(loss).__name__}.{advice}")
        if math.prod(loss.shape) != 1 or "float" not in str(loss.dtype):
            raise ArgumentError(
                f"{wanted} Received: a tensor of shape {tuple(loss.shape)} and dtype "
                f"{loss.dtype}. Take the mean or the sum."
            )
    if unknown := sorted(set(parameters) - set(losses)):
        raise ArgumentError(
            "`parameters` must name losses that `loss_fn` returns: "
            f"{', '.join(map(repr, losses))}. Received: {unknown[0]!r}."
        )
    return {str(name): loss for name, loss in losses.items()}
