"""Restoring a checkpoint of any release into objects of this program."""

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
        eras: For each optimizer, by the name it was given, which releases write such a file.
        variables: How many variables were set, those of optimizers left out.
        slots: How many arrays of optimizers were set.
        left: What the optimizers in the file hold and these ones have no place for.
    """

    path: str
    eras: Mapping[str, str]
    variables: int
    slots: int
    left: tuple[str, ...]


def restore_checkpoint(path: str | Path, **objects: Any) -> Restored:
    """Restores a checkpoint that any release of TensorFlow or Keras wrote.

    Give the objects by the names under which they were saved: for a file of
    `tf.train.Checkpoint(optimizer=opt, v=v)` they are `optimizer=opt, v=v`. A model whose
    `save_weights` wrote the file is `root=model`. An optimizer that a model was compiled with is
    restored with its model. What is in the file and not asked for stays there.

    Restored are variables, slots, `iterations`, the learning rate and the other hyperparameters,
    the loss scale and its counter. A fixed scale was never saved: the optimizer keeps its own,
    and so it does if it has a fixed one and the file has not. A learning rate schedule of the
    optimizer stays. TensorFlow's `decay` becomes the schedule that does the same.

    Files of TensorFlow hold one number of steps. From 2.3 on it counts skipped steps too, before
    it does not; which were skipped is nowhere. So both `optimizer.iterations` and
    `optimizer.inner_optimizer.iterations` become that number, and `steps_skipped` becomes 0.

    Args:
        path: The prefix of a checkpoint, its `.index` file, a folder with checkpoints (then the
            latest), a SavedModel, or a file that `lossscale migrate` wrote of a checkpoint.
        **objects: A `lossscale.LossScaleOptimizer`, models, layers, variables, and lists and
            dictionaries of them. A model must have its weights. The slots of an optimizer are
            created if need be, for all trainable variables that are given.

    Returns:
        What was restored.

    Raises:
        OldFileError: If the file is missing or damaged, lacks an object or a variable, or holds
            another optimizer. No variable was changed.
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
        path: The file that is read, for messages.
        name: What the optimizer is called.
        saved: What the file holds.
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
        """Finds a place for every slot, without setting any.

        Args:
            matches: The objects of the checkpoint; None for a model file, which has none.
            trainable: What to build the optimizer with, if it is not built.
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
        """Takes back what `prepare` changed."""
        self.target.set_settings(self._settings_before)

    def carry_out(self) -> list[str]:
        """Sets everything; returns what has no place."""
        self.target.set_learning_rate(self.saved)
        for place, value in self.slots:
            place.assign(value)
        self.target.set_counters(self.saved)
        return self.target.set_others(self.saved) + self.target.set_scale(self.saved)

    def _owner(self, slot: SavedSlot, matches: Matches) -> Any:
        """Returns the variable that a slot belongs to; None if only its turn is known."""
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
