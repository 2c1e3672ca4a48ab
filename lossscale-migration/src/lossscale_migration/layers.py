"""Translates the Keras 2 configuration of a layer to Keras 3.

Keras 3 reads most settings itself. This module covers those that it rejects or reads wrongly.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from lossscale.errors import OldFileError
from lossscale.keras import hard_sigmoid

# Settings that do not affect the result; dropped if Keras 3 lacks them.
_WITHOUT_EFFECT = {
    "autocast",
    "experimental_autocast",
    "force_generator",
    "fused",
    "implementation",
    "input_length",
    "key_shape",
    "query_shape",
    "renorm_clipping",
    "renorm_momentum",
    "rng_type",
    "robust_masking",
    "softmax_robust_masking",
    "sparse",
    "trainable",
    "value_shape",
    "vocabulary_size",
}
# Depthwise and separable convolutions inherited these from the ordinary convolution and ignored
# them.
_WITHOUT_EFFECT |= {"filters", "kernel_constraint", "kernel_initializer", "kernel_regularizer"}

# Keras 3 lacks these settings, and behaves as if they had these values.
_IDLE: dict[str, tuple[Any, ...]] = {
    "adjustment": (None,),
    "causal": (False,),
    "dynamic": (False,),
    "groups": (1,),
    "noise_shape": (None,),
    "num_constants": (None, 0),
    "ragged": (False,),
    "renorm": (False,),
    "reverse_state_order": (False,),
    "time_major": (False,),
    "type_spec": (None,),
    "virtual_batch_size": (None,),
}

# Names of settings in the first releases, by class.
_RENAMED = {
    "CategoryEncoding": {"max_tokens": "num_tokens"},
    "Discretization": {"bins": "bin_boundaries"},
    "LeakyReLU": {"alpha": "negative_slope"},
    "ThresholdedReLU": {"theta": "threshold"},
}

# Classes that Keras 3 renamed, with the settings that the old name implied.
_REPLACED_BY: dict[str, tuple[str, dict[str, Any]]] = {
    "SyncBatchNormalization": ("BatchNormalization", {"synchronized": True}),
    "ThresholdedReLU": ("ReLU", {}),
}

_POLICIES = ("Policy", "PolicyV1")
_ANY_DTYPE = ("infer", "_infer")
_ACTIVATIONS = ("activation", "recurrent_activation")


def layer_in_keras_3(kind: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the Keras 3 class of a Keras 2 layer, and its settings.

    Args:
        kind: The name of the class.
        settings: Its configuration, which is not changed.

    Examples:
        >>> layer_in_keras_3("ThresholdedReLU", {"theta": 1.0, "dtype": "float32"})
        ('ReLU', {'dtype': 'float32', 'threshold': 1.0})
    """
    names = _RENAMED.get(kind, {})
    kept = {name: value for name, value in settings.items() if name not in names}
    kept |= {other: settings[name] for name, other in names.items() if name in settings}
    kept.pop("batch_input_shape", None)
    kept |= dtype_of_policy(kept)
    if kept.get("dtype") in _ANY_DTYPE:
        del kept["dtype"]
    kind_in_keras_3, implied = _REPLACED_BY.get(kind, (kind, {}))
    if kind_in_keras_3 == "BatchNormalization":
        kept["axis"] = only_element(kept.get("axis", -1))
    if "name" in kept:
        kept["name"] = layer_name(kept["name"])
    for name in _ACTIVATIONS:
        if function_name(kept.get(name)) == "hard_sigmoid":
            # It was another function: clip(0.2 x + 0.5, 0, 1).
            kept[name] = hard_sigmoid
    if kept.get("output_mode") == "binary":
        kept["output_mode"] = "multi_hot"
    return kind_in_keras_3, {**kept, **implied}


def plain_values(config: Any) -> Any:
    """Returns a configuration with its arrays and tuples converted to plain numbers and lists.

    Examples:
        >>> slope = {"class_name": "__numpy__", "config": {"value": 0.5, "dtype": "float32"}}
        >>> plain_values({"negative_slope": slope, "shape": [2]})
        {'negative_slope': 0.5, 'shape': [2]}
    """
    if isinstance(config, list):
        return [plain_values(one) for one in config]
    if not isinstance(config, dict):
        return config
    if config.get("class_name") in ("__numpy__", "__tensor__"):
        return config["config"]["value"]
    if config.get("class_name") == "__tuple__":
        return [plain_values(one) for one in config["items"]]
    return {name: plain_values(value) for name, value in config.items()}


def layer_name(name: str) -> str:
    """Returns a name that Keras 3 allows: without the separator of paths."""
    return str(name).replace("/", "_")


def known_settings(cls: type[Any], settings: dict[str, Any], what: str) -> dict[str, Any]:
    """Returns the settings that a Keras 3 class has.

    Args:
        cls: The class.
        settings: The settings in the file, under their Keras 3 names.
        what: The file and the layer, for the message.

    Raises:
        OldFileError: If the class does not support a setting.
    """
    allowed = set(_arguments(cls))
    kept = {}
    for name, value in settings.items():
        if name in allowed:
            kept[name] = value
        elif name not in _WITHOUT_EFFECT and value not in _IDLE.get(name, ()):
            raise OldFileError(
                f"{what} has {name}={value!r}, which Keras 3's {cls.__name__} does not support. "
                "Write a Keras 3 layer that does the same, and pass "
                f"custom_objects={{{settings.get('name')!r}: YourLayer(...)}}."
            )
    return kept


def _arguments(cls: type[Any]) -> Iterator[str]:
    """Yields the names of the arguments of a class, including those of its bases."""
    for base in cls.__mro__:
        if "__init__" not in base.__dict__:
            continue
        arguments = inspect.signature(base.__dict__["__init__"]).parameters.values()
        yield from (p.name for p in arguments if p.kind is not p.VAR_KEYWORD)
        # Keras' base class accepts others only to raise an error.
        if base.__name__ == "Layer" or all(p.kind is not p.VAR_KEYWORD for p in arguments):
            return


def function_name(value: Any) -> Any:
    """Returns the name of a function in a configuration, and other values unchanged."""
    # A `.keras` file marks functions.
    if isinstance(value, dict) and value.get("class_name") == "function":
        return value.get("config")
    return value


def dtype_of_policy(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the setting `dtype` as a name, if it is a policy; otherwise nothing."""
    # The policies of 2.0 to 2.3 carried a loss scale, which does not affect the layer.
    dtype = settings.get("dtype")
    if isinstance(dtype, dict) and dtype.get("class_name") in _POLICIES:
        return {"dtype": dtype["config"]["name"]}
    return {}


@dataclasses.dataclass
class ConvertedLayer:
    """A layer in the file, and its Keras 3 layer.

    Args:
        name: Its name in the file.
        kind: The name of its class in the file.
        layer: The Keras 3 layer; None for a layer without weights that became an operation.
    """

    name: str
    kind: str
    layer: Any


def name_of(described: dict[str, Any]) -> str:
    """Returns the name of a layer in its file, or the name of its class."""
    config = described["config"]
    name = described.get("name") or (isinstance(config, dict) and config.get("name"))
    return str(name or described["class_name"])


def is_container(described: dict[str, Any]) -> bool:
    """Whether a configuration describes a model."""
    config = described["config"]
    if isinstance(config, list):
        return bool(described["class_name"] == "Sequential")
    return "layers" in config and isinstance(config["layers"], list)


def only_element(value: Any) -> Any:
    """Returns the element of a list with one element, and other values unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
