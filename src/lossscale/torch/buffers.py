"""Buffers of a model that follow the steps that were applied, such as the statistics of a norm.

They are saved at the first forward pass after a step, and a skipped step restores them. Compiled
code calls no hook, and a part of a model may be called alone: if no forward pass was seen before a
step, they are saved again after it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lossscale.errors import ArgumentError, ArgumentTypeError, first_names
from lossscale.packages import warn

_LARGE = 64 * 2**20
"""Bytes of buffers above which a warning names the argument to choose some."""
_CHANGES = 10
"""Changes of a parameter without a step of the optimizer after which a warning comes."""
_NEVER_STEPPED = (
    "The optimizer in guard(model, optimizer) was never stepped. Another one updates the "
    "parameters, so skipped steps do not restore the buffers. Pass the LossScaleOptimizer or "
    "GradScaler that steps."
)

_guards: weakref.WeakKeyDictionary[Any, weakref.WeakSet[BufferGuard]] = weakref.WeakKeyDictionary()
"""The guards by the optimizer or scaler whose steps count."""
_of_models: weakref.WeakKeyDictionary[Any, BufferGuard] = weakref.WeakKeyDictionary()
_POINTER = torch.Tensor.data_ptr


def note_step(optimizer: Any, skipped: Any, *, is_end: bool = True) -> None:
    """Called after each step of an optimizer.

    Args:
        optimizer: The `LossScaleOptimizer` or `GradScaler`.
        skipped: Whether it was skipped: a bool, or a tensor if only the device knows.
        is_end: Whether no other optimizer of this scaler steps on the same forward passes.
    """
    if _guards:
        for each in _guards.get(optimizer, ()):
            each.stepped(skipped, is_end)


def guard_model(model: Any, optimizers: Sequence[Any], names: Iterable[str] | None = None) -> None:
    """Makes the buffers of a model follow the steps of optimizers; replaces an earlier guard.

    Args:
        model: The module, or a wrapper of it such as `DistributedDataParallel`.
        optimizers: `LossScaleOptimizer` or `GradScaler` instances.
        names: The names of the buffers to follow, or patterns of them; None for all.

    Raises:
        ArgumentError: If no buffer has one of the names.
        ArgumentTypeError: If a part of the model is scripted or traced.
    """
    inner = innermost(model)
    if any(isinstance(each, torch.jit.ScriptModule) for each in inner.modules()):
        raise ArgumentTypeError(
            "`guard` cannot follow the buffers of a scripted or traced module. Received: a model "
            f"of type {type(inner).__name__} with one. Use torch.compile(model) instead."
        )
    chosen = _checked_names(inner, names)
    made = BufferGuard(inner, chosen, len(optimizers))
    _warn_of_size(inner, chosen)
    unguard_model(model)
    on_compile = torch.compiler.assume_constant_result(lambda: made.compiled())
    made.handles = [
        inner.register_forward_pre_hook(Hook(made.before_forward, on_compile), prepend=True),
        inner.register_forward_hook(Hook(made.after_forward)),
        inner.register_load_state_dict_post_hook(Hook(lambda module, keys: made.save())),
    ]
    _of_models[inner] = made
    for each in optimizers:
        _guards.setdefault(each, weakref.WeakSet()).add(made)


def unguard_model(model: Any) -> None:
    """Lets the buffers of a model follow all steps again, skipped ones included."""
    found = _of_models.pop(innermost(model), None)
    if found is not None:
        found.detach()


class BufferGuard:
    """Saves the buffers of a model, and restores them.

    Args:
        model: The module.
        names: The names of the buffers; None for all that it has or gets.
        optimizers: The number of optimizers, which may step on the same forward passes.
    """

    def __init__(self, model: Any, names: set[str] | None, optimizers: int) -> None:
        named = list(model.named_modules())
        self._tables: list[tuple[dict[str, Any], set[str] | None]] = [
            (m._buffers, names and {n for n in m._buffers if f"{path}.{n}".lstrip(".") in names})
            for path, m in named
        ]
        self._modules = weakref.WeakSet(m for _, m in named)
        self._weight = next((p for p in model.parameters() if p.requires_grad), None)
        self._saved: list[dict[str, Any]] = []
        self.handles: list[Any] = []
        # The steps to come on the forward passes that were seen last. After others it saves.
        self._left, self._optimizers = 0, optimizers
        self._waits = True
        # The version of the weight above which a step must have come.
        self._last = math.inf if self._weight is None else self._weight._version + _CHANGES
        self.save()

    def detach(self) -> None:
        """Removes the hooks; no later step restores anything."""
        for handle in self.handles:
            handle.remove()
        for each in list(_guards.values()):
            each.discard(self)

    def before_forward(self, module: Any, args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            # Checkpointing repeats a forward pass in the backward pass.
            return
        if not self._waits:
            if self._weight is not None and self._weight._version > self._last:
                self._last = math.inf
                warn(_NEVER_STEPPED)
            return
        # What `update_bn` and its like change belongs to no step; see `after_forward`. Reentrant
        # checkpointing disables gradients, and needs an argument that requires one.
        belongs = torch.is_grad_enabled() or any(getattr(x, "requires_grad", False) for x in args)
        if belongs and self._trains():
            self._waits, self._left = False, self._optimizers
            self.save()

    def after_forward(self, *_: Any) -> None:
        counts = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        if self._waits and not counts and self._trains():
            # What such a pass changed stays, also if the next one in training is not seen.
            self.save()

    def _trains(self) -> bool:
        return any(each.training for each in self._modules)

    def compiled(self) -> None:
        """Called when a forward pass is compiled, before it runs; its hooks will not be called."""
        # In an export the buffers are others.
        if self._waits and self._is_known():
            self._left = 0
            self.save()

    def stepped(self, skipped: Any, is_end: bool) -> None:
        """Called after a step."""
        # The next forward pass may not be seen, either.
        saves = is_end and self._left == 0
        self._left = max(self._left - is_end, 0)
        if torch.is_tensor(skipped):
            self._choose(skipped, is_end and self._left == 0)
        elif skipped:
            self.restore()
        elif saves:
            self.save()
        self._waits, self._last = True, math.inf

    def save(self) -> None:
        """Saves the buffers as they are."""
        if not (self._saved and self._is_known()):
            self._allocate()
        for memory, saved, _ in self._groups:
            torch.cat(memory, out=saved)
        for each in self._others:
            each[1] = each[0].detach().clone()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def restore(self) -> None:
        """Sets the buffers to what was saved."""
        for memory, _, parts in self._groups:
            torch._foreach_copy_(memory, parts)
        for tensor, data in zip(self._plain, self._data, strict=True):
            # Somebody may have replaced `data` since.
            tensor.data = data
        for tensor, was in self._others:
            tensor.copy_(was)
        self._put_back()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _choose(self, skipped: Any, is_last: bool) -> None:
        """Restores as the device decides, without a wait of the host; after the last step saves."""
        if self._others or not self._is_known():
            # The host sees that a buffer is another tensor now, so it must know the decision.
            if bool(skipped):
                self.restore()
            elif is_last:
                self.save()
            return
        for memory, saved, parts in self._groups:
            now, flag = torch.cat(memory), skipped.to(saved.device, torch.bool)
            torch.where(flag, saved, now, out=saved if is_last else now)
            torch._foreach_copy_(memory, parts if is_last else _split(now, memory))

    # --- Which tensors they are ---------------------------------------------------------------

    def _is_known(self) -> bool:
        """Whether the buffers are the tensors that were saved last."""
        # Called in each step, with some hundred modules and buffers.
        now = self._now()
        return (
            len(now) == len(self._tensors)
            and all(map(operator.is_, now, self._tensors))
            and list(map(_POINTER, self._plain)) == self._places
            and all(map(_is_lazy, self._lazy))
        )

    def _now(self) -> list[Any]:
        """The buffers, None included."""
        found: list[Any] = []
        for table, names in self._tables:
            if table:
                found += table.values() if names is None else map(table.get, names)
        return found

    def _put_back(self) -> None:
        """Restores which tensors the buffers are."""
        for (now, names), was in zip(self._tables, self._saved, strict=True):
            for name in [n for n in now if names is None and n not in was]:
                del now[name]
            for name, tensor in was.items():
                one: Any = now.get(name)
                if one is not tensor:
                    # `model.to` may have been called since.
                    now[name] = tensor if one is None or tensor is None else tensor.to(one.device)
        for module in self._modules if self._lazy else ():
            # These had no values before this step, in which they got their shape.
            tensors = [t for t in module._buffers.values() if any(t is each for each in self._lazy)]
            if tensors and not any(map(_is_lazy, tensors)):
                getattr(module, "reset_running_stats", lambda: None)()

    def _allocate(self) -> None:
        self._saved = [
            {n: t for n, t in now.items() if names is None or n in names}
            for now, names in self._tables
        ]
        self._tensors = self._now()
        found = {id(t): t for t in self._tensors if t is not None}
        self._lazy = [t for t in found.values() if _is_lazy(t)]
        self._plain, self._data, self._others = [], [], []
        of_devices: dict[Any, list[Any]] = {}
        for each in found.values():
            if _is_lazy(each) or each.is_meta or each.is_inference():
                continue
            local = each.to_local() if hasattr(each, "to_local") else each
            memory = _memory(local)
            if memory is None:
                self._others.append([each, each])
            else:
                self._plain.append(local)
                self._data.append(local.data)
                of_devices.setdefault(local.device, []).append(memory)
        self._places = list(map(_POINTER, self._plain))
        self._groups = [
            (memory, saved, _split(saved, memory))
            for memory in of_devices.values()
            for saved in [torch.cat(memory)]
        ]


class Hook:
    """A hook of a module. In a copy or a pickle of the module it does nothing.

    Args:
        function: Called as the hook, except in code that is compiled or traced.
        on_compile: Called while a forward pass is compiled, and never when it runs, if PyTorch
            assumes that its result is constant.
    """

    def __init__(
        self, function: Callable[..., None], on_compile: Callable[[], None] | None = None
    ) -> None:
        self.function, self.on_compile = function, on_compile

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            if self.on_compile is not None:
                self.on_compile()
        elif not torch.jit.is_tracing():
            self.function(*args)

    def __reduce__(self) -> Any:
        # A saved model loads without this library.
        return getattr, (contextlib.nullcontext(), "__exit__")


class _HeldBack:
    """`update_parameters` of an averaged model, after steps that were applied.

    Args:
        averaged: The `AveragedModel`.
        holders: Each says whether all steps since its last call were skipped.
    """

    def __init__(self, averaged: Any, holders: list[Callable[[], bool]]) -> None:
        self._averaged, self._holders = averaged, holders

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Each of them has to see this call.
        held = [holds() for holds in self._holders]
        if not all(held):
            type(self._averaged).update_parameters(self._averaged, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._averaged, "update_parameters")


def guard_average(averaged: Any, holders: list[Callable[[], bool]]) -> None:
    """Makes `update_parameters` of an averaged model follow the applied steps."""
    vars(averaged)["update_parameters"] = _HeldBack(averaged, holders)


def unguard_average(averaged: Any) -> None:
    """Lets `update_parameters` follow all steps again."""
    vars(averaged).pop("update_parameters", None)


def innermost(model: Any) -> Any:
    """The module in what PyTorch wraps around modules."""
    wraps = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    inner = model.module if isinstance(model, wraps) else getattr(model, "_orig_mod", None)
    return model if inner is None else innermost(inner)


def _checked_names(model: Any, names: Iterable[str] | None) -> set[str] | None:
    if names is None:
        return None
    found = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    chosen: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        fitting = fnmatch.filter(found, name)
        if not fitting:
            raise ArgumentError(
                f"`buffers` must be names of buffers of the model, or patterns of them. Received: "
                f"{name!r}, which is none of {first_names(found)}."
            )
        chosen.update(fitting)
    return chosen


def _warn_of_size(model: Any, names: set[str] | None) -> None:
    sizes = {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in model.named_buffers()
        if (names is None or name in names) and not _is_lazy(tensor)
    }
    total = sum(sizes.values())
    if total > _LARGE:
        name = max(sizes, key=sizes.__getitem__)
        warn(
            f"guard(model, optimizer) copies {total / 2**20:.0f} MiB of buffers in each step; "
            f"the largest is {name!r}, {sizes[name] / 2**20:.0f} MiB. Name the buffers that the "
            "forward pass changes, as in guard(model, optimizer, buffers=["
            '"*.running_mean", "*.running_var"]).'
        )


def _is_lazy(tensor: Any) -> bool:
    return bool(torch.nn.parameter.is_lazy(tensor))


def _split(numbers: Any, memory: list[Any]) -> Any:
    """The bytes of each of several tensors, which lie one after the other."""
    return numbers.split(list(map(len, memory)))


def _memory(tensor: Any) -> Any:
    """The bytes of a tensor, to write to; None if they contain more than the tensor."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
    if not is_plain or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in extents) if tensor.numel() else 0
    if span > tensor.numel():
        return None
    # A write to `data` does not spoil graphs. Norms, which have their statistics in them, do not
    # read these in the backward pass in training mode.
    return tensor.data.as_strided((span,), (1,)).view(torch.uint8)
