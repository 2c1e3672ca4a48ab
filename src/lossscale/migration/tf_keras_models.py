"""Loads a model file into tf_keras, with the state of its optimizer.

tf_keras builds the model. Its loader would also create the optimizer, but loses every loss scale,
and in HDF5 files the state of the new optimizers.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lossscale.errors import ArgumentError, LossScaleError, OldFileError, first_line
from lossscale.migration.layer_weights import holds_arrays, turn
from lossscale.migration.models import HDF5, ModelFile, saved_optimizer
from lossscale.migration.restore_targets import target_for
from lossscale.migration.restoring import RestorePlan
from lossscale.migration.saved_optimizer import KERAS_3, OURS
from lossscale.packages import require

# Their values depend on the outputs of the model.
_KNOWN_TO_COMPILE = {"accuracy", "acc", "crossentropy", "ce"}


def load_tf_keras_model(
    file: ModelFile, custom_objects: Mapping[str, Any], given: Mapping[str, Any]
) -> Any:
    """Loads a model that TensorFlow or tf_keras saved with a loss scale optimizer.

    Args:
        file: The training configuration in the file.
        custom_objects: Classes and functions that are not part of tf_keras, by name.
        given: Replacements for the `loss`, `metrics` and `weighted_metrics` in the file.

    Returns:
        The compiled model.

    Raises:
        OldFileError: If tf_keras cannot build the model, or the state belongs to another optimizer.
        MissingPackageError: If tf_keras is not installed.
    """
    require("tf_keras", "tensorflow", purpose='framework="tf_keras"')
    import tf_keras

    if file.era == KERAS_3 or _keras_version(file.path).startswith("3."):
        raise OldFileError(
            f"{file.path}: Keras 3 wrote this file, which tf_keras cannot read. Leave out "
            "framework='tf_keras'."
        )
    with tf_keras.saving.custom_object_scope(dict(custom_objects)):
        model = _model(tf_keras, file)
        optimizer = _optimizer(file, dict(custom_objects))
        arguments = _compile_arguments(tf_keras, file, given, set(custom_objects))
        model.compile(optimizer, **arguments)
    _restore(file, optimizer, list(model.trainable_variables))
    return model


def _keras_version(path: str) -> str:
    """Returns the version of Keras that wrote a file, "" if it is not in the file."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if "metadata.json" not in archive.namelist():
                return ""
            return str(json.loads(archive.read("metadata.json")).get("keras_version", ""))
    import h5py

    with h5py.File(path, "r") as file:
        version = file.attrs.get("keras_version", "")
    return version.decode() if isinstance(version, bytes) else str(version)


def _model(tf_keras: Any, file: ModelFile) -> Any:
    suffix = ".keras" if zipfile.is_zipfile(file.path) else ".h5"
    of_2_12 = suffix == ".keras" and _keras_version(file.path).startswith("2.12.")
    try:
        if Path(file.path).suffix == suffix and not of_2_12:
            return tf_keras.models.load_model(file.path, compile=False)
        with tempfile.TemporaryDirectory() as folder:
            # tf_keras goes by the suffix of the file name, which may be wrong.
            named = Path(folder, f"model{suffix}")
            (rewrite if of_2_12 else shutil.copyfile)(file.path, named)
            return tf_keras.models.load_model(named, compile=False)
    except LossScaleError:
        raise
    # A user's layer can raise any exception.
    except Exception as error:
        raise OldFileError(
            f"{file.path}: tf_keras cannot create its model: {first_line(error)}"
        ) from error


def _optimizer(file: ModelFile, own: dict[str, Any]) -> Any:
    from lossscale.tf_keras import LossScaleOptimizer

    described = file.optimizer or {}
    written = described.get("registered_name") or described.get("class_name")
    try:
        # The inner optimizer decides which of the two families this is.
        cls = own.get(str(written), _registered(written) or LossScaleOptimizer)
        return cls.from_config(file.settings, own)
    # A user's optimizer can raise any exception.
    except Exception as error:
        raise OldFileError(
            f"{file.path}: cannot create its optimizer: {first_line(error)}"
        ) from error


def _registered(name: Any) -> Any:
    """Returns the class of this library for a name in the file, also for the older optimizer."""
    import tf_keras

    found = tf_keras.saving.get_registered_object(str(name))
    return found if str(name).startswith("lossscale") else None


def _compile_arguments(
    tf_keras: Any, file: ModelFile, given: Mapping[str, Any], own: set[str]
) -> dict[str, Any]:
    training = file.training or {}
    arguments: dict[str, Any] = {}
    for name, module in (
        ("loss", tf_keras.losses),
        ("metrics", tf_keras.metrics),
        ("weighted_metrics", tf_keras.metrics),
    ):
        if name in given:
            arguments[name] = given[name]
            continue
        try:
            arguments[name] = _made(training.get(name), module, own)
        # A user's class can raise any exception.
        except Exception as error:
            raise OldFileError(
                f"{file.path}: tf_keras cannot create its {name}, {training.get(name)!r}: "
                f"{first_line(error)}. Pass {name}=... instead."
            ) from error
    if training.get("loss_weights") is not None:
        arguments["loss_weights"] = training["loss_weights"]
    return arguments


def _made(config: Any, module: Any, own: set[str]) -> Any:
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
    if isinstance(config, str) and config not in _KNOWN_TO_COMPILE:
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
        try:
            optimizer.set_weights(file.arrays)
        except ArgumentError as error:
            raise OldFileError(f"{file.path}: {error}") from error
        return
    saved = saved_optimizer(file, len(trained))
    plan = RestorePlan(file.path, "optimizer", saved, target_for(optimizer, file.path))
    plan.prepare(None, trained)
    plan.carry_out()
    if file.own:
        optimizer._set_own_values(file.own)


_LAYERS_THEN, _LAYERS_NOW = "_layer_checkpoint_dependencies", "layers"


def rewrite(path: str, target: Path) -> None:
    """Converts the model in a `.keras` file of TensorFlow 2.12 for later releases.

    2.12 was the first release with this format. It used other module names for its classes, and
    another name for the layers of a model, and saved layers with weights twice.

    Args:
        path: The file.
        target: The file to write, with the model and its weights, but no optimizer state.
    """
    import h5py

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
    # Layers of one class are numbered.
    with_arrays = sorted((name for name in group if holds_arrays(group[name])), key=turn)
    numbers: dict[str, int] = {}
    for name in with_arrays:
        kind = re.sub(r"_\d+$", "", name)
        number = numbers.get(kind, 0)
        numbers[kind] = number + 1
        _copy(group[name], target.create_group(f"{kind}_{number}" if number else kind))
