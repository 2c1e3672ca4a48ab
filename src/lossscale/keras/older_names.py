"""Configurations of inner optimizers that older releases wrote, as Keras 3 reads them."""

from __future__ import annotations

from typing import Any

import keras

from lossscale.keras import older_activations as older_activations
from lossscale.older import configurations as older_configs


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
