"""What differs around the legacy optimizers of tf_keras."""

from __future__ import annotations

import contextlib
from typing import Any

import lossscale.framework_types as ft
from lossscale.keras_common.slots import Slots


class LegacyFamily:
    """An inner optimizer of `tf_keras.optimizers.legacy`, the only kind before 2.11.

    Attributes:
        are_summed: The argument of `apply_gradients` that says that gradients are summed over the
            replicas already, and its value.
        hidden: Names that dir() of the wrapper leaves out.
    """

    are_summed = ("experimental_aggregate_gradients", False)
    # It has none of these. TensorFlow's checkpoints ask dir() for the slots, as `get_slot_names`.
    hidden = frozenset(
        {
            "add_variable",
            "add_variable_from_reference",
            "aggregate_gradients",
            "exclude_from_weight_decay",
            "update_step",
        }
    )

    def __init__(self, inner: ft.KerasOptimizer) -> None:
        self._inner = inner

    def build(self, variables: list[ft.Variable]) -> None:
        self._inner._create_all_weights(variables)

    def weights(self) -> list[ft.Variable]:
        return list(self._inner.weights)

    def unlisted_variables(self, trained: ft.Variables) -> dict[str, ft.Variable]:
        return {}

    def pairs_of(self, loss: ft.Tensor, variables: ft.Variables, tape: ft.Tape) -> ft.GradsAndVars:
        return list(self._inner._compute_gradients(loss, variables, tape=tape))

    def symbolic(self, loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        return list(self._inner.get_gradients(loss, list(variables)))

    def aggregated(self, pairs: ft.GradsAndVars) -> ft.GradsAndVars:
        pairs = self._inner._transform_unaggregated_gradients(pairs)
        return list(self._inner._aggregate_gradients(pairs))

    def while_applying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def slots(self) -> Slots:
        # It finds and makes them itself.
        yield from ()

    def new_weight(self, *given: Any, **settings: Any) -> ft.Variable:
        return self._inner.add_weight(*given, **settings)
