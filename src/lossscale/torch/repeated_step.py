"""Explains a skipped step: repeats its forward and backward pass, and finds what failed.

A skipped step has not changed the weights. References to the inputs, to the random state and to the
gradients of the outputs are therefore enough to repeat it.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import pickle
import random
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

from lossscale.checks import checked_above_zero
from lossscale.common.monkeypatch import replace
from lossscale.errors import ArgumentTypeError
from lossscale.monitoring.explanation import (
    LARGEST,
    Cause,
    Explanation,
    in_the_loss,
    scaled_outputs,
    unknown,
    with_hidden,
)
from lossscale.monitoring.origins import Watched, explain_pass
from lossscale.torch.buffers import Hook, innermost
from lossscale.torch.ranks import is_spread
from lossscale.torch.scaling import scaled
from lossscale.torch.watch import UnrepeatableError, Watch, is_finite, largest, tensors_in

DEFAULT_BYTES = 2**28
"""The limit for what is held of a step."""
_STATE_BYTES = 2**15
"""About the size of the random state that is held for each call of the model."""
_FIRST_CALLS = 3
"""Calls of a model that show whether it draws numbers from Python's or NumPy's generator."""
_VERSION = operator.attrgetter("_version")
_NEAR = 64
"""The distance to overflow of the gradients next to one that overflows."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def explain(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    parameters: Iterable[torch.nn.Parameter] | None = None,
    scale: float = 2.0**15,
) -> Explanation:
    """Explains why a step on a batch would be skipped: the first operation that is not finite.

    Computes the loss and its gradients once, under `torch.autocast` to float16, and watches each
    operation. The model stays unchanged, as with `diagnose`; hooks on its modules do not run.

    Args:
        model: The model. With `DistributedDataParallel`, pass `model.module`.
        loss_fn: Called with the model and the batch. Returns the unscaled loss, a tensor with one
            element. It needs no `autocast`.
        batch: One batch of any kind that `loss_fn` takes.
        parameters: The parameters that the optimizer of this loss trains, if not all.
        scale: The loss scale of the step.

    Returns:
        The explanation. Its cause is "unknown" if the forward and the backward pass are finite,
        unless an overflow is hidden in them, as that of the squares in a norm.

    Raises:
        ArgumentTypeError: If the model or the loss have another type.
        ArgumentError: If `scale` is not a number above 0.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, batch):
        ...     return (model(batch) * 0.0).sum().sqrt()
        >>> found = explain(model, loss_fn, torch.ones(2, 3))
        >>> str(found.cause), found.operation
        ('singular', 'backward of sqrt')
    """
    check_model_and_loss(model, loss_fn)
    scale = checked_above_zero("scale", scale)
    if why := _refusal(model):
        return unknown(why)
    device = next((p.device.type for p in model.parameters()), "cpu")
    casts = all(p.dtype != torch.float16 for p in model.parameters())
    owned = set(map(id, model.parameters() if parameters is None else parameters))
    trained = [p for p in model.parameters() if p.requires_grad and id(p) in owned]
    try:
        with _as_it_was(model) as (watch, kept, aliases):
            kept.add(batch, "batch")
            if not model.training:
                model.train()
            with watch.forward():
                with torch.autocast(device, torch.float16, enabled=casts):
                    loss = loss_fn(model, batch)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise ArgumentTypeError(
                        f"`loss_fn` must return a tensor with one element. Received: {loss!r}."
                    )
                outputs = [scaled(loss.reshape(()), 1.0)]
            roots = [aliases[p] for p in trained]
            return examined(watch, outputs, roots, [torch.full_like(outputs[0], scale)], scale)
    except UnrepeatableError as error:
        return unknown(str(error))


