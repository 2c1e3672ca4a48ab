"""Buffers of a model that follow the steps that were applied, such as the statistics of a norm.

They are saved by `guard`, when a state is loaded and after each applied step, and a skipped step
restores them. So no forward pass needs to be seen, which may be compiled, replayed, functional, of
a part of the model, or of another model only.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lossscale.errors import ArgumentTypeError
from lossscale.packages import warn
from lossscale.torch.observers import Observer, Stepped, Stepper

_CHANGES = 10
"""Changes of a parameter without a step of the optimizer after which a warning comes."""
_NEVER_STEPPED = (
    "The optimizer in guard(model, optimizer) was never stepped. Another one updates the "
    "parameters, so skipped steps do not restore the buffers. Pass the LossScaleOptimizer or "
    "GradScaler that steps."
)

_removals: weakref.WeakKeyDictionary[Module, weakref.finalize[..., Module]] = (
    weakref.WeakKeyDictionary()
)
"""Calls that remove the guard of a model."""
# Private, and not in PyTorch's annotations.
_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number that the next operation gets that a backward pass can go through."""
# Public, but not in the `__all__` of `torch.jit`.
_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


def guard_model(
    model: Module, optimizers: Sequence[Stepper], names: set[str] | None = None
) -> None:
    """Makes the buffers of a model follow the steps of optimizers; replaces an earlier guard.

    Args:
        model: The module, not wrapped.
        optimizers: `LossScaleOptimizer` or `GradScaler` instances.
        names: The names of the buffers to follow; None for all.

    Raises:
        ArgumentTypeError: If a part of the model is scripted or traced.
    """
    if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        raise ArgumentTypeError(
            "`guard` cannot follow the buffers of a scripted or traced module. Received: a model "
            f"of type {type(model).__name__} with one. Use torch.compile(model) instead."
        )
    made = BufferGuard(model, names, len(optimizers) > 1)
    unguard_model(model)
    handles = [model.register_forward_pre_hook(Hook(made.check_steps))]
    for each in model.modules():
        # A part of the model may be loaded alone.
        handles.append(each.register_load_state_dict_post_hook(Hook(made.loaded)))
    handles += [stepper._observers.add(made) for stepper in optimizers]
    # The buffers are not kept longer than the model.
    _removals[model] = weakref.finalize(model, _remove, handles)
    _removals[model].atexit = False


