"""Keras 3, on each of its backends."""

from __future__ import annotations

from lossscale import callbacks, registry

with registry.naming_missing_packages("keras"):
    import keras

    from lossscale.keras.arguments import hard_sigmoid as hard_sigmoid
    from lossscale.keras.optimizer import LossScaleOptimizer
    from lossscale.keras_common.guard import guard

# TensorFlow's configurations name its loss scale optimizers without a package. Keras' own class has
# the first name too, but its configurations have a module, and Keras then ignores these. The first
# name in lower case is missing, because Keras' `deserialize` would not find a class for it.
for _name in ("LossScaleOptimizer", "LossScaleOptimizerV1", "LossScaleOptimizerV3"):
    for _written in {_name, _name.lower()} - {"lossscaleoptimizer"}:
        # A class that other code has registered stays.
        keras.saving.get_custom_objects().setdefault(_written, LossScaleOptimizer)

__all__ = ["LossScaleMonitor", "LossScaleOptimizer", "guard"]


class LossScaleMonitor(callbacks.LossScaleMonitor, keras.callbacks.Callback):
    __doc__ = callbacks.LossScaleMonitor.__doc__
    _library = keras