def check_model_and_loss(model: Any, loss_fn: Any) -> None:
    """Checks that they are a model and a function."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            "The model must be a torch.nn.Module. "
            f"Received: {model!r} of type {type(model).__name__}."
        )
    if not callable(loss_fn):
        raise ArgumentTypeError(
            "`loss_fn` must be a function of the model and a batch that returns the loss. "
            f"Received: {loss_fn!r} of type {type(loss_fn).__name__}."
        )


class CallRecorder:
    """Holds what is needed to repeat the calls of a model since the last step.

    Args:
        model: The model; with `DistributedDataParallel` and compiled models the module in it.
        limit: The most bytes of tensors that are held.
    """

    def __init__(self, model: torch.nn.Module, limit: int) -> None:
        self._model, self._limit = innermost(model), limit
        self._calls: list[_Call] = []
        self._made = self._held = self._weights = 0
        self._is_stale = False
        self._parameters = list(self._model.parameters())
        self._now: _Call | None = None
        # The number of calls that drew nothing from them; minus infinity after one that did.
        self._undrawn = 0.0
        self._handles = [
            self._model.register_forward_pre_hook(Hook(self._called), with_kwargs=True),
            self._model.register_forward_hook(Hook(self._returned)),
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self.reset()

    def reset(self) -> None:
        """Forgets the calls, whose step is over."""
        self._calls, self._made, self._held, self._is_stale = [], 0, 0, False

    def end(self) -> None:
        """Forgets the calls when the next one comes: other optimizers may step on these."""
        self._is_stale = True

    # Neither may raise in a program that runs without it.
    def _called(self, model: Any, args: Any, kwargs: Any) -> None:
        self._now = None
        if not torch.is_grad_enabled():
            return
        if self._is_stale:
            self.reset()
        self._made += 1
        with contextlib.suppress(Exception):
            call = _Call(args, kwargs, self._undrawn < _FIRST_CALLS)
            self._held += _STATE_BYTES + sum(t.numel() * t.element_size() for t in call.given)
            if self._held <= self._limit:
                self._now = call

    def _returned(self, model: Any, args: Any, output: Any) -> None:
        call, self._now = self._now, None
        if call is None:
            return
        # A forward pass may change weights, too, such as those that `max_norm` limits.
        self._weights = self._versions()
        self._calls.append(call)
        if 0 <= self._undrawn < _FIRST_CALLS:
            self._undrawn += 1 if _same(call.drawn_from, _states_of_host()) else -math.inf
        with contextlib.suppress(Exception):
            outputs = [(n, t) for n, t in enumerate(tensors_in(output)) if t.requires_grad]
            # The gradient of an output needs the same room. The small ones first: one may be the
            # loss.
            for number, tensor in sorted(outputs, key=lambda each: int(each[1].numel())):
                self._held += 2 * tensor.numel() * tensor.element_size()
                if self._held > self._limit:
                    call.is_cut = True
                    return
                call.outputs[number] = tensor.detach()
                tensor.register_hook(functools.partial(_keep, call.gradients, number))

    def _versions(self) -> int:
        return sum(map(_VERSION, self._parameters))

    def explain(self, scale: float) -> Explanation:
        """Explains the step that was just skipped; changes nothing that training depends on."""
        try:
            if why := _refusal(self._model) or self._why_not():
                return unknown(why)
            for number, call in enumerate(self._calls, start=1):
                found = _repeated(self._model, call, scale) if call.gradients else unknown("")
                if found.cause is not Cause.UNKNOWN:
                    if self._made > 1:
                        reason = f"in call {number} of {self._made} of the model, {found.reason}"
                        found = dataclasses.replace(found, reason=reason)
                    return found
        # A model may raise anything, and training has to continue.
        except Exception as error:
            line = str(error).split("\n")[0][:200]
            if isinstance(error, UnrepeatableError):
                return unknown(line)
            return unknown(f"the pass cannot be repeated ({type(error).__name__}: {line})")
        finally:
            torch.clear_autocast_cache()
        if self._is_cut():
            return unknown(f"{self._too_large()}, and the others are finite")
        return unknown(
            "the pass of this step is finite when it is repeated. Another process may have "
            "overflowed, or gradients were changed after the backward pass"
        )

    def _is_cut(self) -> bool:
        return self._made > len(self._calls) or any(each.is_cut for each in self._calls)

    def _too_large(self) -> str:
        return f"the calls of the model need more than explain_bytes={self._limit} of Monitor"

    def _why_not(self) -> str:
        if not any(each.gradients for each in self._calls):
            if self._is_cut():
                return self._too_large()
            return (
                "the model that Monitor has was not called in this step as model(...), outside of "
                "compiled code, or no gradient reached what it returned"
            )
        if self._weights != self._versions():
            return "another optimizer has changed the weights since the forward pass"
        if any(each.versions != list(map(_VERSION, each.given)) for each in self._calls):
            return "the arguments of the model were written to after its call"
        return ""


class _Call:
    """A call of the model."""

    def __init__(self, args: Any, kwargs: Any, may_draw: bool) -> None:
        self.args = list(map(_copied, args))
        self.kwargs = {name: _copied(value) for name, value in kwargs.items()}
        values = *self.args, *self.kwargs.values()
        self.given = [tensor for value in values for tensor in tensors_in(value)]
        self.versions = list(map(_VERSION, self.given))
        self.random = _states_of_torch()
        # Read only if need be: it takes as long as the rest.
        self.drawn_from = _states_of_host() if may_draw else None
        devices = {"cpu", *(t.device.type for t in self.given)}
        self.casting = [
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices
        ]
        self.is_cut = False
        self.outputs: dict[int, Any] = {}
        self.gradients: dict[int, Any] = {}


def _copied(nest: Any) -> Any:
    """A nest of the same tensors; the program may change the other one."""
    return nest if isinstance(nest, torch.Tensor) else tree_map(lambda leaf: leaf, nest)


def _keep(gradients: dict[int, Any], number: int, gradient: Any) -> None:
    """Keeps the gradient of an output; holds neither the output nor its graph."""
    before = gradients.get(number)
    gradient = gradient.detach()
    gradients[number] = gradient if before is None else before + gradient


def _refusal(model: Any) -> str:
    """Returns why a model cannot be repeated; "" if it can be tried."""
    for module in model.modules():
        name = type(module).__name__
        if "FullyShardedDataParallel" in name or name.startswith("FSDP"):
            return "the model is sharded by FSDP, whose processes communicate in the forward pass"
        if isinstance(module, torch.nn.SyncBatchNorm):
            return "processes communicate in the forward pass of SyncBatchNorm"
        if isinstance(module, torch.jit.ScriptModule):
            return "a part of the model is a ScriptModule, whose operations have no modules"
    if any(map(is_spread, model.parameters())):
        return "parameters are sharded over processes, which would communicate"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the step is captured in a CUDA graph"
    return ""


# --- The repeated pass --------------------------------------------------------------------------


def _repeated(model: Any, call: _Call, scale: float) -> Explanation:
    """Repeats a call, and explains it."""
    with _as_it_was(model) as (watch, kept, aliases):
        _set_states_of_torch(call.random)
        if call.drawn_from is not None:
            _set_states_of_host(call.drawn_from)
        before = _states_of_host()
        roots = [alias for alias in aliases.values() if alias.requires_grad]

        def renewed(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value = value.detach().requires_grad_()
                roots.append(value)
            return value

        args, kwargs = tree_map(renewed, (call.args, call.kwargs))
        for name, value in _named(model, args, kwargs).items():
            kept.add(value, name)
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in call.casting:
                stack.enter_context(torch.autocast(device, dtype, enabled=enabled))
            torch.clear_autocast_cache()
            stack.enter_context(watch.forward())
            returned = list(tensors_in(model(*args, **kwargs)))
        if call.drawn_from is None and not _same(before, _states_of_host()):
            raise UnrepeatableError("the model draws from `random` or NumPy in some passes only")
        numbers = sorted(n for n in call.gradients if n < len(returned))
        numbers = _last_ones(returned, numbers)
        outputs = [returned[number] for number in numbers]
        known = [call.outputs[number] for number in numbers]
        origin = watch.origin(outputs)
        if any(map(_differ, outputs, known)):
            raise UnrepeatableError(
                "the model returns something else when the pass is repeated. It draws random "
                "numbers of its own, keeps a state, or has hooks that change results"
            )
        seeds = [call.gradients[number] for number in numbers]
        of_outputs = None
        if origin is None and not all(map(is_finite, seeds)):
            of_outputs = with_hidden(_of_seeds(outputs, seeds, scale), watch.hidden)
            if of_outputs.cause is not Cause.SCALE:
                return of_outputs
            # At a lower scale they are finite, and something else may not be.
            seeds = list(map(torch.nan_to_num, seeds))
        with contextlib.ExitStack() as stack:
            for device, _, dtype in call.casting:
                stack.enter_context(torch.autocast(device, dtype, enabled=False))
            found = examined(watch, outputs, roots, seeds, scale, is_loss=False)
        is_broken = found.halvings is None and found.in_backward
        return found if of_outputs is None or is_broken else of_outputs


def examined(
    watch: Watch,
    outputs: list[Any],
    roots: list[Any],
    seeds: list[Any],
    scale: float,
    *,
    is_loss: bool = True,
    in_float32: Callable[[float], Watched] | None = None,
) -> Explanation:
    """Explains what is not finite in outputs, or in their gradients.

    Args:
        watch: Has watched the forward pass.
        outputs: The outputs.
        roots: The tensors to differentiate by.
        seeds: The gradients of the outputs.
        scale: The loss scale.
        is_loss: Whether the output is a loss, which no mask makes infinite.
        in_float32: As for `explain_pass`.
    """
    pairs = [pair for pair in zip(outputs, seeds, strict=True) if pair[0].requires_grad]

    def watched(lower: float) -> Watched:
        origin = watch.origin(outputs, masks=is_loss)
        if origin is not None or not pairs or not roots:
            return Watched(origin, None, watch.hidden)
        derived, by = zip(*((out, seed * (lower / scale)) for out, seed in pairs), strict=True)
        with watch.backward():
            found = torch.autograd.grad(derived, roots, by, retain_graph=True, allow_unused=True)
            return Watched(None, watch.origin(g for g in found if g is not None), watch.hidden)

    return explain_pass(watched, scale, in_float32)


def _of_seeds(outputs: list[Any], seeds: list[Any], scale: float) -> Explanation:
    """The explanation of gradients that reach finite outputs and are not finite."""
    bad = [seed for seed in seeds if not is_finite(seed)]
    infs, nans = (sum(int(test(t).sum()) for t in bad) for test in (torch.isinf, torch.isnan))
    others = max(map(largest, bad))
    if not nans and all(t.dtype == torch.float16 for t in bad):
        # Infinities beside numbers near overflow come from the scale, in the cast to the outputs.
        if others > LARGEST / _NEAR:
            return scaled_outputs(infs, scale)
        if others == 0:
            # Whether the loss is finite decides; see `Monitor.step`.
            return scaled_outputs(infs, scale, is_sure=False)
    return in_the_loss(infs, nans, max(map(largest, outputs)))


def _last_ones(returned: list[Any], numbers: list[int]) -> list[int]:
    """Leaves out outputs that another output was computed from, such as the logits of a loss."""
    nodes = {returned[n].grad_fn: n for n in numbers if returned[n].grad_fn is not None}
    if len(nodes) < 2:
        return numbers
    inner = set()
    for start in nodes:
        seen, left = {start}, [start]
        while left:
            for node, _ in left.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    left.append(node)
        inner |= (seen & nodes.keys()) - {start}
    return [n for n in numbers if returned[n].grad_fn not in inner] or numbers


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[tuple[Watch, _Kept, dict[Any, Any]]]:
    """Yields a watch, what is kept, and by each parameter of the model what it is within it.

    Afterwards it restores all. In place of the parameters the model has aliases, without hooks and
    `.grad`, and in place of the buffers copies.
    """
    aliases = {p: p.detach().requires_grad_(p.requires_grad) for p in model.parameters()}
    copies = {b: b.detach().clone() for b in model.buffers()}
    others = aliases | copies
    tensors = {n: others[t] for n, t in (*model.named_parameters(), *model.named_buffers())}
    watch = Watch(model, tensors)
    kept = _Kept(watch)
    for path, module in model.named_modules():
        kinds = [
            k for k in type(module).__mro__ if not k.__module__.startswith(("torch.", "built"))
        ]
        for each in (vars(module), module, *kinds):
            kept.add(each, path, is_weight=True)
    for name, tensor in tensors.items():
        watch.mark(tensor, name, is_weight=True)
    states = _states_of_torch(), _states_of_host()
    try:
        for module in model.modules():
            for name in _HOOKS:
                hooks = vars(module)[name].items()
                vars(module)[name] = OrderedDict(each for each in hooks if _is_torchs(each[1]))
            for table in (module._parameters, module._buffers):
                table.update({n: others[t] for n, t in table.items() if t is not None})
            if isinstance(module, torch.nn.RNNBase):
                # It holds its parameters a second time.
                names = module._flat_weights_names
                vars(module)["_flat_weights"] = [getattr(module, name) for name in names]
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(eager_passes(model))
            yield watch, kept, aliases
    finally:
        kept.restore()
        watch.restore()
        _set_states_of_torch(states[0])
        _set_states_of_host(states[1])


@contextlib.contextmanager
def eager_passes(model: Any) -> Iterator[None]:
    """Within it, a model runs uncompiled, and its passes can be differentiated.

    Compiled modules call no hooks. The caller restores the attributes of the modules.
    """
    with contextlib.ExitStack() as stack:
        # Tensors of inference mode cannot be differentiated.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
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


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is a part of the model, such as that of a spectral norm."""
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(hook, "__module__", "")).startswith("torch.")


