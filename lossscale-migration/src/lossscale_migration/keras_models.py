"""Loads a model file of any release into Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from lossscale.errors import OldFileError
from lossscale.keras import LossScaleOptimizer
from lossscale_migration.damaged_files import reporting_errors
from lossscale_migration.layer_weights import load_old_model
from lossscale_migration.models import (
    NAMES_OF_COMPILE,
    ModelFile,
    compile_arguments,
    created_model,
    saved_optimizer,
)
from lossscale_migration.numbered_arrays import can_load, load_arrays
from lossscale_migration.restoring import restore_optimizer
from lossscale_migration.saved_optimizer import KERAS_3, OURS

# Names that Keras 3 no longer has.
_RENAMED = {
    "cosine_proximity": "cosine_similarity",
    "huber_loss": "huber",
    "kullback_leibler_divergence": "kl_divergence",
    "logcosh": "log_cosh",
}


def load_keras_model(file: ModelFile, own: dict[str, Any], given: dict[str, Any]) -> Any:
    """Loads a model with its optimizer.

    Args:
        file: The training configuration in the file.
        own: The caller's classes and functions, by name.
        given: Replacements for the `loss`, `metrics` and `weighted_metrics` in the file.

    Returns:
        The compiled model.

    Raises:
        OldFileError: If Keras 3 cannot build the model, or the state belongs to another optimizer.
    """
    with keras.saving.custom_object_scope(own):
        optimizer = _optimizer(file, own)
        if file.era in (KERAS_3, OURS):
            model = created_model(file, keras, "Keras 3")
            trained = list(model.trainable_variables)
        else:
            model, trained = load_old_model(file, own)

        def read(name: str, config: Any) -> Any:
            return _losses_or_metrics(name, config, model, own)

        model.compile(optimizer, **compile_arguments(file, given, read, "Keras 3"))
    _restore(file, optimizer, model, trained)
    return model


def _optimizer(file: ModelFile, own: dict[str, Any]) -> Any:
    described = file.optimizer or {}
    written = described.get("class_name")
    with reporting_errors(f"{file.path}: cannot create its optimizer", ImportError, Warning):
        if file.era == OURS:
            # HDF5 files store it in place of the class name.
            name = described.get("registered_name") or written
            return keras.saving.deserialize_keras_object({**described, "registered_name": name})
        return own.get(str(written), LossScaleOptimizer).from_config(file.settings, own)


def _restore(file: ModelFile, optimizer: Any, model: Any, trained: list[Any]) -> None:
    if not file.arrays:
        return
    if file.era in (KERAS_3, OURS):
        _restore_keras_3(file, optimizer, trained)
        return
    saved = saved_optimizer(file, len(trained))
    # Keras 3 passes the variables to the optimizer in the order of its model.
    own_order = list(model.trainable_variables)
    turns = {id(variable): turn for turn, variable in enumerate(own_order)}
    for slot in saved.slots:
        if slot.index is not None and slot.index < len(trained):
            slot.index = turns[id(trained[slot.index])]
    optimizer.build(own_order)
    restore_optimizer(file.path, saved, optimizer, own_order)


def _restore_keras_3(file: ModelFile, optimizer: Any, trained: list[Any]) -> None:
    arrays, inner = file.arrays, optimizer.inner_optimizer
    # An optimizer that was saved before it was built has no slots in the file. Keras' own class
    # then has no loss scale either.
    if file.era == KERAS_3 and not file.of_keras_own:
        return
    # Slots have the shapes of variables. Without any, the optimizer may never have been built.
    unbuilt = len(arrays) == len(optimizer.variables) or can_load(optimizer, len(arrays))
    if any(array.shape for array in arrays) or not unbuilt:
        optimizer.build(trained)
    # In an HDF5 file of this library the loss scale and the counters come first.
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    if file.era == OURS and [tuple(array.shape) for array in arrays] == shapes:
        optimizer.set_weights(arrays)
    elif can_load(optimizer, len(arrays)):
        load_arrays(optimizer, list(arrays))
    else:
        raise OldFileError(
            f"{file.path}: contains {len(arrays)} arrays of the optimizer, which has "
            f"{len(inner.variables)}."
        )
    if file.own:
        optimizer.load_own_variables(file.own)


def _losses_or_metrics(name: str, config: Any, model: Any, own: dict[str, Any]) -> Any:
    config = _without_outputs(config, list(getattr(model, "output_names", [])))
    made = _deserialized(config, keras.losses.get if name == "loss" else _metric, own)
    nested = isinstance(made, list) and len(made) == 1 and isinstance(made[0], list)
    # TensorFlow wrote one list per output.
    return made[0] if nested and len(model.outputs) == 1 else made


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
        if name in NAMES_OF_COMPILE:
            return name
        known = reader(name)
        # Under its old name, if Keras 3 finds it.
        return known if reader is _metric and name != config else name
    return config


def _metric(config: Any) -> Any:
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
    try:
        return keras.metrics.get(name)
    except ValueError:
        return keras.losses.get(name)
