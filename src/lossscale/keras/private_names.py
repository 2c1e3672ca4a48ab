"""Undocumented names of Keras 3 that lossscale uses; they are looked up only here."""

from __future__ import annotations

from typing import Any

from lossscale.common.private_names import private_module, private_name

no_automatic_dependency_tracking: Any = private_name(
    "keras.src.utils.tracking",
    "no_automatic_dependency_tracking",
    "keep the variables that are trained out of the optimizer's own, as Keras' `build` does",
)
random_functions: Any = private_name(
    "keras.src.backend", "random", "let layers draw the same numbers in float16 and in float32"
)
in_stateless_scope: Any = private_name(
    "keras.src.backend.common.stateless_scope",
    "in_stateless_scope",
    "see whether variables hold their values, or a stateless scope does",
)


def trainer() -> Any:
    """Returns the module from which `compile` takes its `LossScaleOptimizer`."""
    return private_module(
        "keras.src.trainers.trainer",
        "let `compile` make the documented class under lossscale.install()",
    )
