"""Model files: HDF5 of every release, and `.keras` of tf_keras and Keras 3."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lossscale.errors import LossScaleError, OldFileError
from lossscale.keras_common.saving import SHAPES
from lossscale_migration.array_roles import ArrayRole, roles_by_name, roles_by_number
from lossscale_migration.damaged_files import is_hdf5, reporting_errors, reporting_file_errors
from lossscale_migration.hdf5_reader import check_size, read_group
from lossscale_migration.numbered_arrays import begins_as_keras_own
from lossscale_migration.saved_optimizer import (
    FIRST_KIND,
    KERAS_3,
    NEW_KIND,
    OURS,
    SavedOptimizer,
    SavedSlot,
)

HDF5 = "HDF5 model"
NAMES_OF_COMPILE = {"acc", "accuracy", "ce", "crossentropy"}
"""Names of losses and metrics that `compile` interprets itself, by the outputs of the model."""

# Each level of nested models adds some ten levels of brackets.
_DEEPEST = 200

# Where Keras' own LossScaleOptimizer stores what has an effect. Its own step count and learning
# rate come first and stay 0; the last is the step count of the inner optimizer.
_PLACES_OF_KERAS_OWN = {"step_counter": 2, "dynamic_scale": 3, "iteration": 4}
# Before it is built: two counts and one or two learning rates.
_UNBUILT_KERAS_OWN = 4
# Classes that `compile` wraps in Keras' own LossScaleOptimizer.
_KERAS_DEFAULTS = {"initial_scale": 2.0**15, "dynamic_growth_steps": 2000}
_ZIP = ".keras model"


@dataclasses.dataclass
class ModelFile:
    """The training configuration in a model file.

    Args:
        path: The file.
        form: The kind of file.
        training: The arguments of `compile` in the file; None if the model was not compiled.
        optimizer: The configuration of the optimizer, or None.
        names: The names of the optimizer's arrays in order; in a `.keras` file, numbers.
        arrays: The optimizer's arrays, in that order.
        config: The JSON text that describes the model.
        keras_version: The version of Keras that wrote the file; "" if it is not in the file.
        own: What a `.keras` file of this library has beside the inner optimizer's arrays, by name.
    """

    path: str
    form: str
    training: dict[str, Any] | None
    optimizer: dict[str, Any] | None
    names: list[str]
    arrays: list[Any]
    config: str | bytes
    keras_version: str
    own: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration of the optimizer itself."""
        return dict((self.optimizer or {}).get("config") or {})

    @property
    def wrapped(self) -> bool:
        """Whether the optimizer has loss scaling."""
        return "inner_optimizer" in self.settings or "loss_scale" in self.settings

    @property
    def is_ours(self) -> bool:
        """Whether this library wrote it."""
        described = self.optimizer or {}
        names = (described.get("registered_name"), described.get("class_name"))
        return any(str(name).startswith("lossscale") for name in names)

    @property
    def era(self) -> str:
        """The releases that write such a file."""
        if self.optimizer is None:
            return "no optimizer"
        if self.is_ours:
            return OURS
        if "loss_scale" in self.settings:
            return "TensorFlow 2.0 to 2.3"
        inner = self.inner.get("config") or {}
        if self.wrapped and "dynamic" not in self.settings:
            return KERAS_3
        if "is_legacy_optimizer" in inner or "jit_compile" in inner:
            return NEW_KIND
        if "decay" in inner or ("learning_rate" in inner and "weight_decay" not in inner):
            return FIRST_KIND.replace("2.3", "2.4") if self.wrapped else FIRST_KIND
        return KERAS_3

    @property
    def of_keras_own(self) -> dict[str, Any]:
        """The scale and the steps that Keras' own LossScaleOptimizer wrote, by name."""
        if self.era != KERAS_3 or not self.wrapped or not begins_as_keras_own(self.arrays):
            return {}
        return {
            name: self.arrays[place]
            for name, place in _PLACES_OF_KERAS_OWN.items()
            if len(self.arrays) > _UNBUILT_KERAS_OWN
        }

    @property
    def inner(self) -> dict[str, Any]:
        """The configuration of the inner optimizer, with its class name."""
        settings = self.settings
        found = settings.get("inner_optimizer", settings.get("optimizer", self.optimizer))
        return dict(found or {})

    @property
    def inner_name(self) -> str:
        """The class name of the inner optimizer."""
        return str(self.inner.get("class_name", "")).rpartition(">")[2]


