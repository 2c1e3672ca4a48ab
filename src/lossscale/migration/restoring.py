"""Restores a checkpoint of any release into the objects of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lossscale.errors import ArgumentError, ArgumentTypeError, OldFileError
from lossscale.migration.damaged_files import as_old_file_error
from lossscale.migration.graph import read_graph
from lossscale.migration.matching import Matches, is_any_optimizer, trainable_of
from lossscale.migration.restore_targets import RestoreTarget, target_for
from lossscale.migration.saved_optimizer import SavedOptimizer, SavedSlot, read_optimizer
from lossscale.optimizer import LossScaleOptimizer


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of `restore_checkpoint`: how much was restored.

    Args:
        path: The file.
        eras: Maps the name of each optimizer to the releases that write such a file.
        variables: Number of variables that were set, without those of optimizers.
        slots: Number of optimizer arrays that were set.
        left: Optimizer values in the file that these optimizers do not have.
    """

    path: str
    eras: Mapping[str, str]
    variables: int
    slots: int
    left: tuple[str, ...]


def restore_checkpoint(path: str | Path, **objects: Any) -> Restored:
    """Restores a checkpoint that any release of TensorFlow or Keras wrote.

    Pass the objects under the names with which they were saved: for a file of
    `tf.train.Checkpoint(optimizer=opt, v=v)`, pass `optimizer=opt, v=v`. If `save_weights` of a
    model wrote the file, pass `root=model`. The optimizer of a compiled model is restored with the
    model. Other objects in the file are ignored.

    It restores variables, slots, `iterations`, the learning rate and the other hyperparameters,
    the loss scale and its counter. A fixed scale was never saved: the optimizer keeps its scale if
    it is fixed, or if the scale in the file was. A learning rate schedule of the optimizer stays.
    TensorFlow's `decay` becomes the equivalent schedule.

    Files of TensorFlow contain one number of steps. Since 2.3 it includes skipped steps, before it
    does not; the number of skips is not in the file. So `optimizer.iterations` and
    `optimizer.inner_optimizer.iterations` are both set to it, and `steps_skipped` to 0.

    Args:
        path: The prefix of a checkpoint, its `.index` file, a folder with checkpoints (then the
            latest), a SavedModel, or a file that `lossscale migrate` made from a checkpoint.
        **objects: A `lossscale.LossScaleOptimizer`, models, layers, variables, and lists and
            dictionaries of them. A model must be built. The slots of an optimizer are created if
            needed, for all trainable variables that are passed.

    Returns:
        A summary of what was restored.

    Raises:
        OldFileError: If the file is missing or damaged, lacks an object or a variable, or contains
            another optimizer. No variable is changed then.
        TypeError: If an optimizer has no loss scaling.
    """
    if not objects:
        raise ArgumentError(
            "There is nothing to restore into. Pass objects by the names they were saved under: "
            "restore_checkpoint(path, optimizer=optimizer, model=model)."
        )
    for name, thing in objects.items():
        if is_any_optimizer(thing) and not isinstance(thing, LossScaleOptimizer):
            raise ArgumentTypeError(
                f"{name} must have loss scaling. Received: {thing!r}. Wrap it in "
                "lossscale.LossScaleOptimizer, or restore it with TensorFlow itself."
            )
    graph = read_graph(path)
    matches = Matches(graph, objects)
    plans: dict[int, RestorePlan] = {}
    for name, node, optimizer in matches.optimizers:
        if id(optimizer) not in plans:
            with as_old_file_error(graph.path):
                saved = read_optimizer(graph, node)
            plans[id(optimizer)] = RestorePlan(
                graph.path, name, saved, target_for(optimizer, graph.path)
            )
    trainable = _without_repeats(v for thing in objects.values() for v in trainable_of(thing))
    try:
        for plan in plans.values():
            plan.prepare(matches, trainable)
    # On any exception, restore the settings before it is raised.
    except Exception:
        for plan in plans.values():
            plan.undo()
        raise
    for number, variable in matches.variables.items():
        variable.assign(graph.nodes[number].value)
    for layer in matches.finalized:
        layer.finalize_state()
    left = [entry for plan in plans.values() for entry in plan.carry_out()]
    return Restored(
        path=graph.path,
        eras={plan.name: plan.saved.era for plan in plans.values()},
        variables=len(matches.variables),
        slots=sum(len(plan.slots) for plan in plans.values()),
        left=tuple(left),
    )


