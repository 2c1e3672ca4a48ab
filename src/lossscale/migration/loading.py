"""Loads a model file of any release into Keras 3, with the state of its optimizer."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lossscale import registry
from lossscale.errors import ArgumentError, LossScaleError, OldFileError, first_line
from lossscale.migration.compiling import UNSET, compile_arguments
from lossscale.migration.damaged_files import as_old_file_error, check_file
from lossscale.migration.layer_weights import load_old_model
from lossscale.migration.models import ModelFile, read_model_file, saved_optimizer
from lossscale.migration.restore_targets import target_for
from lossscale.migration.restoring import RestorePlan
from lossscale.migration.saved_optimizer import KERAS_3, OURS
from lossscale.migration.tf_keras_models import load_tf_keras_model


def load_model(
    path: str | Path,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    loss: Any = UNSET,
    metrics: Any = UNSET,
    weighted_metrics: Any = UNSET,
    framework: Literal["keras", "tf_keras"] = "keras",
    check_first: bool = False,
) -> Any:
    """Loads a model that any release of TensorFlow or Keras saved with a loss scale optimizer.

    The model is a Keras 3 model, on any backend, or a tf_keras model. It is compiled with a
    `lossscale.LossScaleOptimizer`, which gets the state in the file: slots and iterations, and the
    loss scale if Keras 3 wrote the file. TensorFlow did not write the loss scale and its counter
    to model files, so they start from their initial values. Under the policy mixed_float16, Keras 3
    wraps the optimizer in its own loss scale optimizer; such files load too.

    Args:
        path: An HDF5 file, or a `.keras` file of tf_keras or Keras 3.
        custom_objects: Classes and functions that are not part of Keras, by name. A class with the
            name of the optimizer replaces `lossscale.LossScaleOptimizer`.
        loss: The loss for `compile`, instead of the one in the file.
        metrics: The metrics, instead of those in the file.
        weighted_metrics: The weighted metrics, instead of those in the file.
        framework: "keras" for a Keras 3 model, "tf_keras" for a tf_keras model. A file of Keras 3
            loads only into Keras 3.
        check_first: Whether to read the file with `check_file` first, so that a damaged HDF5 file,
            which can crash this program, raises an error. It is False by default because it starts
            another interpreter, which takes about half a second, and reads the file twice.

    Returns:
        The compiled model.

    Raises:
        OldFileError: If the file is missing or damaged, has no loss scale optimizer, or Keras 3
            cannot build its model.
    """
    known = [each.root for each in registry.KERASES]
    if framework not in known:
        raise ArgumentError(
            f"`framework` must be {' or '.join(map(repr, known))}. "
            f"Received: framework={framework!r}."
        )
    if check_first:
        check_file(path)
    file = read_model_file(path)
    own = dict(custom_objects or {})
    given = {"loss": loss, "metrics": metrics, "weighted_metrics": weighted_metrics}
    with as_old_file_error(path, "cannot be loaded"):
        check_has_scaling(file)
        if framework == "tf_keras":
            changed = {name: value for name, value in given.items() if value is not UNSET}
            return load_tf_keras_model(file, own, changed)
        return _load_keras_model(file, own, given)


def _load_keras_model(file: ModelFile, own: dict[str, Any], given: dict[str, Any]) -> Any:
    import keras

    with keras.saving.custom_object_scope(own):
        optimizer = _optimizer(file, own)
        model, trained = _model(file, own)
        model.compile(optimizer, **compile_arguments(file, model, given, own))
    _restore(file, optimizer, model, trained)
    return model


def check_has_scaling(file: ModelFile) -> None:
    """Raises unless the model was compiled with a loss scale optimizer."""
    if file.training is None:
        raise OldFileError(
            f"{file.path}: the model was saved without a training configuration, so without an "
            "optimizer."
        )
    if not file.optimizer:
        raise OldFileError(f"{file.path}: its training configuration does not name an optimizer.")
    if not file.wrapped:
        raise OldFileError(
            f"{file.path}: its optimizer, {file.inner_name}, has no loss scaling. Load the model "
            "with keras.saving.load_model."
        )


def _optimizer(file: ModelFile, own: dict[str, Any]) -> Any:
    from lossscale.keras import LossScaleOptimizer

    written = (file.optimizer or {}).get("class_name")
    try:
        if file.era == OURS:
            import keras

            return keras.saving.deserialize_keras_object(
                {**(file.optimizer or {}), "registered_name": _registered_name(file)}
            )
        return own.get(str(written), LossScaleOptimizer).from_config(file.settings, own)
    except (LossScaleError, ValueError, TypeError, KeyError) as error:
        raise OldFileError(f"{file.path}: cannot create its optimizer: {error}") from error


def _registered_name(file: ModelFile) -> Any:
    # HDF5 files store it in place of the class name.
    described = file.optimizer or {}
    return described.get("registered_name") or described.get("class_name")


def _model(file: ModelFile, own: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Returns the model, and its trained variables in the order of the file."""
    if file.era in (KERAS_3, OURS):
        model = _model_of_keras_3(file)
        return model, list(model.trainable_variables)
    return load_old_model(file.path, own)


def _model_of_keras_3(file: ModelFile) -> Any:
    import keras

    try:
        with tempfile.TemporaryDirectory() as folder:
            return keras.saving.load_model(_named_for_keras(file, Path(folder)), compile=False)
    except LossScaleError:
        raise
    # A user's layer can raise any exception.
    except Exception as error:
        text = first_line(error)
        raise OldFileError(f"{file.path}: Keras 3 cannot create its model: {text}") from error


def _named_for_keras(file: ModelFile, folder: Path) -> Path:
    """Returns the file, or a copy with the ending that Keras needs."""
    suffix = ".keras" if zipfile.is_zipfile(file.path) else ".h5"
    if Path(file.path).suffix == suffix:
        return Path(file.path)
    copy = folder / f"model{suffix}"
    shutil.copyfile(file.path, copy)
    return copy


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
    plan = RestorePlan(file.path, "optimizer", saved, target_for(optimizer, file.path))
    plan.prepare(None, own_order)
    plan.carry_out()


def _restore_keras_3(file: ModelFile, optimizer: Any, trained: list[Any]) -> None:
    arrays, inner = file.arrays, optimizer.inner_optimizer
    # An optimizer that was saved before it was built has no slots in the file. Keras' own class
    # then has no loss scale either.
    if file.era == KERAS_3 and not file.of_keras_own:
        return
    # Slots have the shapes of variables. Without any, the optimizer may never have been built.
    unbuilt = len(arrays) == len(optimizer.variables) or optimizer._can_load(len(arrays))
    if any(array.shape for array in arrays) or not unbuilt:
        optimizer.build(trained)
    # In an HDF5 file of this library the loss scale and the counters come first.
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    if [tuple(array.shape) for array in arrays] == shapes:
        optimizer.set_weights(arrays)
    elif optimizer._can_load(len(arrays)):
        optimizer._load_inner({str(number): array for number, array in enumerate(arrays)})
    else:
        raise OldFileError(
            f"{file.path}: contains {len(arrays)} arrays of the optimizer, which has "
            f"{len(inner.variables)}."
        )
    if file.own:
        optimizer._set_own_values(file.own)
