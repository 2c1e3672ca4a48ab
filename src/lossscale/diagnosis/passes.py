"""The one duty of a framework: a forward and a backward pass, in float32 or in float16.

All else of a diagnosis stands once, in NumPy: `measurement`, `verdict`, `report`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from lossscale.errors import ArgumentError

LOSS = "loss"
"""What a loss is called that is the only one."""
MODEL = "the model's output"
"""Under this name all that the model returns stands in `Pass.outputs`, taken together."""


PARTS = (1.0, 2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-10)
"""How far an output is moved towards a loss of 0: behind a softmax only little of the way helps."""


class Output(NamedTuple):
    """What an operation of the forward pass returned.

    Attributes:
        largest: The largest finite magnitude in it, 0 if there is none.
        finite: Whether every element is finite. Float16 may lose to infinity what float32 keeps;
            a mask of infinities is not finite in both.
        reach: The largest magnitude in it once the loss is 0, as the gradient g by it tells:
            `o - 2 loss g / |g|**2`, which for a squared error is its target. NaN in float16, and
            where the loss does not depend on it.
    """

    largest: float
    finite: bool
    reach: float = math.nan


class Pass(NamedTuple):
    """What came of one loss in one pass.

    Attributes:
        gradients: Name of each variable to the gradient of the scaled loss, a NumPy array of
            float32 (of a sparse one the rows that are in it); None where the loss does not depend
            on the variable.
        loss: The loss, not scaled.
        outputs: Of a pass that is watched, what each operation returned, in the order of the
            forward pass; in float16 only of those that returned float16.
    """

    gradients: Mapping[str, Any]
    loss: float
    outputs: Mapping[str, Output] = {}


class Run(Protocol):
    """Computes the gradients of the losses of a model on a batch.

    It leaves the model, its optimizer and all random states as they were, bit for bit, also where
    the model fails. Each call draws the same random numbers, in float16 those of float32.
    """

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False, move: str = ""
    ) -> dict[str, Pass]:
        """Returns a pass for each loss, under its name; a loss without one is `LOSS`.

        Args:
            batch: One of the batches.
            scale: What each loss is multiplied by before it is derived.
            half: Whether to compute as training in float16 does; otherwise in float32.
            watch: Whether to look at what the operations return.
            move: Name of one of the outputs of a pass that was watched in float32, or "". The loss
                is computed once more, in float32 and without gradients, with this output where it
                has to be for a loss of 0, and at `PARTS` of the way: `Pass.loss` is the lowest.
        """


def check_losses(parameters: Iterable[str], losses: Iterable[str]) -> None:
    """Checks that each loss which `parameters` names is one that `loss_fn` returned.

    Raises:
        ArgumentError: If one is not. It is a `ValueError`.
    """
    returned = list(losses)
    if unknown := sorted(set(parameters) - set(returned)):
        raise ArgumentError(
            f"`parameters` names the loss {unknown[0]!r}, and `loss_fn` returns "
            f"{', '.join(map(repr, returned))}."
        )


def reach(output: Any, gradient: Any, loss: float, squares: float | None = None) -> float:
    """Returns the largest magnitude in an output once the loss is 0.

    Args:
        output: What an operation returned in float32, a NumPy array.
        gradient: The gradient of the loss by it.
        loss: The loss.
        squares: The sum of the squares of all gradients of one output in several arrays; None for
            that of this array.

    Examples:
        >>> import numpy as np
        >>> output, target = np.zeros(4), np.full(4, 9000.0)
        >>> error = output - target
        >>> reach(output, 2 * error / 4, np.mean(error**2))
        9000.0
    """
    import numpy as np

    norm = float(np.vdot(gradient, gradient).real) if squares is None else squares
    if not norm:
        return math.nan
    return float(np.abs(output - 2 * loss / norm * gradient).max(initial=0))
