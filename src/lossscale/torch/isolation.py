"""Runs a forward and a backward pass of a model, and restores all that they change."""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing.connection
import multiprocessing.queues
import queue
import random
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import CheckpointFunction

from lossscale.common.monkeypatch import replace
from lossscale.errors import first_line
from lossscale.monitoring.origins import UnrepeatableError
from lossscale.torch.watch import Watch, named_tensors

Known: TypeAlias = dict[int, Any]
"""What is in place of an object, by its id, as `copy.deepcopy` takes it."""
RandomStates: TypeAlias = tuple[Tensor, list[Tensor], tuple[tuple[Any, ...], Any] | None]
"""The states of PyTorch's generators, and those of Python and NumPy or None."""

_NAMES: dict[type, tuple[str, ...]] = {
    Module: ("__dict__",),
    types.FunctionType: ("__dict__", "__defaults__"),
    types.CellType: ("cell_contents",),
}
"""What holds the attributes of a module, and the variables of a function."""
_TAKING = (
    (queue.Queue, "get"),
    (multiprocessing.queues.Queue, "get"),
    (multiprocessing.connection.Connection, "recv"),
    (multiprocessing.connection.Connection, "recv_bytes"),
    (threading.Semaphore, "acquire"),
)
_WAIT = 10
"""Seconds after which the repeated pass waits no longer for another thread."""


@contextlib.contextmanager
def isolated(model: Module, given: dict[str, Any]) -> Iterator[tuple[Watch, Known]]:
    """Within it, the model has copies of all that a forward pass may write to.

    In place of the parameters it has aliases, without hooks and `.grad`. Tensors in attributes and
    arguments get aliases, too, whose memory the watch restores. Yields the watch, and what is in
    place of each object.
    """
    known: Known = {id(m): m for m in model.modules()}
    known |= {id(p): p.data.requires_grad_(p.requires_grad) for p in model.parameters()}
    known |= {id(b): b.detach().clone() for b in model.buffers()}
    tensors = {n: known[id(t)] for n, t in (*model.named_parameters(), *model.named_buffers())}
    watch = Watch(model, tensors)
    for name, tensor in tensors.items():
        watch.mark(tensor, name, is_weight=True)
    for name, tensor in named_tensors(given):
        watch.mark(tensor, name)
        # A tensor of inference mode hides its casts.
        data = tensor.clone() if tensor.is_inference() else tensor.data
        known.setdefault(id(tensor), data.requires_grad_(tensor.requires_grad))
    for path, module in model.named_modules():
        for name, tensor in named_tensors(vars(module), path):
            if id(tensor) not in known:
                watch.mark(tensor, name, is_weight=True)
                known[id(tensor)] = tensor.data
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, OrderedDict):
                known[id(value)] = OrderedDict(h for h in value.items() if _is_torchs(h[1]))
            elif name == "_trainer" or isinstance(value, types.ModuleType):
                # Lightning's trainer holds the data.
                known[id(value)] = value
    places = list(_places(model))
    # Accelerate's object around a forward pass cannot be copied; what it calls is in the places.
    known |= {id(value): value for _, _, value in places if _is_of_accelerate(value)}
    states = random_states()
    try:
        for owner, name, value in places:
            what = f"an attribute of {type(owner).__name__}"
            object.__setattr__(owner, name, copied(value, known, what))
        with warnings.catch_warnings(action="ignore"), eager_passes(model), _taking_nothing():
            yield watch, known
    finally:
        for place in places:
            object.__setattr__(*place)
        watch.restore()
        set_random_states(states)


@contextlib.contextmanager
def _taking_nothing() -> Iterator[None]:
    """Within it, this thread takes nothing that the program would miss, and waits not for long."""
    here, wait = threading.get_ident(), threading.Condition.wait

    def or_refused(take: Callable[..., object]) -> Callable[..., object]:
        def taken(*args: Any, **kwargs: Any) -> object:
            if threading.get_ident() == here:
                raise UnrepeatableError("the forward pass takes from a queue, or what is like one")
            return take(*args, **kwargs)

        return taken

    def waited(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.get_ident() != here or timeout is not None:
            return wait(condition, timeout)
        if not wait(condition, _WAIT):
            raise UnrepeatableError("the forward pass waits for another thread")
        return True

    with contextlib.ExitStack() as stack:
        for kind, name in _TAKING:
            replace(stack, kind, name, or_refused(getattr(kind, name)))
        replace(stack, threading.Condition, "wait", waited)
        yield


def _places(model: Module) -> Iterator[tuple[object, str, object]]:
    """The attributes of the modules, and of the functions in them, with their values."""
    owners: list[object] = list(model.modules())
    seen: set[int] = set()
    while owners:
        owner = owners.pop()
        owner = owner.__func__ if isinstance(owner, types.MethodType) else owner
        owner = vars(owner)["__wrapped__"] if _is_of_accelerate(owner) else owner
        names = next((names for kind, names in _NAMES.items() if isinstance(owner, kind)), ())
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name in names:
            # A variable may not be assigned yet.
            with contextlib.suppress(ValueError):
                value = getattr(owner, name)
                yield owner, name, value
                owners += value.values() if isinstance(value, dict) else [value]
        if isinstance(owner, types.FunctionType):
            owners += [*(owner.__closure__ or ()), *(owner.__defaults__ or ())]


def copied(value: Any, known: Known, what: str) -> Any:
    """A copy of a value; in place of objects in it come those that are known by their ids."""
    try:
        return copy.deepcopy(value, known)
    except Exception as error:
        raise UnrepeatableError(f"{what} cannot be copied: {first_line(error)}") from error


@contextlib.contextmanager
def eager_passes(model: Module) -> Iterator[None]:
    """Within it, a model runs uncompiled, and its passes can be differentiated.

    Compiled modules call no hooks. The caller restores the attributes of the modules.
    """
    # Tensors of inference mode cannot be differentiated.
    with contextlib.ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        # Reentrant checkpointing would call `backward` within the backward pass, which
        # `torch.autograd.grad` refuses. The gradients are the same without it.
        called = staticmethod(lambda function, preserve, *args: function(*args))
        replace(stack, CheckpointFunction, "apply", called)
        stance = getattr(torch.compiler, "set_stance", None)
        if stance is not None:
            stack.enter_context(stance("force_eager"))
        else:
            # PyTorch 2.4 and 2.5.
            for module in model.modules():
                vars(module)["_compiled_call_impl"] = None
                if "_orig_mod" in module._modules:
                    vars(module)["forward"] = module._modules["_orig_mod"]
        yield


def _is_of_accelerate(value: object) -> bool:
    return type(value).__module__ == "accelerate.utils.operations"


def _is_torchs(hook: object) -> bool:
    """Whether a hook is a part of the model, such as that of a spectral norm."""
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(hook, "__module__", "")).startswith("torch.")


# --- Generators of random numbers ---------------------------------------------------------------


def random_states(*, of_host: bool = True) -> RandomStates:
    """The states of the generators that a pass may draw from; `of_host`: also those of the host."""
    return (
        torch.get_rng_state(),
        # On a device it is the host that has the state, so nothing waits.
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        (random.getstate(), numpy.random.get_state()) if of_host else None,
    )


def set_random_states(states: RandomStates) -> None:
    of_cpu, of_devices, of_host = states
    torch.set_rng_state(of_cpu)
    torch.cuda.set_rng_state_all(of_devices)
    if of_host is not None:
        random.setstate(of_host[0])
        numpy.random.set_state(of_host[1])