_HOPS = 2
"""The most objects and functions on the way to a value, so that not all of a trainer is kept."""


class _Kept:
    """The objects that a forward pass may write to, with their contents.

    Args:
        watch: Is told which tensors are not finite.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._known: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []

    def add(self, value: Any, name: str, *, is_weight: bool = False) -> None:
        """Adds a value and what it contains."""
        left = collections.deque([(value, name, 0)])
        while left:
            value, name, hops = left.popleft()
            if id(value) in self._known or hops > _HOPS:
                continue
            # Held, because an object that takes its place in memory has the same id.
            self._known[id(value)] = value
            if isinstance(value, torch.Tensor):
                self._watch.mark(value, name, is_weight=is_weight)
            elif isinstance(value, Iterator) and not hops:
                raise UnrepeatableError(f"{name} is an iterator, which cannot be put back")
            if undo := _undo_of(value):
                self._undo.append(undo)
            inner = list(_items(value))
            left.extend((each, f"{name}.{key}".strip("."), hops) for key, each in inner)
            left.extend((each, name, hops + 1) for each in _parts(value))

    def restore(self) -> None:
        """Restores all of it."""
        for undo in self._undo:
            # A container of the program may refuse; the others are restored.
            with contextlib.suppress(Exception):
                undo()


def _undo_of(value: Any) -> Callable[[], object] | None:
    """Returns what restores a value; None if it cannot change, or is restored by its parts."""
    if isinstance(value, torch.Tensor):
        return functools.partial(_reset_data, value, value.data)
    if isinstance(value, (list, dict, set, collections.deque)):
        return functools.partial(_refill, value, value.copy())
    if isinstance(value, (bytearray, array.array)):
        return functools.partial(value.__setitem__, slice(None), value[:])
    if isinstance(value, types.CellType):
        undo = setattr if (contents := _contents(value)) else delattr
        return functools.partial(undo, value, "cell_contents", *contents)
    if isinstance(value, type):
        return functools.partial(_reset, value, dict(vars(value)))
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.random.RandomState):
            return functools.partial(value.set_state, value.get_state())
        bits = value.bit_generator if isinstance(value, numpy.random.Generator) else value
        if isinstance(bits, numpy.random.BitGenerator):
            return functools.partial(setattr, bits, "state", bits.state)
        if isinstance(value, numpy.ndarray) and value.flags.writeable:
            return functools.partial(numpy.copyto, value, value.copy())
    slots = _slots(value)
    return functools.partial(_reset, value, slots) if slots else None


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """The contents of a container, or the attributes of a class, by their keys."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, type):
        return vars(value).items()
    return enumerate(value) if isinstance(value, (list, tuple, set, collections.deque)) else ()