def unguard_model(model: Module) -> None:
    """Lets the buffers of a model follow all steps again, skipped ones included."""
    if model in _removals:
        _removals.pop(model)()


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class BufferGuard(Observer):
    """Saves the buffers of a model after each step, and restores them.

    Args:
        model: The module.
        names: The names of the buffers; None for all that it has or gets.
        has_several: Whether several optimizers or scalers train it.
    """

    def __init__(self, model: Module, names: set[str] | None, has_several: bool) -> None:
        self._own = {id(each): each for each in model.parameters() if each.requires_grad}
        self._weight = next(iter(self._own.values()), torch.empty(0))
        self._tables: list[Table] = []
        for path, each in model.named_modules():
            chosen = names and {n for n in each._buffers if f"{path}.{n}".lstrip(".") in names}
            self._tables.append((each._buffers, chosen, next(each.parameters(), self._weight)))
        self._modules, self._has_several = weakref.WeakSet(model.modules()), has_several
        # After the last step; and before it, if another may come on a loss that is older than it.
        self._saved = _Copy(self._tables)
        self._before: tuple[_Copy, list[Tensor]] | None = None
        # By optimizer, when the oldest loss since its last step was computed.
        self._losses: weakref.WeakKeyDictionary[Stepper, float] = weakref.WeakKeyDictionary()
        # When the last step was; the version of the weight above which one must have come.
        self._step = 0
        self._version_limit: float = self._weight._version + _CHANGES

    def check_steps(self, *_: object) -> None:
        """Warns if the weights change without a step; called before each forward pass."""
        if self._weight._version > self._version_limit:
            self._version_limit = math.inf
            warn(_NEVER_STEPPED)

    def loaded(self, module: Module, *_: object) -> None:
        """Called after a state was loaded into a module, maybe within a step."""
        if not self._saved.is_known(self._tables):
            self._saved = _Copy(self._tables)
        own = set(map(id, module._buffers.values()))
        for each, numbers in filter(None, [(self._saved, self._saved.numbers), self._before]):
            each.save_only(own, numbers)

    def _loss_scaled(self, stepper: Stepper, loss: Tensor) -> None:
        if not (self._has_several or self._before):
            return
        # When it was computed, or its first part that uses parameters of the model.
        todo = [] if loss.grad_fn is None else [loss.grad_fn]
        numbers, seen = [each._sequence_nr() for each in todo], set(todo)
        for node in todo:
            for each, _ in node.next_functions:
                if id(getattr(each, "variable", None)) in self._own:
                    numbers.append(node._sequence_nr())
                elif each is not None and each not in seen:
                    seen.add(each)
                    todo.append(each)
        self._losses[stepper] = min([*numbers, self._losses.get(stepper, math.inf)])

    def _step_over(self, step: Stepped) -> None:
        skipped, ids = step.skipped, step.ids
        # Somebody else trains what the only optimizer of a scaler does not train.
        has_others = ids is not None and (not ids or not self._own.keys() <= set(ids))
        # A loss that was scaled in compiled code was not seen.
        own = self._losses.pop(step.stepper, -1)
        if not (has_others or self._has_several):
            self._before = None
        elif not self._before or min([own, *self._losses.values()]) >= self._step:
            self._before = self._saved, [each.clone() for each in self._saved.numbers]
        before = self._before if own < self._step else None
        base, numbers = before or (self._saved, self._saved.numbers)
        is_known = self._saved.is_known(self._tables)
        if is_known and base is self._saved and torch.is_tensor(skipped):
            base.choose(skipped, numbers)
        elif bool(skipped):
            # If a buffer is another tensor now, the host must know the decision.
            base.restore(numbers, self._tables, self._modules)
            self._saved = _Copy(self._tables)
        elif is_known:
            self._saved.save()
        else:
            self._saved = _Copy(self._tables)
        self._step, self._version_limit = _sequence_number(), math.inf


Table = tuple[dict[str, Tensor | None], set[str] | None, Tensor]
"""The buffers of a module, the names of those that are followed (None: all), a parameter."""


