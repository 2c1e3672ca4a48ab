"""What Keras 2 wrote about models and layers, as Keras 3 reads it.

Keras 3 reads most of it by itself. Here is what it does not, or reads wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

# Keras 3 takes these for unknown. With these values they say nothing.
_IDLE: dict[str, Any] = {
    "time_major": False,
    "renorm": False,
    "virtual_batch_size": None,
    "ragged": False,
    "input_length": None,
}

_POLICIES = ("Policy", "PolicyV1")


def model_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a model of Keras 2 as Keras 3 reads it.

    Args:
        config: The configuration, which is not changed.

    Example:
        >>> layer = {"class_name": "Dense", "config": {"batch_input_shape": [None, 2]}}
        >>> model = {"class_name": "Sequential", "config": {"layers": [layer]}}
        >>> for layer in model_config(model)["config"]["layers"]:
        ...     print(layer["class_name"], layer["config"].get("batch_shape"))
        InputLayer [None, 2]
        Dense None
    """
    config = copy.deepcopy(config)
    for layer in list(_objects_in(config)):
        settings = layer["config"]
        if layer["class_name"] == "Sequential":
            _add_input(settings.get("layers") or [])
        for name, idle in _IDLE.items():
            if name in settings and settings[name] == idle:
                del settings[name]
        shape = settings.pop("batch_input_shape", None)
        if layer["class_name"] == "InputLayer" and shape is not None:
            settings["batch_shape"] = shape
        if layer["class_name"] == "BatchNormalization":
            settings["axis"] = _single(settings.get("axis", -1))
        settings.update(_dtype(settings))
    return config


def _objects_in(config: Any) -> Iterator[dict[str, Any]]:
    if isinstance(config, list):
        for item in config:
            yield from _objects_in(item)
    elif isinstance(config, dict):
        if isinstance(config.get("config"), dict) and "class_name" in config:
            yield config
        for item in config.values():
            yield from _objects_in(item)


def _add_input(layers: list[Any]) -> None:
    """Puts an input in front of layers whose first one says what its input is.

    Keras 3 takes the size of the batch in that shape for one more dimension.
    """
    if not layers or not isinstance(layers[0].get("config"), dict):
        return
    first = layers[0]
    settings = first["config"]
    if first["class_name"] == "InputLayer" or "batch_input_shape" not in settings:
        return
    name = f"{settings.get('name', 'first')}_input"
    shape = {"batch_shape": settings["batch_input_shape"], "dtype": "float32", "name": name}
    added: dict[str, Any] = {"class_name": "InputLayer", "config": shape}
    if "module" in first:
        added |= {"module": "keras.layers", "registered_name": None}
    layers.insert(0, added)


def _single(axis: Any) -> Any:
    return axis[0] if isinstance(axis, list) and len(axis) == 1 else axis


def _dtype(settings: dict[str, Any]) -> dict[str, Any]:
    # The policies of 2.0 to 2.3 carried a loss scale, which has nothing to do with the layer.
    dtype = settings.get("dtype")
    if isinstance(dtype, dict) and dtype.get("class_name") in _POLICIES:
        return {"dtype": dtype["config"]["name"]}
    return {}
