"""Follows infinities and NaN through the operations of a pass, to the operation they come from."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lossscale.common.monkeypatch import replace
from lossscale.monitoring.explanation import LARGEST, FailedOperation, Origin
from lossscale.monitoring.origins import Flags, is_harmed, overflow_in, passed_on

_SETTERS = (
    *("full", "full_like", "new_full", "fill_", "fill", "scalar_tensor", "masked_fill_"),
    *("masked_fill", "where", "constant_pad_nd", "lift_fresh", "lift_fresh_copy"),
)
"""Operations that may put an infinity of the user's into a tensor."""
_UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_")
_MESSAGES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
_ADDING = ("add", "add_", "clamp_min", "clamp_min_", "clamp", "maximum")
_WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_NORMAL = torch.finfo(torch.float16).tiny
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


class UnrepeatableError(RuntimeError):
    """Raised in place of a message to another process, and of what cannot be put back."""


class Place(NamedTuple):
    """A call of an operation in the forward pass: its module, its name and its line."""

    module: str = ""
    name: str = ""
    line: str = ""


class Watch(TorchDispatchMode):
    """Within it, the origin of each infinity and NaN is known, and no message is sent.

    What an operation writes to is restored by `restore`, if it existed before.

    Args:
        model: The model, for the names of its modules.
        tensors: Tensors by name: the parameters and buffers.

    Attributes:
        in_backward: Whether it watches a backward pass.
        hidden: The origin of the first overflow that makes a result wrong, and finite.
    """

    def __init__(self, model: Any, tensors: dict[str, Any]) -> None:
        super().__init__()
        root = type(model).__name__
        self._paths = {id(m): name or root for name, m in model.named_modules()}
        self._names = {_key(t): name for name, t in tensors.items()}
        self._calling = [""]
        self._origins: dict[int, Origin] = {}
        self._places: dict[int, Place] = {}
        self._first_number = torch._C._autograd._get_sequence_nr()
        self.in_backward = False
        self._made: set[int] = set()
        self._written: list[tuple[Any, Any]] = []
        self._epsilons: dict[str, float] = {}
        self._in_float16 = False
        self.hidden: Origin | None = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Watches a forward pass. The user's hooks do not run."""
        with contextlib.ExitStack() as stack:
            hooks = {
                "_global_forward_pre_hooks": OrderedDict({0: self._enter}),
                "_global_forward_hooks": OrderedDict({0: self._leave}),
                "_global_forward_hooks_always_called": OrderedDict({0: True}),
                "_global_forward_hooks_with_kwargs": OrderedDict(),
                "_global_backward_hooks": OrderedDict(),
                "_global_backward_pre_hooks": OrderedDict(),
            }
            for name, value in hooks.items():
                replace(stack, module_hooks, name, value)
            stack.enter_context(self)
            yield

    @contextlib.contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """Operations within it belong to a module."""
        self._calling.append(module)
        try:
            yield
        finally:
            self._calling.pop()

    def _enter(self, module: Any, args: Any) -> None:
        self._calling.append(self._paths.get(id(module), self._calling[-1]))

    def _leave(self, *_: Any) -> None:
        self._calling.pop()

    def mark(self, tensor: Any, name: str, *, is_weight: bool = False) -> None:
        """Remembers that a tensor comes from outside, if it is not finite."""
        if not is_finite(tensor):
            origin = Origin(name=name, is_weight=is_weight, is_mask=is_mask(tensor))
            self._origins[_key(tensor)] = origin

    def origin(self, tensors: Iterable[Any], *, masks: bool = False) -> Origin | None:
        """Returns the origin of the first tensor that is not finite.

        Args:
            tensors: The tensors.
            masks: Whether infinities count that the model sets itself, as in masked outputs.
        """
        unnamed = Origin(FailedOperation("an operation", in_backward=self.in_backward))
        for tensor in tensors:
            if not is_finite(tensor):
                found = self._origins.get(_key(tensor), unnamed)
                if masks or not found.is_mask:
                    return found
        return None

    def restore(self) -> None:
        """Restores the tensors that the passes have written to."""
        with torch.no_grad():
            # In this order, because they may be views of the same storage.
            for tensor, value in reversed(self._written):
                tensor.data.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _MESSAGES:
            raise UnrepeatableError("processes communicate in this pass, so it is not repeated")
        name = func._schema.name.partition("::")[2]
        inputs = list(tensors_in((args, kwargs)))
        place, node = self._place(name, args, inputs)
        call = _Call(func, args, kwargs, self._before_writes(func, args, kwargs))
        result = func(*args, **kwargs)
        if name in _UNSET or func.is_view:
            return result
        made = list(tensors_in(result))
        self._in_float16 |= any(t.dtype == torch.float16 for t in made)
        self._made.update(map(_key, made))
        flags = list(map(_flags, made))
        if not (self._origins or any(map(any, flags))):
            return result
        was = [call.before.get(id(t), t) for t in inputs]
        found = [
            (self._origins.get(_key(t), Origin(is_mask=True)), _flags(b))
            for t, b in zip(inputs, was, strict=True)
        ]
        taken = [each for each in found if any(each[1])]
        self._note_harm(call, made, flags, taken)
        sets = any(isinstance(a, float) and not math.isfinite(a) for a in args)
        sets |= name in _SETTERS and not taken
        for tensor, contained in zip(made, flags, strict=True):
            if not any(contained):
                # Some operations return views, of which only another one may be not finite.
                if _key(tensor) not in map(_key, inputs):
                    self._origins.pop(_key(tensor), None)
                continue
            origin = passed_on(taken, contained, sets=sets, in_backward=self.in_backward)
            if origin is not None and origin.is_mask:
                origin = Origin(is_mask=True, line=origin.line or place.line)
            if origin is None:
                failed = self._failed(call, name, place, node, was, inputs)
                origin = Origin(failed._replace(of_infinities=bool(taken)), line=place.line)
            self._origins[_key(tensor)] = origin
        return result

    def _note_harm(
        self, call: _Call, made: list[Any], flags: list[Flags], taken: list[tuple[Origin, Flags]]
    ) -> None:
        """Notes an overflow of which an operation makes another number than of 65,504."""
        origin = overflow_in(taken)
        if origin is None or self.hidden or self.in_backward or any(map(any, flags)):
            return
        bounded = call.repeated(lambda t: torch.nan_to_num(t, math.nan, LARGEST, -LARGEST))
        for one, other in zip(made, bounded or made, strict=True):
            if one.is_floating_point() and is_harmed(largest(one - other), largest(other)):
                self.hidden = origin

    def _place(self, name: str, args: Any, inputs: list[Any]) -> tuple[Place, Any]:
        """Returns where an operation, or that of which it is the backward pass, was called."""
        if self.in_backward:
            node = torch._C._current_autograd_node()
            number = -1 if node is None else node._sequence_nr()
            return self._places.get(number, Place()), node
        module = self._calling[-1]
        place = Place(module, name, "" if module else _line())
        number = torch._C._autograd._get_sequence_nr() - 1
        if number >= self._first_number:
            self._places.setdefault(number, place)
        if name in _ADDING and inputs and inputs[0].dtype == torch.float16:
            for value in args[1:]:
                if isinstance(value, float) and 0 < abs(value) < _NORMAL:
                    self._epsilons[module] = value
        return place, None

    def _before_writes(self, func: Any, args: Any, kwargs: Any) -> dict[int, Any]:
        """Copies what an operation writes to; returns the copies by the ids of the tensors."""
        arguments = func._schema.arguments
        given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
        written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
        copies: dict[int, Any] = {}
        for tensor in tensors_in([given.get(name) for name in written]):
            copies[id(tensor)] = tensor.clone()
            if _key(tensor) not in self._made:
                self._written.append((tensor, copies[id(tensor)]))
        return copies

    def _failed(
        self, call: _Call, name: str, place: Place, node: Any, before: list[Any], inputs: list[Any]
    ) -> FailedOperation:
        """Describes an operation that makes something that is not finite."""
        floats = [t for t in before if t.is_floating_point() and t.numel()]
        decisive = (floats[1:] or floats) if name in ("div", "div_", "addcdiv") else floats[:1]
        operation = name
        if self.in_backward:
            is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
            of = "" if node is None else node.name().split("Backward")[0]
            operation = f"backward of {of if is_custom else place.name or of or name}"
        is_cast = name in ("_to_copy", "copy_")
        return FailedOperation(
            operation,
            place.module,
            self.in_backward,
            largest_input=max(map(largest, floats), default=0.0),
            largest_result=largest(floats[-1]) if is_cast and floats else _wide(call),
            meets_zero=any(bool((t == 0).any()) for t in decisive),
            meets_negative=any(bool((t < 0).any()) for t in decisive),
            cast_of=next((self._names.get(_key(t), "") for t in inputs[-1:]), ""),
            is_cast=is_cast,
            epsilon=self._epsilons.get(place.module, 0.0),
            in_float16=self._in_float16,
        )


