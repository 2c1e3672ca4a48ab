"""Undocumented names of tf_keras that lossscale uses; they are looked up only here."""

from __future__ import annotations

import lossscale.framework_types as ft
from lossscale.common.private_names import private_module, private_name

_LOSS_SCALING = "tf_keras.src.mixed_precision.loss_scale_optimizer"

# Not by the public name, which lossscale.install() replaces.
BaseLossScaleOptimizer: ft.Class = private_name(
    _LOSS_SCALING, "BaseLossScaleOptimizer", "see whether an optimizer has loss scaling already"
)
LossScaleOptimizerV3: ft.Class = private_name(
    _LOSS_SCALING, "LossScaleOptimizerV3", "be an instance of tf_keras' class for new optimizers"
)
LegacyLossScaleOptimizer: ft.Class = private_name(
    _LOSS_SCALING, "LossScaleOptimizer", "be an instance of tf_keras' class for legacy optimizers"
)
track_variable: ft.Function = private_name(
    "tf_keras.src.backend",
    "track_variable",
    "have variables initialized in graphs of TensorFlow 1",
    fallback=lambda variable: None,
)

_UNDER_INSTALL = "let `compile` make the documented class under lossscale.install()"


def loss_scaling() -> ft.Library:
    """Returns the module that has tf_keras' own loss scale optimizers."""
    return private_module(_LOSS_SCALING, _UNDER_INSTALL)


def optimizers() -> ft.Library:
    """Returns the module whose `convert_to_legacy_optimizer` is what `compile` calls."""
    return private_module("tf_keras.src.optimizers", _UNDER_INSTALL)


def trainers() -> tuple[ft.Library, ft.Library]:
    """Returns the modules of `compile`: for TensorFlow 2 and for TensorFlow 1."""
    engine = "tf_keras.src.engine"
    return (
        private_module(f"{engine}.training", _UNDER_INSTALL),
        private_module(f"{engine}.training_v1", _UNDER_INSTALL),
    )
