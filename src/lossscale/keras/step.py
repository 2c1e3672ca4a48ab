"""A training step as values: what a backend needs to know to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from lossscale.common.autograph import as_written
from lossscale.common.notes import DecidedStep
from lossscale.rules import Needs, Seen


class Arrays(NamedTuple):
    """The functions of a backend's arrays that a step needs.

    Attributes:
        unscaled: Divides a list of gradients by a scale; see the backend's `arrays`.
        all_finite: Whether gradients are finite once they are; see its `finite`.
        cast: Returns a gradient, dense or sparse, in another dtype.
    """

    unscaled: Callable[[Sequence[Any], Any, bool], list[Any]]
    all_finite: Callable[..., Any]
    cast: Callable[[Any, str], Any]


class Step(NamedTuple):
    """A training step, before it is decided on.

    Attributes:
        gradients: Those of the step, of this replica; None where there is none.
        variables: Their variables.
        scale: The loss scale of the step, float32 scalar tensor or a number; None if nobody asks.
        are_scaled: Whether the gradients still have to be divided by it.
        sum_replicas: Whether the inner optimizer sums the gradients of the replicas.
        powers_of_two: Whether the scale is always a power of two.
        checks_gradients: Whether a step with a non-finite gradient is skipped.
        needs: What the rule has to see besides.
        moves_on_host: Whether the host may move the scale with Python numbers.
        decide: Given the unscaled gradients, says whether the step is applied; None where they
            only have to be finite.
    """

    gradients: list[Any]
    variables: list[Any]
    scale: Any
    are_scaled: bool
    sum_replicas: bool
    powers_of_two: bool
    checks_gradients: bool
    needs: Needs
    moves_on_host: bool
    decide: Callable[[list[Any]], Any] | None = None

    @property
    def divisor(self) -> Any:
        """What the gradients have to be divided by; None if they are unscaled already."""
        return self.scale if self.are_scaled else None

    @property
    def of_the_loss(self) -> list[Any]:
        """The gradients that the loss scale multiplied, None for others."""
        return of_the_loss(self.gradients, self.variables)

    def unscaled(self, arrays: Arrays) -> list[Any]:
        """Returns the gradients divided by the scale, if they have to be."""
        if not self.are_scaled:
            return list(self.gradients)
        multiplied = self.of_the_loss
        divided = arrays.unscaled(multiplied, self.scale, self.powers_of_two)
        return [
            given if kept is None else result
            for given, kept, result in zip(self.gradients, multiplied, divided, strict=True)
        ]

    def for_inner(self, inner: Any, arrays: Arrays) -> list[Any]:
        """Returns unscaled gradients in the dtype in which the inner optimizer takes them."""
        unscaled = self.unscaled(arrays)
        parts = (inner, *getattr(inner, "optimizers", ()))
        if not any(part.gradient_accumulation_steps for part in parts):
            return unscaled
        # It adds them to sums of the variables' dtype, and adds no two dtypes.
        dtype_of = keras.backend.standardize_dtype
        return [
            gradient
            if gradient is None or dtype_of(gradient.dtype) == dtype_of(variable.dtype)
            else arrays.cast(gradient, dtype_of(variable.dtype))
            for gradient, variable in zip(unscaled, self.variables, strict=True)
        ]

    def is_finite(self, arrays: Arrays) -> Any:
        """Whether the step is applied: a boolean scalar tensor, or True if nothing is checked."""
        if self.decide is not None:
            return self.decide(self.unscaled(arrays))
        if not self.checks_gradients:
            return True
        if not self.are_scaled:
            return arrays.all_finite(self.gradients)
        multiplied = self.of_the_loss
        finite = arrays.all_finite(multiplied, self.scale, self.powers_of_two)
        pairs = zip(self.gradients, multiplied, strict=True)
        others = [gradient for gradient, kept in pairs if kept is None and gradient is not None]
        return ops.logical_and(finite, arrays.all_finite(others)) if others else finite

    def seen(self, measured: Callable[..., Seen], finite: Any) -> Seen:
        """Returns what the rule sees.

        Args:
            measured: That of the framework's `magnitudes`; not called for a rule that needs none.
            finite: Whether the step is applied.
        """
        if self.needs == Needs():
            return Seen(finite)
        return measured(
            self.needs, finite, self.of_the_loss, self.scale, are_scaled=self.are_scaled
        )

    def decided(self, arrays: Arrays, finite: Any, number: Any, *, is_shared: bool) -> DecidedStep:
        """Returns what a monitor's notes are made of.

        Args:
            arrays: The backend's functions.
            finite: Whether the step is applied.
            number: The number of the step, counted from 1.
            is_shared: Whether all replicas have the same gradients.
        """
        return DecidedStep(
            self.gradients,
            self.variables,
            lambda gradients: self._replace(gradients=list(gradients)).unscaled(arrays),
            finite,
            self.scale,
            number,
            is_shared,
        )


@as_written
def of_the_loss(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients that the loss scale multiplied, None for others.

    A variable that Keras overwrites with its gradient (float8 statistics) has no gradient of the
    loss, so nothing multiplied it.
    """
    return [
        None if getattr(variable, "overwrite_with_gradient", False) else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