class RestorePlan:
    """The state to set in one optimizer.

    Args:
        path: The file, for messages.
        name: The name of the optimizer.
        saved: The saved state.
        target: The optimizer.
    """

    def __init__(self, path: str, name: str, saved: SavedOptimizer, target: RestoreTarget) -> None:
        self.path = path
        self.name = name
        self.saved = saved
        self.target = target
        self.slots: list[tuple[Any, Any]] = []
        self._settings_before: dict[str, Any] = {}

    def prepare(self, matches: Matches | None, trainable: Sequence[Any]) -> None:
        """Finds the variable for every slot, without setting any.

        Args:
            matches: The matched objects of a checkpoint; None for a model file.
            trainable: The variables to build the optimizer with, if it is not built.
        """
        # Before `build`, because the slots of some optimizers depend on them.
        self._settings_before = self.target.set_settings(self.saved.settings)
        if not self.saved.slots:
            return
        owners = [matches and self._owner(slot, matches) for slot in self.saved.slots]
        if matches is not None:
            self._check_known(owners, trainable)
        if not self.target.built_with():
            self.target.build(trainable)
        for slot, owner in zip(self.saved.slots, owners, strict=True):
            place = self.target.slot(slot, self._by_turn(slot) if owner is None else owner)
            if place is None:
                continue
            if tuple(place.shape) != tuple(slot.value.shape):
                raise OldFileError(
                    f"{self.path}: {slot.label or slot.names[0]!r} has shape "
                    f"{tuple(slot.value.shape)} in the file and {tuple(place.shape)} here. Nothing "
                    "was changed."
                )
            self.slots.append((place, slot.value))

    def undo(self) -> None:
        """Undoes the changes of `prepare`."""
        self.target.set_settings(self._settings_before)

    def carry_out(self) -> list[str]:
        """Sets everything; returns the names of values that the optimizer does not have."""
        self.target.set_learning_rate(self.saved)
        for place, value in self.slots:
            place.assign(value)
        self.target.set_counters(self.saved)
        return self.target.set_others(self.saved) + self.target.set_scale(self.saved)

    def _owner(self, slot: SavedSlot, matches: Matches) -> Any:
        """Returns the variable of a slot; None if only its position is known."""
        if slot.variable is None:
            return None
        owner = matches.variables.get(slot.variable)
        if owner is None:
            name = matches.graph.nodes[slot.variable].name
            raise OldFileError(
                f"{self.path}: {slot.label or slot.names[0]!r} belongs to the variable {name!r}, "
                "which was not passed. Pass its model too."
            )
        return owner

    def _check_known(self, owners: Sequence[Any], trainable: Sequence[Any]) -> None:
        built_with = self.target.built_with()
        if not built_with and any(owner is None for owner in owners):
            # The new optimizers name a slot by its variable, and by its index if two share a name.
            raise OldFileError(
                f"{self.path}: several variables share a name, so only their order identifies "
                "them. Call optimizer.build(variables) first, with the variables in their "
                "original order."
            )
        known = {self.target.key(variable) for variable in built_with or trainable}
        for owner in owners:
            if owner is not None and self.target.key(owner) not in known:
                raise OldFileError(
                    f"{self.path}: the file has state for {owner.name!r}, which the optimizer was "
                    "not built with. Pass it to optimizer.build."
                )

    def _by_turn(self, slot: SavedSlot) -> Any:
        built_with = self.target.built_with()
        if slot.index is None or slot.index >= len(built_with):
            raise OldFileError(
                f"{self.path}: {slot.label or slot.names[0]!r} belongs to variable number "
                f"{slot.index}; the optimizer was built with {len(built_with)}."
            )
        return built_with[slot.index]


def _without_repeats(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())