def read_model_file(path: str | Path) -> ModelFile:
    """Reads the training configuration of a model file, without creating the model.

    Raises:
        OldFileError: If it is missing, damaged, or not a model file.
    """
    text = str(path)
    if not Path(text).is_file():
        raise OldFileError(f"{text}: no such file.")
    if Path(text).stat().st_size == 0:
        raise OldFileError(f"{text}: the file is empty.")
    if is_hdf5(text):
        with reporting_file_errors(text):
            return _read_hdf5(text)
    if zipfile.is_zipfile(text):
        with reporting_file_errors(text):
            return _read_zip(text)
    raise OldFileError(f"{text}: neither an HDF5 file nor a .keras file, or it was cut short.")


def parsed(text: str | bytes) -> Any:
    """Returns the value of a JSON text in a model file.

    Raises:
        OldFileError: If its brackets are nested deeper than in any model.
    """
    deep = OldFileError(f"brackets in its configuration are nested more than {_DEEPEST} deep")
    try:
        found = json.loads(text)
    except RecursionError:
        raise deep from None
    level = [found]
    for _ in range(_DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return found
    raise deep


def _read_hdf5(path: str) -> ModelFile:
    import h5py

    with h5py.File(path, "r") as file:
        if "model_config" not in file.attrs:
            what = (
                "weights alone" if "layer_names" in file.attrs or "layers" in file else "no model"
            )
            raise OldFileError(
                f"{path}: contains {what}, no `model_config` and no optimizer. Migrate the file "
                "that model.save wrote."
            )
        # Read everything first: a truncated file is found before anything is built from it.
        read_group(file["model_weights"], os.path.getsize(path))
        config = file.attrs["model_config"]
        training = parsed(file.attrs.get("training_config", "null"))
        version = file.attrs.get("keras_version", "")
        names: list[str] = []
        arrays: list[Any] = []
        if "optimizer_weights" in file:
            names, arrays = named_arrays(file["optimizer_weights"])
    return ModelFile(
        path,
        HDF5,
        training,
        optimizer=(training or {}).get("optimizer_config"),
        names=names,
        arrays=arrays,
        config=config,
        keras_version=text_of(version),
    )


def named_arrays(group: Any) -> tuple[list[str], list[Any]]:
    """Returns the names and the values of the arrays in a group of an HDF5 file, in their order."""
    keys = [key for key in group.attrs if key.startswith("weight_names")]
    # Keras splits a long attribute, and numbers the parts.
    keys.sort(key=lambda key: int(key.removeprefix("weight_names") or 0))
    names = [text_of(name) for key in keys for name in group.attrs[key]]
    return names, [group[name][()] for name in names]


def layers_with_arrays(group: Any) -> list[str]:
    """Returns the names of the layers with arrays in a group of a `.keras` file, in their order."""

    def holds_arrays(group: Any) -> bool:
        return any(name == "vars" and len(group[name]) for name in group) or any(
            holds_arrays(group[name]) for name in group if name != "vars"
        )

    def number(name: str) -> int:
        # Layers of one class are numbered from the second on.
        last = name.rpartition("_")[2]
        return int(last) if last.isdecimal() else 0

    return sorted((name for name in group if holds_arrays(group[name])), key=number)


def text_of(value: Any) -> str:
    """Returns a text in an HDF5 file, which may be stored as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _read_zip(path: str) -> ModelFile:
    import h5py

    check_size(path)
    with zipfile.ZipFile(path) as archive:
        broken = archive.testzip()
        if broken is not None:
            raise OldFileError(f"{path}: damaged: {broken!r} inside does not match its checksum.")
        if "config.json" not in archive.namelist():
            raise OldFileError(f"{path}: a zip file without config.json, so not a Keras model.")
        config = archive.read("config.json")
        metadata = archive.read("metadata.json") if "metadata.json" in archive.namelist() else "{}"
        weights = io.BytesIO(archive.read("model.weights.h5"))
    training = parsed(config).get("compile_config")
    with h5py.File(weights, "r") as file:
        group, own = file.get("optimizer/vars", {}), {}
        if SHAPES in group:
            # A file of this library has names here, and the inner optimizer in a place of its own.
            own = {name: group[name][()] for name in group}
            group = file.get("optimizer/inner_optimizer/vars", {})
        names = sorted(group, key=int)
        arrays = [group[name][()] for name in names]
    return ModelFile(
        path,
        _ZIP,
        training,
        optimizer=_described_optimizer((training or {}).get("optimizer"), arrays),
        names=names,
        arrays=arrays,
        config=config,
        keras_version=str(parsed(metadata).get("keras_version", "")),
        own=own,
    )


def _described_optimizer(written: Any, arrays: Sequence[Any]) -> dict[str, Any] | None:
    """Returns the configuration of the optimizer whose arrays are in a `.keras` file.

    Under the policy mixed_float16, `compile` of Keras 3 wraps the optimizer in its own
    LossScaleOptimizer, but the file describes only the wrapped one.
    """
    if not isinstance(written, dict):
        return None
    settings = written.get("config")
    alone = isinstance(settings, dict) and not {"inner_optimizer", "loss_scale"} & set(settings)
    if not (alone and begins_as_keras_own(arrays)):
        return written
    return {
        "module": "keras.optimizers",
        "class_name": "LossScaleOptimizer",
        "config": {"inner_optimizer": written, **_KERAS_DEFAULTS},
        "registered_name": None,
    }


def saved_optimizer(model: ModelFile, variables: int | None = None) -> SavedOptimizer:
    """Returns the state of the optimizer in a model file of TensorFlow.

    Args:
        model: The file.
        variables: Number of trained variables, which a `.keras` file does not contain.

    Raises:
        OldFileError: If the arrays do not belong to this optimizer.
    """
    saved = SavedOptimizer(model.era, name=model.inner_name or None, wrapped=model.wrapped)
    for role, name, value in zip(
        _roles_of_arrays(model, variables), model.names, model.arrays, strict=True
    ):
        if role.name == "iterations":
            saved.iterations = int(value)
        elif role.variable is None:
            saved.others[role.name] = value
        else:
            saved.slots.append(
                SavedSlot([role.name], value, index=role.variable, label=f"{role.name} ({name})")
            )
    return saved


def _roles_of_arrays(model: ModelFile, variables: int | None) -> Sequence[ArrayRole]:
    if not model.names:
        return []
    if model.form == HDF5:
        return roles_by_name(model.names)
    settings: Mapping[str, Any] = model.inner.get("config") or {}
    count = len(model.names)
    if variables is None:
        variables = next(
            (n for n in range(count) if roles_by_number(model.inner_name, settings, n, count)), 0
        )
    roles = roles_by_number(model.inner_name, settings, variables, count)
    if roles is None:
        raise OldFileError(
            f"{model.path}: contains {count} arrays of the optimizer {model.inner_name!r}, which "
            f"do not fit {variables} variables."
        )
    return roles


def created_model(
    file: ModelFile, keras: Any, title: str, rewrite: Callable[[str, Path], Any] | None = None
) -> Any:
    """Returns the model in a file, not compiled.

    Args:
        file: The file.
        keras: The module `keras` or `tf_keras`, which builds the model.
        title: Its name in messages.
        rewrite: Writes a copy of the file that it can read, if it cannot read the file itself.

    Raises:
        OldFileError: If it cannot build the model.
    """
    suffix = ".h5" if file.form == HDF5 else ".keras"
    with (
        reporting_errors(f"{file.path}: {title} cannot create its model", LossScaleError),
        tempfile.TemporaryDirectory() as folder,
    ):
        path = Path(file.path)
        # Keras goes by the suffix of the file name, which may be wrong.
        if rewrite is not None or path.suffix != suffix:
            path = Path(folder, f"model{suffix}")
            (rewrite or shutil.copyfile)(file.path, path)
        return keras.models.load_model(path, compile=False)


def compile_arguments(
    file: ModelFile, given: Mapping[str, Any], read: Callable[[str, Any], Any], title: str
) -> dict[str, Any]:
    """Returns the losses and metrics to compile a model with.

    Args:
        file: The training configuration in the file.
        given: The caller's replacements, by name.
        read: Creates the losses or the metrics of a name from their configuration.
        title: The name of the framework in messages.

    Raises:
        OldFileError: If the framework does not have one.
    """
    training = file.training or {}
    arguments = dict(given)
    for name in ("loss", "metrics", "weighted_metrics"):
        if name not in given:
            config = training.get(name)
            with reporting_errors(
                f"{file.path}: {title} cannot create its {name}, {config!r}",
                end=f". Pass {name}=... instead.",
            ):
                arguments[name] = read(name, config)
    if training.get("loss_weights") is not None:
        arguments["loss_weights"] = training["loss_weights"]
    return arguments