class _Call(NamedTuple):
    """A call of an operation, and what it has written to as it was, by the ids of the tensors."""

    func: Any
    args: Any
    kwargs: Any
    before: dict[int, Any]

    def repeated(self, change: Callable[[Any], Any], dtypes: Mapping[Any, Any] = {}) -> Any:
        """Returns the tensors that the call makes of other ones; None if it cannot be repeated."""

        def other(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                value = self.before.get(id(value), value)
                return change(value) if value.is_floating_point() else value.clone()
            return dtypes.get(value, value) if isinstance(value, torch.dtype) else value

        if torch.Tag.nondeterministic_seeded in self.func.tags:
            # It would draw other random numbers.
            return None
        # Not every operation exists in every dtype.
        with contextlib.suppress(Exception):
            args, kwargs = tree_map(other, (self.args, self.kwargs))
            return list(tensors_in(self.func(*args, **kwargs)))
        return None


def _wide(call: _Call) -> float | None:
    """Returns the largest magnitude that a call computes in float64; None if not finite."""
    made = call.repeated(torch.Tensor.double, _WIDE)
    if made is None:
        return math.inf
    floats = [t for t in made if t.is_floating_point()]
    return max(map(largest, floats), default=0.0) if all(map(is_finite, floats)) else None


def _line() -> str:
    """The line of the program that is running, outside of the libraries."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _TORCH, "<frozen")) and "keras/src" not in file:
            return f"line {frame.f_lineno} of {os.path.basename(file)}"
        frame = frame.f_back
    return ""


# --- Tensors ------------------------------------------------------------------------------------


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in a nest, also in dataclasses, such as the outputs of Transformers."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        items = vars(value).items()
    for key, each in items:
        yield from named_tensors(each, f"{name}.{key}".lstrip("."))


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors in a nest."""
    return (tensor for _, tensor in named_tensors(value))


def _key(tensor: Any) -> int:
    if tensor.layout != torch.strided:
        return id(tensor)
    pointer: int = tensor.untyped_storage().data_ptr()
    return pointer


def _numbers(tensor: Any) -> Any:
    tensor = tensor.detach()
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor


def is_finite(tensor: Any) -> bool:
    """Whether no element is an infinity or NaN."""
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(_numbers(tensor).isfinite().all())


def _flags(tensor: Any) -> Flags:
    if is_finite(tensor):
        return Flags()
    numbers = _numbers(tensor)
    return Flags(bool(numbers.isnan().any()), bool(numbers.isinf().any()))


def largest(tensor: Any) -> float:
    """The largest finite magnitude in a tensor; 0 if there is none."""
    numbers = _numbers(tensor)
    return float(torch.nan_to_num(numbers, 0.0, 0.0, 0.0).abs().max()) if numbers.numel() else 0.0


def is_mask(tensor: Any) -> bool:
    """Whether a tensor is 0 where it is not minus infinity."""
    numbers = _numbers(tensor)
    return bool(((numbers == 0) | (numbers == -math.inf)).all())