def _parts(value: Any) -> list[Any]:
    """The objects that hold what an object, a method or a function may write to."""
    if isinstance(value, (type, types.ModuleType)):
        return []
    parts = [vars(value)] if hasattr(value, "__dict__") else []
    if isinstance(value, functools.partial):
        parts += [value.func, value.args, value.keywords]
    elif isinstance(value, types.CellType):
        parts += _contents(value)
    elif isinstance(value, types.FunctionType):
        parts += [value.__defaults__, value.__kwdefaults__, value.__closure__]
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        parts.append(value.__self__)
    return [*parts, *_slots(value).values()]


def _contents(cell: Any) -> list[Any]:
    """The variable of a function; nothing if it was not assigned yet."""
    with contextlib.suppress(ValueError):
        return [cell.cell_contents]
    return []


def _slots(value: Any) -> dict[str, Any]:
    """The attributes of an object that are not in its `__dict__`."""
    named = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = itertools.chain(*([each] if isinstance(each, str) else each for each in named))
    return {n: getattr(value, n) for n in names if n[:2] != "__" and hasattr(value, n)}


def _reset(owner: Any, before: dict[str, Any]) -> None:
    """Restores the attributes of an object that have changed."""
    now = vars(owner) if isinstance(owner, type) else _slots(owner)
    for name in now.keys() | before.keys():
        if name not in before:
            delattr(owner, name)
        elif name not in now or now[name] is not before[name]:
            setattr(owner, name, before[name])


