"""The gradients of a model: with respect to what, what each needs, and which layer it is of."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from lossscale.diagnostics.histogram import GradientHistogram
from lossscale.diagnostics.verdict import Verdict


class TensorKind(enum.StrEnum):
    """What a gradient is taken with respect to."""

    OUTPUT = "output"
    """What the model returns; or what goes into its last activation function, such as logits."""

    ACTIVATION = "activation"
    """What a layer inside the model returns."""

    VARIABLE = "variable"
    """A trainable variable."""


@dataclasses.dataclass(frozen=True)
class TensorRange:
    """The gradient of the loss with respect to one tensor, over all batches.

    Attributes:
        name: The path of the variable; "output:" or "activation:" and the path of the layer.
        layer: The path of the layer it belongs to.
        kind: What the tensor is.
        histogram: The elements of the gradient without scaling, of all batches together.
    """

    name: str
    layer: str
    kind: TensorKind
    histogram: GradientHistogram


@dataclasses.dataclass(frozen=True)
class JudgedTensor(TensorRange):
    """A tensor, and what its gradient needs in a number format.

    Attributes:
        format: The name of the format.
        verdict: The verdict on this gradient alone.
        reason: Why, in a sentence.
        weight: The verdict that it contributes to the one on the model. A gradient inside the model
            contributes RECOMMENDED at most: whether its loss does harm shows in the variables. One
            that is zero, or negligible beside its layer's others, contributes UNKNOWN.
    """

    format: str
    verdict: Verdict
    reason: str
    weight: Verdict

    @property
    def flushed_mass(self) -> float:
        """The share of its sum of |x| that becomes zero without scaling, from 0 to 1."""
        return self.histogram.flushed_mass(self.format)


@dataclasses.dataclass(frozen=True)
class LayerRange:
    """The gradients that belong to one layer.

    Attributes:
        name: The path of the layer.
        tensors: Its output and its variables, the worst first.
    """

    name: str
    tensors: tuple[JudgedTensor, ...]

    @property
    def histogram(self) -> GradientHistogram:
        """The gradients of its variables together."""
        return merged(self.tensors, {TensorKind.VARIABLE})

    @property
    def worst(self) -> JudgedTensor:
        """The tensor that decides its verdict."""
        return self.tensors[0]

    @property
    def verdict(self) -> Verdict:
        """What it contributes to the verdict on the model."""
        return self.worst.weight


def merged(tensors: Iterable[TensorRange], kinds: set[TensorKind]) -> GradientHistogram:
    """Returns the histogram of all gradients of some kinds together."""
    return GradientHistogram.merge(t.histogram for t in tensors if t.kind in kinds)
