"""Loads a model file of any release into Keras 3 or tf_keras, with the state of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lossscale import registry
from lossscale.errors import ArgumentError, OldFileError
from lossscale_migration.damaged_files import check_file, reporting_file_errors
from lossscale_migration.models import ModelFile, read_model_file

UNSET: Any = object()


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
    given = {name: value for name, value in given.items() if value is not UNSET}
    with reporting_file_errors(path, "cannot be loaded"):
        _check_has_scaling(file)
        if framework == "keras":
            from lossscale_migration.keras_models import load_keras_model

            return load_keras_model(file, own, given)
        tf_keras_models = registry.package("lossscale_migration.tf_keras_models")
        return tf_keras_models.load_tf_keras_model(file, own, given)


def _check_has_scaling(file: ModelFile) -> None:
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