class _Copy:
    """Which tensors the buffers of some modules are, and a copy of what is in them."""

    @torch.inference_mode(False)
    def __init__(self, tables: list[Table]) -> None:
        self._tables = [
            (dict(now) if names is None else {n: now.get(n) for n in names}, weight.dtype)
            for now, names, weight in tables
        ]
        tensors = _tensors_in(tables)
        distinct = {id(t): t for t in tensors if t is not None}
        self._lazy = [t for t in distinct.values() if is_lazy(t)]
        self._plain: list[tuple[Tensor, Tensor]] = []
        self._others: list[tuple[Tensor, Tensor]] = []
        of_devices: dict[torch.device, dict[int, Tensor]] = {}
        for key, each in distinct.items():
            if is_lazy(each) or each.is_meta or each.is_inference():
                continue
            local = each.to_local() if hasattr(each, "to_local") else each
            memory = _memory(local)
            if memory is None:
                self._others.append((each, each.detach().clone()))
            else:
                self._plain.append((local, local.data))
                of_devices.setdefault(local.device, {})[key] = memory
        self._ids, self._places = list(map(id, tensors)), [t.data_ptr() for t, _ in self._plain]
        self._keys = list(map(list, of_devices.values()))
        self._memory = [list(each.values()) for each in of_devices.values()]
        # A CUDA graph has their addresses.
        self.numbers = list(map(torch.cat, self._memory))

    @functools.cached_property
    def _parts(self) -> list[list[Tensor]]:
        # To split takes longer than to copy.
        return list(map(_split, self.numbers, self._memory))

    def save(self) -> None:
        """Copies what is in the buffers now."""
        for memory, numbers in zip(self._memory, self.numbers, strict=True):
            torch.cat(memory, out=numbers)

    def save_only(self, own: set[int], numbers: list[Tensor]) -> None:
        """Copies what is in some of the buffers now, by id."""
        for keys, memory, into in zip(self._keys, self._memory, numbers, strict=True):
            if own.isdisjoint(keys):
                continue
            for key, tensor, part in zip(keys, memory, _split(into, memory), strict=True):
                if key in own:
                    part.copy_(tensor)

    @torch.no_grad()
    def choose(self, skipped: Tensor, base: list[Tensor]) -> None:
        """Restores the buffers if the device says so, and copies what they are then."""
        groups = zip(self._memory, self.numbers, self._parts, base, strict=True)
        for memory, numbers, parts, was in groups:
            flag, now = skipped.to(numbers.device, torch.bool), torch.cat(memory)
            torch.where(flag, was, now, out=numbers)
            torch._foreach_copy_(memory, parts)

    @torch.no_grad()
    def restore(self, base: list[Tensor], tables: list[Table], modules: Iterable[Module]) -> None:
        """Restores the buffers to a copy, and which tensors they are."""
        for memory, numbers in zip(self._memory, base, strict=True):
            torch._foreach_copy_(memory, _split(numbers, memory))
        for tensor, data in self._plain:
            # Somebody may have replaced `data` since.
            tensor.data = data
        for tensor, was in self._others:
            tensor.copy_(was)
        for (now, names, weight), (before, dtype) in zip(tables, self._tables, strict=True):
            for name in [n for n in now if names is None and n not in before]:
                del now[name]
            for name, old in before.items():
                one = now.get(name)
                if one is None or old is None or one is old:
                    now[name] = old
                elif not old.is_meta:
                    # `to` may have been called since, which casts the parameters as well.
                    now[name] = old.to(one if weight.dtype != dtype else one.device)
        for module in modules if self._lazy else ():
            # These had no values before this step, in which they got their shape.
            mine = set(map(id, module._buffers.values()))
            own = [each for each in self._lazy if id(each) in mine]
            if own and not any(map(is_lazy, own)):
                getattr(module, "reset_running_stats", lambda: None)()

    def is_known(self, tables: list[Table]) -> bool:
        """Whether the buffers are the tensors that were saved, and need no other copy."""
        # Called in each step, with some hundred modules and buffers.
        return (
            list(map(id, _tensors_in(tables))) == self._ids
            and [t.data_ptr() for t, _ in self._plain] == self._places
            and all(map(is_lazy, self._lazy))
            and not self._others
        )


def _tensors_in(tables: list[Table]) -> list[Tensor | None]:
    """The buffers, None included."""
    tensors: list[Tensor | None] = []
    for table, names, _ in tables:
        if table:
            tensors += table.values() if names is None else map(table.get, names)
    return tensors


class Hook:
    """A hook of a module. In a copy or a pickle of the module it does nothing.

    Args:
        function: Called as the hook, except in code that is compiled or traced.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling() and not _is_tracing():
            self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A saved model loads without this library.
        return getattr, (contextlib.nullcontext(), "__exit__")


def innermost(model: Module) -> Module:
    """The module in what PyTorch wraps around modules."""
    wraps = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    inner = model.module if isinstance(model, wraps) else getattr(model, "_orig_mod", None)
    return model if inner is None else innermost(inner)


def _split(numbers: Tensor, memory: list[Tensor]) -> list[Tensor]:
    """The bytes of each of several tensors, which lie one after the other."""
    parts: list[Tensor] = numbers.split(list(map(len, memory)))
    return parts


def _memory(tensor: Tensor) -> Tensor | None:
    """The bytes of a tensor, to write to; None if they contain more than the tensor."""
    is_plain = type(tensor) in (Tensor, Parameter) and not tensor.is_quantized
    if not is_plain or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in extents) if tensor.numel() else 0
    if span > tensor.numel():
        return None
    # A write to `data` does not spoil graphs. Norms, which have their statistics in them, do not
    # read these in the backward pass in training mode.
    return tensor.data.as_strided((span,), (1,)).view(torch.uint8)
