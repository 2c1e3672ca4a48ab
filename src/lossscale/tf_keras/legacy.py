"""The loss scale optimizer around the legacy optimizers of tf_keras."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tf_keras

from lossscale.tf_keras.classes import CalledAsWritten, of_family
from lossscale.tf_keras.optimizer import LossScaleOptimizer
from lossscale.tf_keras.private_names import LegacyLossScaleOptimizer
from lossscale.tf_keras.saving import build_pending


@of_family
class LegacyWrapper(LossScaleOptimizer, LegacyLossScaleOptimizer, metaclass=CalledAsWritten):
    """A wrapper of `tf_keras.optimizers.legacy`, the only optimizers before 2.11."""

    _is_of_family = True
    _inner_base = tf_keras.optimizers.legacy.Optimizer
    _is_legacy = True
    _are_summed = ("experimental_aggregate_gradients", False)
    _takes_third = True
    # Here TensorFlow's checkpoints ask dir() for the slots.
    _hidden = frozenset()

    def _create_all_weights(self, var_list: Sequence[Any]) -> None:
        # tf_keras calls this before it loads an HDF5 file.
        self._build(list(var_list))

    def _build(self, variables: list[Any], has_gradient: Sequence[bool] = ()) -> None:
        # As without loss scaling, a variable without a gradient gets no slots.
        kept = [v for i, v in enumerate(variables) if i >= len(has_gradient) or has_gradient[i]]
        if self._pending_groups:
            build_pending(self, kept)
        self._optimizer._create_all_weights(kept)
        self._remember_trained(kept)
        self._load_pending()

    def _inner_weights(self) -> list[Any]:
        return list(self._optimizer.weights)

    def _inner_gradients(self, loss: Any, variables: list[Any], tape: Any) -> list[Any]:
        return list(self._optimizer._compute_gradients(loss, variables, tape=tape))

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        # Programs of that time use this name.
        return self.compute_gradients(loss, var_list, tape=tape, grad_loss=grad_loss)

    def _computed(self, loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> Any:
        return self._compute_gradients(loss, var_list, grad_loss=grad_loss, tape=tape)

    def _symbolic_gradients(self, loss: Any, variables: Sequence[Any]) -> list[Any]:
        return list(self._optimizer.get_gradients(loss, list(variables)))

    def _aggregated(self, pairs: list[Any]) -> Any:
        pairs = self._optimizer._transform_unaggregated_gradients(pairs)
        return self._optimizer._aggregate_gradients(pairs)

    def _decayed_lr(self, var_dtype: Any) -> Any:
        # Programs of that time show the learning rate of a schedule so.
        return self._optimizer._decayed_lr(var_dtype)

    def _get_hyper(self, name: str, dtype: Any = None) -> Any:
        return self._optimizer._get_hyper(name, dtype)

    # --- Slots, which the legacy optimizers have themselves -----------------------------------

    def get_slot_names(self) -> list[str]:
        return list(self._optimizer.get_slot_names())

    def _find_slot(self, var: Any, slot_name: str) -> Any:
        with contextlib.suppress(KeyError):
            return self._optimizer.get_slot(var, slot_name)
        return None

    def add_slot(
        self, var: Any, slot_name: str, initializer: Any = "zeros", shape: Any = None
    ) -> Any:
        return self._optimizer.add_slot(var, slot_name, initializer, shape)

    def _new_weight(self, **settings: Any) -> Any:
        return self._optimizer.add_weight(**settings)
