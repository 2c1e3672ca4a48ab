"""`guard` and `unguard`: schedules and models that follow the steps that were applied."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar, overload

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lossscale.errors import AlreadyWrappedError, ArgumentError, ArgumentTypeError, first_names
from lossscale.torch.averages import HeldBack
from lossscale.torch.buffers import guard_model, innermost, memory_of, unguard_model
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.master_weights import MasterWeights
from lossscale.torch.optimizer import LossScaleOptimizer, wrapper_in
from lossscale.torch.scheduler import GuardedScheduler

Model = TypeVar("Model", bound=Module)


class HasStep(Protocol):
    """A scheduler, for type checkers."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...


Scheduler = TypeVar("Scheduler", bound=HasStep)
Steppers = LossScaleOptimizer | GradScaler | MasterWeights
"""A `MasterWeights` alone is for an `AveragedModel`."""


@overload
def guard(
    scheduler: Model,
    optimizer: Steppers | Sequence[Steppers],
    *,
    buffers: Iterable[str] | None = None,
) -> Model: ...


@overload
def guard(scheduler: Scheduler, optimizer: LossScaleOptimizer | GradScaler) -> Scheduler: ...


def guard(scheduler: Any, optimizer: Any, *, buffers: Iterable[str] | None = None) -> Any:
    """Makes a model's buffers, or a learning rate schedule, follow the steps that were applied.

    A **model** is guarded in place and returned. A forward pass changes its buffers before it is
    known that the step is skipped. After a skipped step the statistics of normalization layers
    (`running_mean`, `running_var` and `num_batches_tracked` of PyTorch's classes and their
    subclasses) and the buffers named by `buffers` have their bits from before. In other dense
    floating-point buffers of the state dictionary, numbers that are no longer finite get their last
    finite value. All else stays as the forward pass left it. Buffers are copied by this call, when
    a state is loaded into the model or a part of it, and after each applied step. Call `guard`
    again after you write into a buffer, as `update_bn` does, or a skipped step may undo it; and
    after you add modules or buffers. A second guard replaces the first, and `unguard` removes it.
    Copies and pickles of the model are not guarded. One copy of the buffers is held: register large
    tables that no forward pass changes with `persistent=False`.

    `update_parameters` of a `torch.optim.swa_utils.AveragedModel` does nothing, if every step since
    its last call was skipped. It averages the masters of parameters that have one in a
    `MasterWeights`, and casts others to the dtype of the average, which must be float32: make it by
    `AveragedModel(copy.deepcopy(model).float())`.

    A **scheduler** is returned as an object to use in its place. A schedule that counts steps must
    not count a skipped step, which trains nothing. The scheduler steps if at least one step since
    its last one was applied, so that a scheduler for epochs does not depend on the last step of an
    epoch. The scheduler's `state_dict` does not change. With `decide="device"` each call waits for
    the device.

    Args:
        scheduler: A module, such as the model or `DistributedDataParallel` around it; or a
            scheduler of `torch.optim.lr_scheduler`, or another object with a `step` method. A
            scheduler may have been made for `optimizer` or for the inner optimizer; with a
            `GradScaler` for the optimizer whose steps count, or a wrapper of it such as
            Accelerate's.
        optimizer: The `LossScaleOptimizer` whose steps count, or the `GradScaler`; for an average
            also a `MasterWeights` that is used without them. For a model, a list of all optimizers
            whose losses pass through it. A skip of any puts back what the last applied step of any
            left; the copy then takes finite numbers alone. The same holds for a scaler once it has
            stepped a second optimizer.
        buffers: Names of other buffers that get their bits back, or patterns such as `"*.codes"`. A
            module that initializes itself from its first batch is named.

    Returns:
        The model; or a scheduler with all attributes of `scheduler`, to use in its place.

    Raises:
        TypeError: If `optimizer` is not a loss scale optimizer of PyTorch, or `scheduler` has no
            `step` or is guarded already.
        ArgumentError: If no buffer has one of the names in `buffers`, if one with such a name is
            sparse, on the meta device or otherwise not dense, or if a trainable parameter of an
            average is float16 or bfloat16.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        >>> optimizer = lossscale.torch.LossScaleOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.5)
        ... )
        >>> model = lossscale.torch.guard(model, optimizer)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        >>> scheduler = lossscale.torch.guard(scheduler, optimizer)
        >>> averaged = torch.optim.swa_utils.AveragedModel(model)
        >>> averaged = lossscale.torch.guard(averaged, optimizer)
        >>> overflowed = optimizer.backward(model(torch.full((4, 2), torch.inf)).sum())
        >>> optimizer.step()
        >>> scheduler.step()
        >>> averaged.update_parameters(model)
        >>> optimizer.last_step_skipped, model[0].running_mean, scheduler.get_last_lr()
        (True, tensor([0., 0.]), [0.5])
    """
    if isinstance(scheduler, Module):
        return _guarded_model(scheduler, optimizer, buffers)
    if buffers is not None:
        raise ArgumentTypeError("`buffers` is an argument for models, and this is a scheduler.")
    if type(scheduler) is GuardedScheduler:
        raise AlreadyWrappedError("This scheduler is already guarded. Use it as it is.")
    _check_optimizer(optimizer)
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, (type, Optimizer)):
        raise ArgumentTypeError(
            "`scheduler` must be a scheduler such as torch.optim.lr_scheduler.StepLR(optimizer, "
            f"10), or a model. Received: {scheduler!r}."
        )
    return GuardedScheduler(scheduler, optimizer)


