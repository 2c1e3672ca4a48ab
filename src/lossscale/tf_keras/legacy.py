"""The loss scale optimizer around the legacy optimizers of tf_keras."""

from __future__ import annotations

import contextlib
from typing import Any

import tf_keras

import lossscale.framework_types as ft
from lossscale.common.private_names import private_name
from lossscale.tf_keras.classes import CalledAsWritten, of_family
from lossscale.tf_keras.optimizer import LossScaleOptimizer

_LegacyLossScaleOptimizer: ft.Class = private_name(
    "tf_keras.src.mixed_precision.loss_scale_optimizer",
    "LossScaleOptimizer",
    "be an instance of tf_keras' class for legacy optimizers",
)


@of_family
class LegacyWrapper(LossScaleOptimizer, _LegacyLossScaleOptimizer, metaclass=CalledAsWritten):
    """A wrapper of `tf_keras.optimizers.legacy`, the only optimizers before 2.11."""

    _inner_base = tf_keras.optimizers.legacy.Optimizer
    _is_legacy = True
    _are_summed = ("experimental_aggregate_gradients", False)
    _takes_third = True
    # Here TensorFlow's checkpoints ask dir() for the slots.
    _hidden = frozenset()

    def _create_all_weights(self, var_list: ft.Variables) -> None:
        # tf_keras calls this before it loads an HDF5 file.
        self._build(list(var_list))

    def _build_inner(self, variables: list[ft.Variable]) -> None:
        self._optimizer._create_all_weights(variables)

    def _inner_weights(self) -> list[ft.Variable]:
        return list(self._optimizer.weights)

    def _pairs_of(self, loss: ft.Tensor, variables: ft.Variables, tape: ft.Tape) -> ft.GradsAndVars:
        return list(self._optimizer._compute_gradients(loss, variables, tape=tape))

    def _compute_gradients(
        self,
        loss: ft.Loss,
        var_list: ft.VarList,
        grad_loss: ft.Tensor | None = None,
        tape: ft.Tape = None,
    ) -> ft.GradsAndVars:
        # Programs of that time use this name.
        return self.compute_gradients(loss, var_list, tape=tape, grad_loss=grad_loss)

    def _computed(
        self, loss: ft.Loss, var_list: ft.VarList, grad_loss: ft.Tensor | None, tape: ft.Tape
    ) -> ft.GradsAndVars:
        return self._compute_gradients(loss, var_list, grad_loss=grad_loss, tape=tape)

    def _symbolic(self, loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        return list(self._optimizer.get_gradients(loss, list(variables)))

    def _aggregated(self, pairs: ft.GradsAndVars) -> ft.GradsAndVars:
        pairs = self._optimizer._transform_unaggregated_gradients(pairs)
        return list(self._optimizer._aggregate_gradients(pairs))

    def _decayed_lr(self, var_dtype: ft.DType) -> ft.Tensor:
        # Programs of that time show the learning rate of a schedule so.
        return self._optimizer._decayed_lr(var_dtype)

    def _get_hyper(self, name: str, dtype: ft.DType = None) -> ft.LearningRate | ft.Tensor:
        return self._optimizer._get_hyper(name, dtype)

    # --- Slots, which the legacy optimizers have themselves -----------------------------------

    def get_slot_names(self) -> list[str]:
        return list(self._optimizer.get_slot_names())

    def _find_slot(self, var: ft.Variable, slot_name: str) -> ft.Variable | None:
        with contextlib.suppress(KeyError):
            return self._optimizer.get_slot(var, slot_name)
        return None

    def add_slot(
        self, var: ft.Variable, slot_name: str, initializer: Any = "zeros", shape: Any = None
    ) -> ft.Variable:
        return self._optimizer.add_slot(var, slot_name, initializer, shape)

    def _new_weight(self, *given: Any, **settings: Any) -> ft.Variable:
        return self._optimizer.add_weight(*given, **settings)