def _reset_data(tensor: Any, before: Any) -> None:
    """Restores the memory that a tensor has, if the program gave it another one."""
    if tensor.data_ptr() != before.data_ptr() or tensor.shape != before.shape:
        tensor.data = before


def _refill(now: Any, before: Any) -> None:
    pairs = [list(each.items() if isinstance(each, dict) else each) for each in (now, before)]
    if list(map(_ids, pairs[0])) == list(map(_ids, pairs[1])):
        # Another thread may be writing to it.
        return
    now.clear()
    (now.update if isinstance(now, (dict, set)) else now.extend)(before)


def _ids(entry: Any) -> Any:
    return tuple(map(id, entry)) if type(entry) is tuple else id(entry)


def _named(model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by their names."""
    try:
        return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{str(n): value for n, value in enumerate(args)}, **kwargs}


def _differ(now: Any, before: Any) -> bool:
    """Whether an output is not what it was in training."""
    # A spectral norm has made a step since, so that the numbers differ a little.
    is_alike = now.shape == before.shape and now.dtype == before.dtype
    return not is_alike or is_finite(now) != is_finite(before)


# --- Generators of random numbers ---------------------------------------------------------------


def _states_of_torch() -> Any:
    # On a device it is the host that has the state, so nothing waits.
    initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
    on_devices = [g.get_state() for g in torch.cuda.default_generators] if initialized else []
    return torch.get_rng_state(), on_devices


def _set_states_of_torch(states: Any) -> None:
    torch.set_rng_state(states[0])
    for generator, state in zip(torch.cuda.default_generators, states[1], strict=False):
        generator.set_state(state)


def _states_of_host() -> Any:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_states_of_host(states: Any) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def _same(states: Any, others: Any) -> bool:
    return pickle.dumps(states) == pickle.dumps(others)
