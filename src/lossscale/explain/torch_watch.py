"""Follows infinities and NaN through the operations of a pass, to the operation they come from."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lossscale.common.replaced_names import replace
from lossscale.explain.origins import Call, Evaluation, Flags, UnrepeatableError, line_of
from lossscale.explain.text import Failure, Origin
from lossscale.torch.scaling import is_finite, stored

_UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_")
_MESSAGES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
_GLOBAL_HOOKS = [name for name in vars(module_hooks) if re.match(r"_global_(for|back)ward_", name)]
_KEY = -1
"""The key of a hook, which a hook of a module, whose own are from 0 on, never has."""
# PyTorch's annotation leaves out None, outside of a node.
_current_node: Callable[[], torch.autograd.graph.Node | None] = torch._C._current_autograd_node
_WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}


class Watch(TorchDispatchMode):
    """Within it, the origin of each infinity and NaN is known, and no message is sent.

    Args:
        model: The model, for the names of its modules.

    Attributes:
        in_backward: Whether it watches a backward pass.
        evaluation: What it has seen.
    """

    def __init__(self, model: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of PyTorch
        root = type(model).__name__
        self._paths = {id(m): name or root for name, m in model.named_modules()}
        self.evaluation = _Evaluation()
        self._calling = [""]
        self._origins: dict[int, Origin] = {}
        # The module or line, and the name, of what is differentiated, by the number of its node.
        self._places: dict[int, tuple[str, str]] = {}
        self._first_number = torch._C._autograd._get_sequence_nr()
        self.in_backward = False

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """Computes a forward pass, and watches it. The user's hooks do not run."""
        with contextlib.ExitStack() as stack:
            own = {
                "_global_forward_pre_hooks": self._enter,
                "_global_forward_hooks": self._leave,
                "_global_forward_hooks_always_called": True,
            }
            for name in _GLOBAL_HOOKS:
                hooks = OrderedDict({_KEY: own[name]} if name in own else {})
                replace(stack, module_hooks, name, hooks)
            stack.enter_context(self)
            return compute()

    @contextlib.contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """Operations within it belong to a module."""
        self._calling.append(module)
        try:
            yield
        finally:
            self._calling.pop()

    def _enter(self, module: Module, args: object) -> None:
        self._calling.append(self._paths.get(id(module), self._calling[-1]))

    def _leave(self, *_: object) -> None:
        self._calling.pop()

    def mark(self, named: Iterable[tuple[str, Tensor]], *, is_weight: bool = False) -> None:
        """Remembers which tensors come from outside, and are not finite."""
        for name, tensor in named:
            if origin := self.evaluation.origin_of(tensor, name, is_weight=is_weight):
                self._origins[_key(tensor)] = origin

    def origin(self, tensors: Iterable[Tensor], *, masks: bool = False) -> Origin | None:
        """Returns the origin of the first tensor that is not finite.

        Args:
            tensors: The tensors.
            masks: Whether infinities count that the program sets, as in masked outputs.
        """
        unnamed = Origin(Failure.OTHER, "an operation", in_backward=self.in_backward)
        for tensor in tensors:
            if not is_finite(tensor):
                origin = self._origins.get(_key(tensor), unnamed)
                if masks or not origin.is_set:
                    return origin
        return None

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        _: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func.namespace in _MESSAGES:
            raise UnrepeatableError("processes communicate in this pass")
        name = func._schema.name.partition("::")[2]
        inputs = list(tensors_in((args, kwargs)))
        module, shown = self._caller(name)
        before = _before_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        if name in _UNSET or func.is_view:
            return result
        made = list(tensors_in(result))
        numbers = [value for value in args if type(value) in (int, float)]
        widened = functools.partial(_widened, func, (args, kwargs), before)
        call = Call(name.rstrip("_"), shown, module, self.in_backward, widened, numbers)
        given = [(before.get(id(each), each), self._origins.get(_key(each))) for each in inputs]
        origins = self.evaluation.origins(call, given, made)
        for tensor, origin in zip(made, origins, strict=True):
            if origin is not None:
                self._origins[_key(tensor)] = origin
            # Some operations return views, of which only another one may be not finite.
            elif _key(tensor) not in map(_key, inputs):
                self._origins.pop(_key(tensor), None)
        return result

    def _caller(self, name: str) -> tuple[str, str]:
        """Returns the module or line that calls an operation, and the name to show for it.

        In a backward pass, those of the operation that is differentiated.
        """
        if not self.in_backward:
            # Two calls above this one is what calls the operation.
            calls = traceback.walk_stack(sys._getframe(2))
            lines = ((f.f_code.co_filename, line, f.f_code.co_qualname) for f, line in calls)
            place = self._calling[-1] or line_of(lines), name
            number = torch._C._autograd._get_sequence_nr() - 1
            if number >= self._first_number:
                self._places.setdefault(number, place)
            return place
        node = _current_node()
        if node is None:
            return "", f"backward of {name}"
        module, shown = self._places.get(node._sequence_nr(), ("", ""))
        own = node.name().split("Backward")[0]
        is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        return module, f"backward of {own if is_custom else shown or own or name}"


class _Evaluation(Evaluation):
    """An evaluation of tensors, of which only those are copied to the host that matter."""

    def place_of(self, value: Tensor) -> tuple[int, int]:
        # Several may lie in one storage.
        return _key(value), value.data_ptr() if value.layout == torch.strided else 0

    def on_host(self, value: Tensor) -> numpy.ndarray[Any, Any]:
        return stored(value.detach()).cpu().double().numpy()

    def flags_of(self, value: Tensor) -> Flags:
        if is_finite(value):
            return Flags()
        numbers = stored(value.detach())
        return Flags(bool(numbers.isnan().any()), bool(numbers.isinf().any()))


def _before_writes(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Tensor]:
    """Copies of what an operation writes to, by the ids of the tensors."""
    arguments = func._schema.arguments
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
    return {id(t): t.clone() for t in tensors_in([given.get(name) for name in written])}


def _widened(
    func: torch._ops.OpOverload,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    before: Mapping[int, Tensor],
) -> list[Tensor]:
    """The tensors that an operation makes in float64.

    Args:
        func: The operation.
        arguments: Its arguments, by position and by name.
        before: What it has written to as it was, by the ids of the tensors.
    """

    def other(value: object) -> object:
        if isinstance(value, Tensor):
            was = before.get(id(value), value)
            wide = was.double() if was.is_floating_point() else was
            # It may write to it.
            return wide.clone() if id(value) in before else wide
        return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

    if torch.Tag.nondeterministic_seeded in func.tags:
        raise UnrepeatableError("it would draw other random numbers")
    args, kwargs = tree_map(other, arguments)
    return list(tensors_in(func(*args, **kwargs)))


# --- Tensors ------------------------------------------------------------------------------------


def named_tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a nest, also in dataclasses, such as the outputs of Transformers."""
    if isinstance(value, Tensor):
        yield name, value
        return
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = vars(value).items()
    for key, item in items:
        yield from named_tensors(item, f"{name}.{key}".lstrip("."))


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a nest."""
    return (tensor for _, tensor in named_tensors(value))


def _key(tensor: Tensor) -> int:
    is_strided = tensor.layout == torch.strided
    return int(tensor.untyped_storage().data_ptr()) if is_strided else id(tensor)
