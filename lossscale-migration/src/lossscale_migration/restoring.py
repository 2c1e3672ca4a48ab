"""Restores a checkpoint of any release into the objects of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.optimizer import LossScaleOptimizer
from lossscale_migration.damaged_files import reporting_file_errors
from lossscale_migration.graph import read_graph
from lossscale_migration.matching import MatchedObjects, is_any_optimizer, trainable_of
from lossscale_migration.restore_plan import RestorePlan, plan_for
from lossscale_migration.saved_optimizer import SavedOptimizer, read_optimizer


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
            latest), a SavedModel, or a file that `lossscale-migrate` made from a checkpoint.
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
    matches = MatchedObjects(graph, objects)
    plans: dict[int, RestorePlan] = {}
    for name, node, optimizer in matches.optimizers:
        if id(optimizer) not in plans:
            with reporting_file_errors(graph.path):
                saved = read_optimizer(graph, node)
            plans[id(optimizer)] = plan_for(graph.path, name, saved, optimizer)
    trainable = {id(v): v for thing in objects.values() for v in trainable_of(thing)}
    try:
        for plan in plans.values():
            plan.prepare(matches, list(trainable.values()))
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


def restore_optimizer(
    path: str, saved: SavedOptimizer, optimizer: Any, variables: Sequence[Any]
) -> None:
    """Sets the state in a model file in an optimizer.

    Args:
        path: The file, for messages.
        saved: The state.
        optimizer: A loss scale optimizer of Keras 3 or tf_keras.
        variables: The trained variables, in the order of the model.
    """
    plan = plan_for(path, "optimizer", saved, optimizer)
    plan.prepare(None, variables)
    plan.carry_out()
