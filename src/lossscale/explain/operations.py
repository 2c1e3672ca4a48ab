"""What is known of operations by their names: one table for each framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lossscale.explain.text import Failure


class Operations(NamedTuple):
    """Names of operations, in lower case and without a `_` at the end.

    Attributes:
        casts: Casts.
        setters: Operations that may put an infinity of the program into an array.
        adding: Operations that may add an epsilon.
        dividing: Operations that divide by a later argument, or take its logarithm.
        of_zero: Other operations that are singular at 0, or have no result below it.
        norms: Parts of the names of normalizations.
        losses: Parts of the names of loss functions, and why these are not finite.
        ranged: Parts of the names of other functions that have a range.
        growing: Parts of the names of operations that overflow in float64, too.
    """

    casts: frozenset[str]
    setters: frozenset[str]
    adding: frozenset[str]
    dividing: frozenset[str]
    of_zero: frozenset[str]
    norms: tuple[str, ...] = ()
    losses: Mapping[str, Failure] = {}
    ranged: tuple[str, ...] = ("acos", "asin", "atanh", "erfinv", "erf_inv", "log1p", "logit")
    growing: tuple[str, ...] = ("exp", "sinh", "cosh", "prod", "mul", "square")

    @property
    def singular(self) -> frozenset[str]:
        """Operations of which an epsilon keeps the input away from 0."""
        return self.dividing | self.of_zero


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCH = Operations(
    casts=_names("_to_copy copy"),
    setters=_names(
        "full full_like new_full fill scalar_tensor masked_fill where constant_pad_nd lift_fresh "
        "lift_fresh_copy"
    ),
    adding=_names("add clamp clamp_min maximum"),
    dividing=_names("div remainder fmod xlogy"),
    of_zero=_names("reciprocal sqrt rsqrt log log2 log10 pow"),
    norms=("batch_norm", "layer_norm", "group_norm", "weight_norm", "rms_norm"),
    losses={"ctc_loss": Failure.LONG_LABEL, "nll_loss": Failure.IGNORED},
)
TENSORFLOW = Operations(
    casts=_names("cast"),
    setters=_names("const fill broadcastto select selectv2 padv2"),
    adding=_names("add addv2 biasadd maximum"),
    dividing=_names("realdiv div divnonan floordiv xdivy xlogy mod floormod truncatemod"),
    of_zero=_names("reciprocal inv reciprocalgrad invgrad sqrt rsqrt sqrtgrad rsqrtgrad log pow"),
    norms=("batchnorm",),
    losses={"ctcloss": Failure.LONG_LABEL},
)
# Its losses and normalizations consist of small operations.
JAX = Operations(
    casts=_names("convert_element_type"),
    setters=_names(""),
    adding=_names("add max clamp"),
    dividing=_names("div rem"),
    of_zero=_names("sqrt rsqrt cbrt log pow integer_pow"),
)