def _checked_names(model: Any, names: Iterable[str] | None) -> set[str]:
    """The names of the buffers that `names` selects; all of them, if one has several."""
    tensors = dict(model.named_buffers(remove_duplicate=False))
    chosen: set[int] = set()
    for name in [names] if isinstance(names, str) else names or ():
        fitting = fnmatch.filter(tensors, name)
        if not fitting:
            raise ArgumentError(
                f"`buffers` must be names of buffers of the model, or patterns of them. Received: "
                f"{name!r}, which is none of {first_names(tensors)}."
            )
        for path in fitting:
            if memory_of(tensors[path], path) is None:
                raise ArgumentError(
                    f"`buffers` must be dense and have values. Received: {path!r}, of type "
                    f"{type(tensors[path]).__name__}, {tensors[path].layout}, on "
                    f"{tensors[path].device}. Leave it out, or make it a plain tensor first."
                )
            chosen.add(id(tensors[path]))
    return {name for name, tensor in tensors.items() if id(tensor) in chosen}


def _guarded_model(model: Any, optimizer: Any, buffers: Iterable[str] | None) -> Any:
    several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    several = list(map(wrapper_in, several))
    if not several:
        raise ArgumentTypeError("`optimizer` must not be an empty list.")
    is_average = isinstance(model, torch.optim.swa_utils.AveragedModel)
    for each in several:
        # Alone it skips no step, and an average needs its masters.
        if not (is_average and isinstance(each, MasterWeights)):
            _check_optimizer(each)
    given = several
    # A scaler that is not enabled skips no step.
    several = [one for one in several if not isinstance(one, GradScaler) or one.is_enabled()]
    if is_average:
        skipping = [one for one in several if not isinstance(one, MasterWeights)]
        holders = [GuardedScheduler(None, each)._holds for each in skipping]
        vars(model)["update_parameters"] = HeldBack(model, given, holders)
    elif several:
        inner = innermost(model)
        guard_model(inner, several, _checked_names(inner, buffers))
    return model


def unguard(model: Model) -> Model:
    """Removes what `guard` added to a model, such as before `torch.jit.script`.

    Args:
        model: The model, guarded or not.

    Returns:
        The model.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD(model.parameters()))
        >>> model = lossscale.torch.guard(model, optimizer)
        >>> model = lossscale.torch.unguard(model)
    """
    if isinstance(model, torch.optim.swa_utils.AveragedModel):
        vars(model).pop("update_parameters", None)
    elif isinstance(model, Module):
        unguard_model(innermost(model))
    else:
        raise ArgumentTypeError(
            f"`model` must be a torch.nn.Module. Received: {model!r} of type "
            f"{type(model).__name__}. The original of a guarded scheduler is its attribute "
            "`scheduler`."
        )
    return model


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, (LossScaleOptimizer, GradScaler)):
        raise ArgumentTypeError(
            "`optimizer` must be the lossscale.torch.LossScaleOptimizer whose steps count, or the "
            "lossscale.torch.GradScaler; for a model also a list of them. "
            f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}. PyTorch's "
            "GradScaler does not tell which steps it skips: use lossscale.torch.GradScaler in its "
            "place. To average masters, pass the MasterWeights: guard(averaged, inner)."
        )
