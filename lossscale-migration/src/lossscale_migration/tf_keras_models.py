"""Loads a model file into tf_keras, with the state of its optimizer.

tf_keras builds the model. Its loader would also create the optimizer, but loses every loss scale,
and in HDF5 files the state of the new optimizers.
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import h5py
import tf_keras

from lossscale.errors import OldFileError
from lossscale.tf_keras import LossScaleOptimizer
from lossscale_migration.damaged_files import reporting_errors
from lossscale_migration.models import (
    HDF5,
    NAMES_OF_COMPILE,
    ModelFile,
    compile_arguments,
    created_model,
    layers_with_arrays,
    saved_optimizer,
)
from lossscale_migration.restoring import restore_optimizer
from lossscale_migration.saved_optimizer import KERAS_3, OURS


def load_tf_keras_model(file: ModelFile, own: dict[str, Any], given: dict[str, Any]) -> Any:
    """Loads a model that TensorFlow or tf_keras saved with a loss scale optimizer.

    Args:
        file: The training configuration in the file.
        own: The caller's classes and functions, by name.
        given: Replacements for the `loss`, `metrics` and `weighted_metrics` in the file.

    Returns:
        The compiled model.

    Raises:
        OldFileError: If tf_keras cannot build the model, or the state belongs to another optimizer.
    """
    if file.era == KERAS_3 or file.keras_version.startswith("3."):
        raise OldFileError(
            f"{file.path}: Keras 3 wrote this file, which tf_keras cannot read. Leave out "
            "framework='tf_keras'."
        )

    def read(name: str, config: Any) -> Any:
        module = tf_keras.losses if name == "loss" else tf_keras.metrics
        return _made(config, module, own)

    is_of_2_12 = file.form != HDF5 and file.keras_version.startswith("2.12.")
    with tf_keras.saving.custom_object_scope(own):
        model = created_model(file, tf_keras, "tf_keras", rewrite if is_of_2_12 else None)
        optimizer = _optimizer(file, own)
        model.compile(optimizer, **compile_arguments(file, given, read, "tf_keras"))
    _restore(file, optimizer, list(model.trainable_variables))
    return model


def _optimizer(file: ModelFile, own: dict[str, Any]) -> Any:
    described = file.optimizer or {}
    written = str(described.get("registered_name") or described.get("class_name"))
    with reporting_errors(f"{file.path}: cannot create its optimizer"):
        # The inner optimizer decides which of the two families this is.
        cls = LossScaleOptimizer
        if written.startswith("lossscale"):
            # Or the class of this library for the older optimizer.
            cls = tf_keras.saving.get_registered_object(written) or cls
        return own.get(written, cls).from_config(file.settings, own)


def _made(config: Any, module: Any, own: dict[str, Any]) -> Any:
    """Creates the losses or metrics of a description, which may be nested by output."""
    if isinstance(config, dict) and "class_name" in config:
        # Releases before 2.13 wrote no module.
        made = module.deserialize(config, use_legacy_format="module" not in config)
        # For a function, only its name is used.
        return _made(made, module, own) if isinstance(made, str) else made
    if isinstance(config, dict):
        return {name: _made(item, module, own) for name, item in config.items()}
    if isinstance(config, (list, tuple)):
        return [_made(item, module, own) for item in config]
    if isinstance(config, str) and config not in NAMES_OF_COMPILE:
        # tf_keras would look it up at the first step, when custom objects are no longer known.
        made = module.get(config)
        return made if config in own else config
    return config


def _restore(file: ModelFile, optimizer: Any, trained: list[Any]) -> None:
    if not file.arrays:
        return
    if file.era == OURS and file.form == HDF5:
        # The optimizer's own variables; those of a new optimizer are followed by the loss scale.
        optimizer._build(trained)
        with reporting_errors(file.path):
            optimizer.set_weights(file.arrays)
        return
    saved = saved_optimizer(file, len(trained))
    restore_optimizer(file.path, saved, optimizer, trained)
    if file.own:
        optimizer.load_own_variables(file.own)


_LAYERS_THEN, _LAYERS_NOW = "_layer_checkpoint_dependencies", "layers"


def rewrite(path: str, target: Path) -> None:
    """Converts the model in a `.keras` file of TensorFlow 2.12 for later releases.

    2.12 was the first release with this format. It used other module names for its classes, and
    another name for the layers of a model, and saved layers with weights twice.

    Args:
        path: The file.
        target: The file to write, with the model and its weights, but no optimizer state.
    """
    with zipfile.ZipFile(path) as then, zipfile.ZipFile(target, "w") as now:
        for name in ("metadata.json", "config.json"):
            text = then.read(name).decode()
            now.writestr(name, text.replace('"keras.engine.', '"keras.src.engine.'))
        stored, written = io.BytesIO(then.read("model.weights.h5")), io.BytesIO()
        with h5py.File(stored, "r") as weights, h5py.File(written, "w") as rearranged:
            _copy(weights, rearranged)
        now.writestr("model.weights.h5", written.getvalue())


def _copy(group: Any, target: Any) -> None:
    for name in group:
        if name in ("vars", "optimizer"):
            if name == "vars":
                group.copy(name, target)
        elif name == _LAYERS_THEN:
            _copy_layers(group[name], target.create_group(_LAYERS_NOW))
        else:
            _copy(group[name], target.create_group(name))


def _copy_layers(group: Any, target: Any) -> None:
    numbers: dict[str, int] = {}
    for name in layers_with_arrays(group):
        kind = re.sub(r"_\d+$", "", name)
        number = numbers.get(kind, 0)
        numbers[kind] = number + 1
        _copy(group[name], target.create_group(f"{kind}_{number}" if number else kind))
