"""Translates the losses and metrics of a compiled Keras 2 model to Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lossscale.errors import OldFileError
from lossscale.migration.models import ModelFile

UNSET: Any = object()

# Names that Keras 3 no longer has.
_RENAMED = {
    "cosine_proximity": "cosine_similarity",
    "huber_loss": "huber",
    "kullback_leibler_divergence": "kl_divergence",
    "logcosh": "log_cosh",
}
# Names that `compile` itself interprets.
_OF_COMPILE = {"acc", "accuracy", "ce", "crossentropy"}


def compile_arguments(
    file: ModelFile, model: Any, given: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    """Returns the losses and metrics to compile a model with.

    Args:
        file: The training configuration in the file.
        model: The model.
        given: The caller's replacements, by name; UNSET to use the file.
        own: The caller's classes and functions, by name.

    Raises:
        OldFileError: If Keras 3 does not have one.
    """
    training = file.training or {}
    arguments: dict[str, Any] = {}
    readers = {"loss": _loss, "metrics": _metric, "weighted_metrics": _metric}
    for name, reader in readers.items():
        if given[name] is not UNSET:
            arguments[name] = given[name]
            continue
        try:
            config = _without_outputs(training.get(name), list(getattr(model, "output_names", [])))
            arguments[name] = _deserialized(config, reader, own)
        # A user's class can raise any exception.
        except Exception as error:
            raise OldFileError(
                f"{file.path}: Keras 3 cannot create its {name}, {training.get(name)!r}: {error}. "
                f"Pass {name}=... instead."
            ) from error
        nested = arguments[name]
        if isinstance(nested, list) and len(nested) == 1 and isinstance(nested[0], list):
            # TensorFlow wrote one list per output.
            arguments[name] = nested[0] if len(model.outputs) == 1 else nested
    if training.get("loss_weights") is not None:
        arguments["loss_weights"] = training["loss_weights"]
    return arguments


def _without_outputs(config: Any, outputs: list[str]) -> Any:
    """Returns metrics without the prefix that Keras adds, the name of the output."""
    if len(outputs) < 2:
        return config
    if isinstance(config, dict) and set(config) <= set(outputs):
        return {name: _without_prefix(one, name) for name, one in config.items()}
    if isinstance(config, list) and len(config) == len(outputs):
        return [_without_prefix(one, name) for one, name in zip(config, outputs, strict=True)]
    return config


def _without_prefix(config: Any, output: str) -> Any:
    if isinstance(config, list):
        return [_without_prefix(one, output) for one in config]
    settings = config.get("config") if isinstance(config, dict) else None
    if isinstance(settings, dict) and isinstance(settings.get("name"), str):
        name = settings["name"].removeprefix(f"{output}_")
        return {**config, "config": {**settings, "name": name}}
    return config


def _deserialized(config: Any, reader: Callable[[Any], Any], own: dict[str, Any]) -> Any:
    if isinstance(config, dict) and "class_name" in config:
        settings = config.get("config")
        if config["class_name"] == "function":
            return _deserialized(settings, reader, own)
        settings = dict(settings or {})
        if settings.get("reduction") == "auto":
            # Keras 3 has the same function under this name only.
            settings["reduction"] = "sum_over_batch_size"
        if not config["class_name"].endswith("Wrapper"):
            # Keras 2 wrote the function of a class; Keras 3 knows it.
            settings.pop("fn", None)
        return reader({**config, "config": settings})
    if isinstance(config, dict):
        return {name: _deserialized(item, reader, own) for name, item in config.items()}
    if isinstance(config, (list, tuple)):
        return [_deserialized(item, reader, own) for item in config]
    if isinstance(config, str):
        if config in own:
            # `compile` would look it up later, when custom_objects are no longer known.
            return own[config]
        name = _RENAMED.get(config, config)
        if name in _OF_COMPILE:
            return name
        known = reader(name)
        # Under its old name, if Keras 3 finds it.
        return known if reader is _metric and name != config else name
    return config


def _loss(config: Any) -> Any:
    import keras

    return keras.losses.get(config)


def _metric(config: Any) -> Any:
    import keras

    if isinstance(config, str):
        return _metric_function(config)
    if config["class_name"] == "MeanMetricWrapper" and isinstance(config["config"].get("fn"), str):
        settings = config["config"]
        function = _metric_function(_RENAMED.get(settings["fn"], settings["fn"]))
        return keras.metrics.MeanMetricWrapper(function, name=settings.get("name"))
    found = keras.metrics.deserialize(config)
    if not callable(found):
        raise ValueError(f"no such metric: {config['class_name']!r}")
    return found


def _metric_function(name: str) -> Any:
    """Returns the function with a name; in Keras 2 every loss was a metric as well."""
    import keras

    try:
        return keras.metrics.get(name)
    except ValueError:
        return keras.losses.get(name)
