"""The names under which TensorFlow's configurations know the loss scale optimizers."""

from __future__ import annotations

from typing import Any

import keras

from lossscale.frameworks.keras import older_activations as older_activations
from lossscale.older import configurations as older_configs

# Not the first one in lower case: `keras.optimizers.deserialize` would then find no class for what
# Keras' own LossScaleOptimizer writes.
_NAMES = (
    "LossScaleOptimizer",
    "LossScaleOptimizerV1",
    "LossScaleOptimizerV3",
    "lossscaleoptimizerv1",
    "lossscaleoptimizerv3",
)


def register(shell: type[Any]) -> None:
    """Lets `keras.saving.deserialize_keras_object` read the configurations that TensorFlow wrote.

    Keras' own class of the first name reads none of them. It goes on reading what Keras 3 wrote:
    there the module says which class is meant. A name that somebody else has registered stays
    theirs.
    """
    known = keras.saving.get_custom_objects()
    for name in _NAMES:
        known.setdefault(name, shell)


def inner_config(config: Any, custom_objects: dict[str, Any] | None) -> Any:
    """Returns the configuration of an inner optimizer as Keras 3 reads it; a copy.

    Args:
        config: A configuration of any release.
        custom_objects: Classes that Keras does not know, by class name.
    """
    named = []
    if isinstance(config, dict):
        named = [config.get("class_name"), config.get("registered_name")]
    find = keras.saving.get_registered_object
    own = {name: None for name in named if name and find(name, custom_objects) is not None}
    return older_configs.inner_config(config, own)
