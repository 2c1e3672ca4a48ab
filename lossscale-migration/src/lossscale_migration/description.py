"""Describes what a file contains."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lossscale.arguments import arguments_from_config, rule_from_arguments
from lossscale.errors import LossScaleError, OldFileError
from lossscale.rules import DynamicScale, FixedScale
from lossscale_migration.damaged_files import is_hdf5, reporting_file_errors
from lossscale_migration.graph import Graph, holds_graph, read_graph
from lossscale_migration.models import ModelFile, read_model_file, saved_optimizer
from lossscale_migration.saved_optimizer import (
    KERAS_3,
    OURS,
    SavedOptimizer,
    find_optimizers,
    read_optimizer,
)

_NOT_SLOTS = {
    "dynamic_scale",
    "iteration",
    "last_step_skipped",
    "learning_rate",
    "step_counter",
    "steps_skipped",
}


@dataclasses.dataclass(frozen=True)
class OptimizerDescription:
    """A loss scale optimizer in a file, and its settings.

    Args:
        path: Its location in the file.
        era: The releases that write such a file.
        optimizer: Name of the inner optimizer; None if it is not in the file.
        scaling: "dynamic", "fixed", "none", or a description if the file is not clear.
        scale: The loss scale: the current one, or the initial one if the file has only that. None
            if the file has none.
        good_steps: Finite steps since the scale last changed; None if not in the file.
        iterations: Training steps; None if not in the file.
        learning_rate: None if it is not in the file, or a schedule.
        settings: The other hyperparameters in the file, by name.
        slots: Number of arrays by the name of the slot.
    """

    path: str
    era: str
    optimizer: str | None
    scaling: str
    scale: float | None
    good_steps: int | None
    iterations: int | None
    learning_rate: float | None
    settings: Mapping[str, Any]
    slots: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class FileDescription:
    """The optimizers in a file, as `describe_file` returns them.

    Args:
        path: The file.
        form: `checkpoint`, `HDF5 model` or `.keras model`.
        optimizers: The optimizers in it.
    """

    path: str
    form: str
    optimizers: tuple[OptimizerDescription, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the description as a JSON-ready dictionary."""
        return dataclasses.asdict(self)


def is_checkpoint(path: str | Path) -> bool:
    """Whether a path is that of a checkpoint, and not of a model file, judged by its files."""
    if Path(path).is_file() and not str(path).endswith(".index") and ".data-" not in str(path):
        return is_hdf5(path) and holds_graph(path)
    return not Path(path).is_file() or Path(path).suffix not in (".keras", ".h5", ".hdf5")


def describe_file(path: str | Path) -> FileDescription:
    """Describes the optimizers in a file. It reads the whole file.

    Args:
        path: The prefix of a checkpoint, its `.index` file, a folder with checkpoints, or a model
            file: HDF5 or `.keras`.

    Returns:
        The description.

    Raises:
        OldFileError: If the file is missing, damaged or of another kind, or has no optimizer.
    """
    with reporting_file_errors(path):
        return _described(path)


def _described(path: str | Path) -> FileDescription:
    if is_checkpoint(path):
        graph = read_graph(path)
        found = tuple(_of_checkpoint(graph, at, node) for at, node in find_optimizers(graph))
        return FileDescription(graph.path, "checkpoint", found)
    file = read_model_file(path)
    if not file.optimizer:
        raise OldFileError(f"{file.path}: the model was saved without an optimizer.")
    return FileDescription(file.path, file.form, (_of_model(file),))


def _of_checkpoint(graph: Graph, path: str, node: Any) -> OptimizerDescription:
    saved = read_optimizer(graph, node)
    scaling = "none or fixed"
    if saved.scale is not None:
        scaling = "dynamic"
    elif saved.loss_scale:
        scaling = "of its own kind"
    elif saved.wrapped:
        scaling = "fixed"
    return OptimizerDescription(
        path=path,
        era=saved.era,
        optimizer=saved.name,
        scaling=scaling,
        scale=saved.scale,
        good_steps=saved.good_steps,
        iterations=saved.iterations,
        learning_rate=saved.learning_rate,
        settings=saved.settings,
        slots=_counted(saved),
    )


def _counted(saved: SavedOptimizer) -> dict[str, int]:
    return dict(collections.Counter(slot.names[0].lstrip("_") for slot in saved.slots))


def _of_model(file: ModelFile) -> OptimizerDescription:
    settings = dict(file.inner.get("config") or {})
    rate = settings.pop("learning_rate", settings.pop("lr", None))
    if isinstance(rate, dict):
        # A schedule has several numbers.
        settings["learning_rate"] = rate.get("class_name")
    newer = file.era in (KERAS_3, OURS)
    saved = SavedOptimizer(file.era) if newer else saved_optimizer(file)
    scaling, scale = _rule_of(file)
    own = file.own or file.of_keras_own
    iterations = own.get("iteration", saved.iterations)
    if "steps_skipped" in own and file.arrays:
        # The inner optimizer counts the applied steps.
        iterations = file.arrays[0] + own["steps_skipped"]
    return OptimizerDescription(
        path="optimizer",
        era=file.era,
        optimizer=file.inner_name or None,
        scaling=scaling,
        scale=float(own["dynamic_scale"]) if "dynamic_scale" in own else scale,
        good_steps=int(own["step_counter"]) if "step_counter" in own else None,
        iterations=None if iterations is None else int(iterations),
        learning_rate=rate if isinstance(rate, (int, float)) else None,
        settings={k: v for k, v in settings.items() if v is not None and k != "name"},
        slots=_unnamed(file) if newer else _counted(saved),
    )


def _unnamed(file: ModelFile) -> dict[str, int]:
    # A .keras file numbers the variables: four of Keras' own class, steps, learning rate, then
    # slots. An HDF5 file names them.
    ahead = sum(name.rpartition("/")[2] in _NOT_SLOTS for name in file.names)
    if file.names and not ahead:
        ahead = 2 if file.era == OURS else 6
    return {"unnamed": len(file.names) - ahead} if len(file.names) > ahead else {}


def _rule_of(file: ModelFile) -> tuple[str, float | None]:
    """Returns the kind of scaling and the initial scale."""
    if not file.wrapped:
        return "none", None
    described = file.settings.get("loss_scale") or {}
    try:
        _, arguments = arguments_from_config(file.settings)
        arguments.pop("name", None)
        rule = rule_from_arguments(**arguments)
    except (LossScaleError, TypeError, KeyError) as error:
        if described.get("class_name") not in (None, "FixedLossScale", "DynamicLossScale"):
            return f"{described['class_name']}, a class of its own", None
        raise OldFileError(f"{file.path}: cannot create its loss scale: {error}") from error
    kinds = {FixedScale: "fixed", DynamicScale: "dynamic"}
    return kinds.get(type(rule), type(rule).__name__), float(rule.init().scale)
