"""Float32 averages and exports of models whose parameters are float16 or bfloat16."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lossscale.common.signatures import takes
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.torch.grad_scaler import GradScaler
from lossscale.torch.master_weights import LIVING, MasterWeights
from lossscale.torch.masters import is_narrow
from lossscale.torch.optimizer import LossScaleOptimizer, wrapper_in
from lossscale.torch.optimizer_list import with_parts


def float32_state_dict(model: Module, optimizer: Any) -> dict[str, Any]:
    """Returns the state dictionary of a model in float32, with the masters of its parameters.

    A float32 model of the same class loads it, to be saved, deployed or trained on. All tensors are
    copies.

    Args:
        model: The model, or what PyTorch wraps around it.
        optimizer: The `MasterWeights` that trains it, a `LossScaleOptimizer` around one, the
            `GradScaler` that steps it, or a list of these.

    Returns:
        What `model.state_dict()` returns while each parameter is its master; if it has none, and it
        or a buffer is float16 or bfloat16, it is cast.

    Raises:
        ArgumentError: If a float16 or bfloat16 parameter is trainable and has no master, or the
            model's own code makes an entry of such a dtype.
        TypeError: If `optimizer` is something else.

    Examples:
        >>> model = torch.nn.Linear(3, 1).half()
        >>> inner = lossscale.torch.MasterWeights(torch.optim.AdamW(model.parameters()))
        >>> optimizer = lossscale.torch.LossScaleOptimizer(inner)
        >>> weights = lossscale.torch.float32_state_dict(model, optimizer)
        >>> torch.nn.Linear(3, 1).load_state_dict(weights)
        <All keys matched successfully>
    """
    masters = _masters_in(optimizer, model.parameters())
    for name, parameter in model.named_parameters():
        if is_narrow(parameter) and parameter.requires_grad and parameter not in masters:
            raise ArgumentError(
                f"The parameter {name!r} is {parameter.dtype} and has no master in `optimizer`. "
                "Pass the MasterWeights that trains the model, or a list of all; call "
                "requires_grad_(False) on parameters that are not trained."
            )
    with torch.inference_mode(False), torch.no_grad(), _widened(model, masters) as wide:
        # Tied names have one tensor, as in the state dictionary of the model.
        keeps: Any = {"keep_vars": True} if takes(model.state_dict, "keep_vars") else {}
        state: dict[str, Any] = model.state_dict(**keeps)
        copies = {id(tensor): tensor.detach() for tensor in wide}
        for name, value in state.items():
            if isinstance(value, Tensor):
                if is_narrow(value) and not name.endswith("_extra_state"):
                    raise ArgumentError(
                        f"The entry {name!r} of model.state_dict() is {value.dtype}, not float32. "
                        "Code of the model casts it, or keeps the parameter elsewhere. Change that "
                        "code, or export without it."
                    )
                if id(value) not in copies:
                    copies[id(value)] = _copied(value)
                state[name] = copies[id(value)]
    return state


@contextlib.contextmanager
def _widened(model: Module, masters: dict[Tensor, Tensor]) -> Iterator[list[Tensor]]:
    """Within it, float32 copies stand in the place of narrow parameters and buffers.

    The model's own code may split, transpose or copy what it saves.
    """
    tables: Any = [table for each in model.modules() for table in (each._parameters, each._buffers)]
    before = [dict(table) for table in tables]
    given = {t for kept in before for t in kept.values() if is_narrow(t) or t in masters}
    wide = {tensor: _wide(tensor, masters) for tensor in given}
    try:
        for table, kept in zip(tables, before, strict=True):
            table.update({name: wide.get(tensor, tensor) for name, tensor in kept.items()})
        yield list(wide.values())
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.update(kept)


def _wide(tensor: Tensor, masters: dict[Tensor, Tensor]) -> Tensor:
    """A float32 copy of a parameter or buffer, of the same kind."""
    made = _copied(masters.get(tensor, tensor))
    if isinstance(tensor, Parameter):
        made = Parameter(made, tensor.requires_grad)
        vars(made).update(vars(tensor))
    return made


def _copied(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to(torch.float32, copy=True) if is_narrow(tensor) else tensor.clone()


def _masters_in(optimizer: Any, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """The masters of parameters, with what was written into these.

    Args:
        optimizer: As for `float32_state_dict`.
        parameters: The parameters.
    """
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    parameters, masters = list(parameters), dict[Tensor, Tensor]()
    for each in map(wrapper_in, several):
        if isinstance(each, GradScaler):
            # It knows those that it has stepped, and none if it is not enabled. Only the newest of
            # a parameter can step.
            parts: list[Any] = list(LIVING.values())
        elif isinstance(each, (LossScaleOptimizer, MasterWeights)):
            parts = with_parts(each if isinstance(each, MasterWeights) else each.inner_optimizer)
        else:
            raise ArgumentTypeError(
                "`optimizer` must be a lossscale.torch.MasterWeights, LossScaleOptimizer or "
                f"GradScaler, or a list of these. Received: {type(each).__module__}."
                f"{type(each).__qualname__}. With PyTorch's GradScaler, pass the MasterWeights."
            )
        for part in (each for each in parts if isinstance(each, MasterWeights)):
            masters |= part.current(parameters)
    return masters


class HeldBack:
    """`update_parameters` of an averaged model, of masters, after steps that were applied.

    Args:
        averaged: The `AveragedModel`.
        optimizers: What trains the model that is averaged.
        holders: Each says whether all steps since its last call were skipped.

    Raises:
        ArgumentError: If a trainable parameter of the average is float16 or bfloat16.
    """

    def __init__(
        self, averaged: Module, optimizers: list[Any], holders: list[Callable[[], bool]]
    ) -> None:
        _check_average(p for p in averaged.parameters() if p.requires_grad)
        # Weakly: it is an attribute of the model.
        self._averaged, self._optimizers = weakref.ref(averaged), optimizers
        self._holders = holders

    def __call__(self, model: Module, *args: Any, **kwargs: Any) -> Any:
        # Each of them has to see this call.
        held = [holds() for holds in self._holders]
        averaged: Any = self._averaged()
        if not held or not all(held):
            seen = self._as_averaged(averaged.module, model)
            type(averaged).update_parameters(averaged, seen, *args, **kwargs)

    def _as_averaged(self, averaged: Module, model: Module) -> Any:
        """The model, or what `update_parameters` reads of it, in the dtypes of the average."""
        masters = _masters_in(self._optimizers, model.parameters())
        if not any(map(is_narrow, model.parameters())) and not masters:
            return model
        _check_average(
            kept
            for kept, now in zip(averaged.parameters(), model.parameters(), strict=False)
            if now in masters or now.requires_grad
        )
        cast = [
            [
                masters.get(now, now).detach().to(kept.dtype)
                for kept, now in zip(kept_ones(averaged), kept_ones(model), strict=False)
            ]
            for kept_ones in (Module.parameters, Module.buffers)
        ]
        return types.SimpleNamespace(parameters=lambda: cast[0], buffers=lambda: cast[1])

    def __reduce__(self) -> Any:
        return getattr, (self._averaged(), "update_parameters")


def _check_average(parameters: Iterable[Tensor]) -> None:
    narrow = next(filter(is_narrow, parameters), None)
    if narrow is not None:
        raise ArgumentError(
            f"An average in {narrow.dtype} stands still, because its updates round to nothing. "
            "Average in float32: "
            "lossscale.torch.guard(torch.optim.swa_utils.AveragedModel("
            "copy.deepcopy(model).float()), optimizer)."
        )
