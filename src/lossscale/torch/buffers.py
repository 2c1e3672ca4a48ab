"""Statistics of norms and other buffers of a model, which a skipped step must not spoil.

They are copied by `guard`, when a state is loaded and after each applied step, and a skipped step
writes the copy back. So no forward pass needs to be seen, which may be compiled, replayed,
functional, of a part of the model, or of another model only.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lossscale.errors import ArgumentTypeError
from lossscale.torch.observers import Observer, Stepped, Stepper

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

_removals: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()
"""Calls that remove the guard of a model."""
# Public, but not in the `__all__` of `torch.jit`.
_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


def guard_model(model: Module, steppers: Sequence[Stepper], names: set[str]) -> None:
    """Makes the buffers of a model follow the steps of optimizers; replaces an earlier guard.

    Args:
        model: The module, not wrapped.
        steppers: `LossScaleOptimizer` or `GradScaler` instances.
        names: The names of buffers that get their bits back, besides the statistics of norms.

    Raises:
        ArgumentTypeError: If a part of the model is scripted or traced.
    """
    if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        raise ArgumentTypeError(
            "`guard` cannot follow the buffers of a scripted or traced module. Received: a model "
            f"of type {type(model).__name__} with one. Use torch.compile(model) instead."
        )
    made = BufferGuard(model, names, len(steppers) > 1)
    unguard_model(model)
    # A part of the model may be loaded alone.
    handles = [m.register_load_state_dict_post_hook(Hook(made.loaded)) for m in model.modules()]
    handles += [stepper._observers.add(made) for stepper in steppers]
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
    """Copies the buffers of a model after each applied step, and writes to them after a skip.

    Args:
        model: The module.
        names: The names of buffers that get their bits back, besides the statistics of norms.
        has_several: Whether several optimizers or scalers train it.
    """

    def __init__(self, model: Module, names: set[str], has_several: bool) -> None:
        modules = [(path + "." * bool(path), each) for path, each in model.named_modules()]
        norms = [path for path, each in modules if isinstance(each, _NormBase)]
        self._own = names | {path + name for path in norms for name in _STATISTICS}
        # The dictionaries and sets, and not the modules, which must not be kept.
        self._tables = [(p, m._buffers, m._non_persistent_buffers_set) for p, m in modules]
        self._has_several = has_several
        self.followed: list[Followed] = []
        self._parts: list[tuple[bool, list[Tensor], Tensor, tuple[Tensor, ...]]] = []
        # All buffers, those that are followed, and the addresses of these.
        self._seen: tuple[list[Tensor | None], list[Tensor], list[int]] = [], [], []
        self._look()

    def loaded(self, module: Module, *_: object) -> None:
        """Called after a state was loaded into a module, maybe within a step."""
        self._look()
        loaded = set(map(id, module._buffers.values()))
        for each in self.followed:
            if id(each.tensor) in loaded:
                each.copy.copy_(each.memory)

    @torch.no_grad()
    def _step_over(self, step: Stepped) -> None:
        skipped = step.skipped
        has_several = self._has_several or step.is_one_of_several
        self._look()
        for is_own, memory, copy, copies in self._parts:
            if skipped is False and not has_several:
                torch.cat(memory, out=copy)
                continue
            now = repaired = torch.cat(memory)
            if has_several or not is_own:
                repaired = torch.where(now.abs() < math.inf, now, copy)
            # A pass whose step is yet to be skipped may have run before another's applied step.
            applied, restored = repaired if has_several else now, copy if is_own else repaired
            if isinstance(skipped, Tensor):
                flag = skipped.to(now.device, torch.bool)
                torch.where(flag, restored, applied, out=copy)
                if has_several:
                    # After an applied step, numbers that are not finite stay in the buffers.
                    copies = torch.where(flag, copy, now).split(list(map(len, memory)))
            else:
                copy.copy_(restored if skipped else applied)
            if skipped is not False:
                torch._foreach_copy_(memory, copies)

    @torch.inference_mode(False)
    def _look(self) -> None:
        """Sees which tensors the buffers are now: they may be new, cast, moved or replaced."""
        # Called in each step, with some hundred modules and buffers.
        seen, tensors, places = self._seen
        buffers = [each for _, table, _ in self._tables if table for each in table.values()]
        is_known = len(buffers) == len(seen) and all(map(is_, buffers, seen))
        if is_known and list(map(Tensor.data_ptr, tensors)) == places:
            return
        before = {each.path: each.copy for each in self.followed}
        kinds: dict[Any, list[Followed]] = {}
        for prefix, table, passing in self._tables:
            for name, tensor in table.items():
                if tensor is None or (memory := memory_of(tensor, name)) is None:
                    continue
                path, is_own = prefix + name, prefix + name in self._own
                if not is_own and (tensor.dtype not in _FLOATS or name in passing):
                    continue
                copy = before.get(path, memory)
                if seen and path not in before and name in _STATISTICS:
                    # A lazy norm, which got its shape in this step.
                    copy = torch.full_like(memory, name == "running_var")
                copy = copy.to(memory) if len(copy) == len(memory) else memory
                kind = is_own, memory.device, memory.dtype
                kinds.setdefault(kind, []).append(Followed(path, tensor, memory, copy))
        self._parts, self.followed = [], []
        # A tensor may be in several modules: its bits are put back last.
        for (is_own, *_), some in sorted(kinds.items(), key=lambda item: item[0][0]):
            rows = [each.memory for each in some]
            # A CUDA graph has its address.
            copy = torch.cat([each.copy for each in some])
            copies = copy.split(list(map(len, rows)))
            self._parts.append((is_own, rows, copy, copies))
            self.followed += [e._replace(copy=c) for e, c in zip(some, copies, strict=True)]
        # A lazy one stays the same tensor when it gets its shape.
        seen = [None if is_lazy(each) else each for each in buffers]
        tensors = [each.tensor for each in self.followed]
        self._seen = seen, tensors, list(map(Tensor.data_ptr, tensors))


class Followed(NamedTuple):
    """The name of a buffer in the model, the buffer, its memory in one row, and a copy of that."""

    path: str
    tensor: Tensor
    memory: Tensor
    copy: Tensor


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


def memory_of(tensor: Tensor, name: str) -> Tensor | None:
    """The memory of a buffer in one row, to write to; None if it is not dense."""
    # The part of a DTensor on this device.
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if type(local) not in (Tensor, Parameter) or local.layout != torch.strided:
        return None
    has_no_numbers = local.is_meta or local.is_inference() or local.is_quantized or local.is_conj()
    if has_no_numbers or torch.empty_like(local).stride() != local.stride():
        return None
    # A write to `data` does not spoil graphs. Norms, which have their statistics in them, do not
    # read these in the backward pass in training mode.
    row = local.data.as_strided((local.numel(),), (1,))
    if row.dtype in _FLOATS:
        return row
    # The halves of a count below two billion are finite as float32: one part for all of a norm.
    is_count = row.dtype == torch.int64 and name.endswith("num_batches_tracked")
    return row.view(torch.float32 if is_count else torch.uint8)
