"""Undocumented names of Keras 3 that lossscale uses; they are looked up only here."""

from __future__ import annotations

from collections.abc import Callable

import lossscale.framework_types as ft
from lossscale.common.private_names import private_module, private_name

no_automatic_dependency_tracking: ft.Function = private_name(
    "keras.src.utils.tracking",
    "no_automatic_dependency_tracking",
    "keep the variables that are trained out of the optimizer's own, as Keras' `build` does",
)
random_functions: ft.Library = private_name(
    "keras.src.backend", "random", "let layers draw the same numbers in float16 and in float32"
)
in_stateless_scope: Callable[[], bool] = private_name(
    "keras.src.backend.common.stateless_scope",
    "in_stateless_scope",
    "see whether variables hold their values, or a stateless scope does",
)


def trainer() -> ft.Library:
    """Returns the module from which `compile` takes its `LossScaleOptimizer`."""
    return private_module(
        "keras.src.trainers.trainer",
        "let `compile` make the documented class under lossscale.install()",
    )
