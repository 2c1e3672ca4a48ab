"""Trains float16 parameters by float32 copies of them, the master weights.

Between steps the optimizer's groups and state name the parameters. While it steps, they name the
masters, which are then rounded into the parameters. The gradient of a parameter is float32 and
serves both.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import reprlib
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lossscale.common.checks import check_not_wrapped, remember_wrapper
from lossscale.errors import (
    AlreadyWrappedError,
    ArgumentTypeError,
    CallOrderError,
    StateDictError,
    UnsupportedError,
)
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.packages import warn
from lossscale.torch import fused, ranks
from lossscale.torch.optimizer_list import OuterOptimizer, check_needs_no_closure

Pairs = list[tuple[Tensor, Tensor]]
"""Parameters, each with its master."""

_KEY, _REFUSES = "master_weight", "masters"
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_NARROW = frozenset({torch.float16, torch.bfloat16})
_FACTS = operator.attrgetter("dtype", "device", "shape")
_TOGETHER = {"cpu": 2**15}
"""Elements that are compared together, in a few times their memory: in a cache, or all that fit."""

_sharing: weakref.WeakSet[MasterWeights] = weakref.WeakSet()
"""Those that have masters."""


class MasterWeights(OuterOptimizer):
    """Makes an optimizer update float32 copies of float16 and bfloat16 parameters.

    ```
    inner = MasterWeights(torch.optim.AdamW(model.half().parameters()))
    optimizer = LossScaleOptimizer(inner)
    ```

    The copies start from the parameters. Each step updates them and rounds them into the
    parameters, so that updates too small for float16 add up. `.grad` of a float16 parameter is
    float32. What other code writes into a parameter between two steps replaces the copy.

    The groups, the state and the hyperparameters are those of the optimizer. In its state each
    parameter also has `master_weight`, which state dictionaries contain. Hooks of either optimizer
    see the parameters; PyTorch's global optimizer hooks see the masters. It can be used with a
    gradient scaler, and alone for bfloat16.

    Args:
        optimizer: The `torch.optim.Optimizer`, an instance.

    Raises:
        TypeError: If it is not an optimizer, or has loss scaling or masters already.
        UnsupportedError: Before PyTorch 2.10, if a float16 parameter is sharded, or if an attribute
            of the optimizer, besides its groups, holds float16 parameters.

    Examples:
        >>> model = torch.nn.Linear(3, 1).half()
        >>> inner = lossscale.torch.MasterWeights(torch.optim.AdamW(model.parameters()))
        >>> optimizer = lossscale.torch.LossScaleOptimizer(inner)
        >>> loss = model(torch.ones(2, 3, dtype=torch.float16)).float().mean()
        >>> optimizer.backward(loss)
        tensor(True)
        >>> optimizer.step()
        >>> model.weight.dtype, model.weight.grad.dtype, inner.masters[model.weight].dtype
        (torch.float16, torch.float32, torch.float32)

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.1,
    https://arxiv.org/abs/1710.03740.
    """

    # Where users find it, and so what pickles name.
    __module__ = "lossscale.torch"

    inner_optimizer: Optimizer
    _masters: dict[Tensor, Tensor]

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, (FrontDoor, MasterWeights)):
            raise AlreadyWrappedError(
                f"Received: {type(optimizer).__name__}. The order is "
                "LossScaleOptimizer(MasterWeights(optimizer))."
            )
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                "MasterWeights takes a torch.optim.Optimizer, an instance. Received: "
                f"{type(optimizer).__name__}. Several optimizers get one each: "
                "LossScaleOptimizer([MasterWeights(first), MasterWeights(second)])."
            )
        check_not_wrapped(optimizer)
        check_needs_no_closure(optimizer)
        self.__setstate__({"inner_optimizer": optimizer, "_masters": {}})

    def __getstate__(self) -> dict[str, Any]:
        self._round_written()
        return {"inner_optimizer": self.inner_optimizer, "_masters": self._masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, optimizers=[state["inner_optimizer"]])
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._is_stepping = self._warned = False
        self._pairs: Pairs = []
        self._facts: list[object] = []
        self._dtypes: dict[int, torch.dtype] = {}
        self._versions: list[int] = []
        # While gradients are still of the parameters' dtype; see `state`.
        self._narrow_until_first: list[RemovableHandle] = []
        # It may refuse parameters, and has changed nothing then.
        self._prepare()
        self._refuse_other_steps()
        remember_wrapper(self.inner_optimizer, self)

    # --- What it shows of the optimizer -----------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, with the parameters of the model."""
        # Each verb of a loss scale reads them before the backward pass, or before it unscales.
        if not self._is_stepping and self._watched() != self._last_watched:
            self._prepare()
        return self.inner_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner_optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # only read
        """The default hyperparameters of the optimizer."""
        return self.inner_optimizer.defaults

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the optimizer by parameter, with `master_weight` after the first step."""
        pairs, state = self._pairs, self.inner_optimizer.state
        if not (state or self._narrow_until_first or any(p.grad is not None for p, _ in pairs)):
            # torch.distributed.checkpoint makes an empty state by a step with gradients of the
            # parameters' dtype. Then reading `param_groups` makes these float32.
            for parameter in (p for p, _ in pairs if p.requires_grad):
                parameter.grad_dtype = parameter.dtype
                handle = parameter.register_post_accumulate_grad_hook(_receive_float32)
                self._narrow_until_first.append(handle)
            self._last_watched = self._watched()
        return state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.inner_optimizer.state = state

    @property
    def masters(self) -> Mapping[Tensor, Tensor]:
        """The float32 copies by parameter, for the float16 and bfloat16 parameters.

        Write into them to start from weights that were not rounded to float16, or from others: the
        next step, or what reads this, rounds them into the parameters.
        """
        return types.MappingProxyType(dict(self._adopt_written()))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return fused.can_skip(self.inner_optimizer)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the optimizer; its methods, such as `train`, see the masters."""
        is_own = name.startswith("_") and not name.startswith("_optimizer_")
        if is_own or "inner_optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.inner_optimizer, name)
        if not inspect.ismethod(value):
            return value

        @functools.wraps(value)
        def with_masters(*args: Any, **kwargs: Any) -> Any:
            with self._stepping():
                return value(*args, **kwargs)

        return with_masters

    # --- The masters --------------------------------------------------------------------------

    def _prepare(self) -> Pairs:
        """The narrow parameters that the optimizer has now, with their masters."""
        inner, before = self.inner_optimizer, self._masters
        parameters = ranks.parameters_of(inner)
        facts = [*map(id, parameters), *map(_FACTS, parameters)]
        if facts != self._facts:
            _check_can_have_masters(inner, parameters)
            narrow = list(filter(_is_narrow, parameters))
            self._masters = {p: _master_of(p, before.get(p)) for p in narrow}
            _sharing.add(self)
            for p in parameters:
                if p in self._masters and p not in before:
                    _widen_state(inner, p)
                elif p in before and p not in self._masters:
                    _widen(p, before[p], self._dtypes.get(id(p), torch.float16))
                    inner.state.get(p, {}).pop(_KEY, None)
            written = {id(p) for p, _ in self._written()}
            self._pairs, self._facts = list(self._masters.items()), facts
            self._dtypes = {id(p): p.dtype for p in narrow}
            self._versions = [-1 if id(p) in written else m._version for p, m in self._pairs]
        for handle in self._narrow_until_first:
            handle.remove()
        self._narrow_until_first.clear()
        for parameter, _ in () if self._is_stepping else self._pairs:
            _receive_float32(parameter)
        self._last_watched = self._watched()
        return self._pairs

    def _watched(self) -> tuple[object, ...]:
        """Properties of two parameters, which other code changes together with those of all.

        A copy of a model has lost the dtype of its gradients, and `model.half()` leaves float16
        gradients.
        """
        groups = [group["params"] for group in self.inner_optimizer.param_groups if group["params"]]
        two = (groups[0][0], groups[-1][-1]) if groups else ()
        some = [p for p, _ in self._pairs] if self._narrow_until_first else two
        has_narrow = any(p.grad is not None and _is_narrow(p.grad) for p in some)
        looks = [(id(p), p.dtype, getattr(p, "grad_dtype", None)) for p in two]
        return sum(map(len, groups)), looks, has_narrow

    def _remember(self) -> None:
        """Remembers that masters are as this optimizer has left them."""
        self._versions = [master._version for _, master in self._pairs]

    def _written(self) -> Pairs:
        """The pairs into whose master other code has written."""
        pairs = zip(self._pairs, self._versions, strict=True)
        return [pair for pair, version in pairs if pair[1]._version != version]

    @torch.no_grad()
    def _round_written(self) -> Pairs:
        """Rounds masters into which other code has written, also in the state."""
        pairs, state = self._prepare(), self.inner_optimizer.state
        for parameter, master in pairs:
            entry = state.get(parameter, {})
            if entry.get(_KEY, master) is not master:
                master.copy_(entry[_KEY])
                entry[_KEY] = master
        _round(self._written())
        self._remember()
        return pairs

    def _adopt_written(self) -> Pairs:
        """Adopts what other code has written into masters, then into parameters; waits for none."""
        pairs: Pairs = self._round_written()
        self._adopt()
        return pairs

    @torch.no_grad()
    def _adopt(self) -> None:
        """Replaces elements of masters whose parameters other code has overwritten."""
        for part, merged in _merged(self._pairs):
            torch._foreach_copy_([master for _, master in part], merged)
        self._remember()

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Within it, the optimizer has the masters in place of the parameters."""
        pairs = self._adopt_written()
        gradients = [parameter.grad for parameter, _ in pairs]
        for (parameter, master), gradient in zip(pairs, gradients, strict=True):
            # Optimizers ask for these, and for what users have set on a parameter.
            master.requires_grad = parameter.requires_grad
            vars(master).update(vars(parameter))
            master.grad = gradient
        self._is_stepping = True
        try:
            with self._naming_masters():
                yield
        finally:
            self._is_stepping = False
            stepped = Pairs()
            for pair, gradient, version in zip(pairs, gradients, self._versions, strict=True):
                parameter, master = pair
                if master.grad is not gradient:
                    parameter.grad = master.grad
                has_moved = gradient is not None or master.grad is not None
                master.grad, master.requires_grad = None, False
                if has_moved or master._version != version:
                    stepped.append(pair)
                    self.inner_optimizer.state.setdefault(parameter, {})[_KEY] = master
                elif parameter.requires_grad:
                    # Old optimizers write to `data`, of which no graph takes notice.
                    stepped.append((parameter.data, master))
            _round(stepped)
            self._remember()

    @contextlib.contextmanager
    def _naming_masters(self) -> Iterator[None]:
        """Within it, the groups and the state name the masters; `_KEY` is not in the state."""
        pairs, state = self._pairs, self.inner_optimizer.state
        # Adam takes a state with this entry alone for one that it has made.
        stored = [pair for pair in pairs if state.get(pair[0], {}).pop(_KEY, None) is not None]
        self._rename(pairs)
        try:
            yield
        finally:
            self._rename(_reversed(pairs))
            for parameter, master in stored:
                # A state may have been loaded.
                self.inner_optimizer.state.setdefault(parameter, {}).setdefault(_KEY, master)

    def _rename(self, pairs: Pairs) -> None:
        """Puts the second tensor of each pair in place of the first, in groups and states."""
        by_id = {id(old): new for old, new in pairs}
        for optimizer in _with_held(self.inner_optimizer):
            for group in optimizer.param_groups:
                # In place: LBFGS keeps the list.
                group["params"][:] = [by_id.get(id(p), p) for p in group["params"]]
            state = optimizer.state
            renamed = {by_id.get(id(key), key): value for key, value in state.items()}
            state.clear()
            state.update(renamed)

    def _refuse_other_steps(self) -> None:
        """Refuses a direct step of the optimizer, which would update float16 parameters."""
        mine = weakref.ref(self)

        def refuse(optimizer: Optimizer, args: object, kwargs: object) -> None:
            owner = mine()
            if owner is not None and owner._pairs:
                raise CallOrderError(
                    f"step() of {type(optimizer).__name__} would update float16 parameters, not "
                    "their masters. Call step() of the MasterWeights, or of what wraps it; pass "
                    "that one to a gradient scaler."
                )

        refuse.of_lossscale = _REFUSES  # type: ignore[attr-defined]  # of a function
        # Lookahead has no hooks.
        if hasattr(self.inner_optimizer, _HOOKS[0]):
            self.inner_optimizer.register_step_pre_hook(refuse)

    # --- The methods of an optimizer ------------------------------------------------------------

    def _step(self, **more: Any) -> object:
        inner = self.inner_optimizer
        # A gradient scaler has set them on this optimizer.
        of_scaler = (vars(self).get(name) for name in ("grad_scale", "found_inf"))
        hooks = {name: getattr(inner, name) for name in _HOOKS if hasattr(inner, name)}
        before, after = (list(hooks.get(name, {}).values()) for name in _HOOKS)
        # Its hooks see the parameters.
        for hook in before:
            if getattr(hook, "of_lossscale", None) != _REFUSES:
                hook(inner, (), more)
        try:
            with self._stepping(), fused.attributes([inner], *of_scaler):
                vars(inner).update({name: {} for name in hooks})
                returned = inner.step(**more)
        finally:
            vars(inner).update(hooks)
        for hook in after:
            hook(inner, (), more)
        return returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._prepare()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer; its float16 parameters get masters."""
        added = param_group["params"]
        param_group["params"] = added = [added] if torch.is_tensor(added) else list(added)
        # With named parameters they are pairs.
        tensors = [item[1] if isinstance(item, tuple) else item for item in added]
        _check_can_have_masters(self.inner_optimizer, tensors)
        self.inner_optimizer.add_param_group(param_group)
        self._prepare()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer, with the master of each parameter that has moved."""
        pairs = self._round_written()
        masters = dict(pairs)
        saved: dict[str, Any] = self.inner_optimizer.state_dict()
        # Copies: what is in a parameter now may be swapped out again, as averages are.
        with torch.no_grad():
            for part, merged in _merged(pairs, waits=True):
                masters.update(zip((parameter for parameter, _ in part), merged, strict=True))
        if "param_groups" not in saved:
            # The optimizer writes a format of its own.
            return {**saved, _KEY: list(masters.values())}
        for key, parameter in self._keyed(saved):
            entries = saved["state"].get(key, {})
            master = masters.get(parameter)
            # Before the first step it may have been filled; else it is the parameter.
            if master is not None and (_KEY in entries or not _is_same(master, parameter.float())):
                saved["state"][key] = {**entries, _KEY: master}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this or of a plain optimizer returned.

        Without masters in it, they start from the parameters. The parameters stay as they are:
        load the state of the model, too.

        Args:
            state_dict: The dictionary; it is not changed.

        Raises:
            ValueError: If it does not match the parameter groups.
            StateDictError: If a master has another shape than its parameter. Then nothing is
                changed.
        """
        pairs, rest = self._prepare(), dict(state_dict)
        loaded = dict(zip((p for p, _ in pairs), rest.pop(_KEY, ()), strict=False))
        if "state" in rest:
            state = {k: dict(v) if isinstance(v, dict) else v for k, v in rest["state"].items()}
            saved = {k: v.pop(_KEY) for k, v in state.items() if isinstance(v, dict) and _KEY in v}
            loaded |= {p: saved[key] for key, p in self._keyed(rest) if key in saved}
            rest["state"] = {key: v for key, v in state.items() if v or key not in saved}
        for parameter, master in loaded.items():
            if getattr(master, "shape", None) != parameter.shape:
                raise StateDictError(
                    f"`{_KEY}` must be a tensor of the parameter's shape {tuple(parameter.shape)}. "
                    f"Received: {reprlib.repr(master)}. Load the state of the same model."
                )
        with self._naming_masters():
            self.inner_optimizer.load_state_dict(rest)
        with torch.no_grad():
            for parameter, master in pairs:
                # A hook of the optimizer may have read another dictionary.
                other = self.inner_optimizer.state.get(parameter, {}).get(_KEY, master)
                value = loaded.get(parameter, None if other is master else other)
                master.copy_(parameter if value is None else value)
                if value is not None:
                    self.inner_optimizer.state.setdefault(parameter, {})[_KEY] = master
                    loaded[parameter] = value
        self._remember()
        if rest.get("state") and not loaded and pairs and not self._warned:
            self._warned = True
            warn(
                f"The state has no master weights (`{_KEY}`). They start from the parameters, "
                "which are rounded to float16."
            )

    def _keyed(self, state_dict: dict[str, Any]) -> Iterable[tuple[object, Tensor]]:
        """The parameters, with their keys in the state of a state dictionary."""
        keys = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        return zip(keys, ranks.parameters_of(self.inner_optimizer), strict=False)


# --- Parameters and masters ---------------------------------------------------------------------


def _is_narrow(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor that gets a master, or of such a dtype."""
    return isinstance(value, Tensor) and value.dtype in _NARROW and not is_lazy(value)


def _reversed(pairs: Pairs) -> Pairs:
    return [(second, first) for first, second in pairs]


def _with_held(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that it holds, as Lookahead does."""
    optimizers = [optimizer]
    for holder in optimizers:
        held = (value for value in vars(holder).values() if hasattr(value, "param_groups"))
        optimizers += [value for value in held if all(value is not other for other in optimizers)]
    return optimizers


def _receive_float32(parameter: Tensor) -> None:
    """Makes the gradients of a parameter accumulate in float32, and one that is there float32."""
    gradient = parameter.grad
    if parameter.grad_dtype != torch.float32:
        parameter.grad = None
        parameter.grad_dtype = torch.float32
    elif gradient is None or gradient.dtype == torch.float32:
        return
    parameter.grad = None if gradient is None else gradient.to(torch.float32)


def _widen_state(optimizer: Optimizer, parameter: Tensor) -> None:
    """Makes the state of a parameter float32, which Adagrad makes before the first step."""
    state = optimizer.state.get(parameter, {})
    state.update({key: value.float() for key, value in state.items() if _is_narrow(value)})
    for group in optimizer.param_groups if state.get("step", 1) == 0 else ():
        if any(p is parameter for p in group["params"]) and "initial_accumulator_value" in group:
            # In float16 it was rounded.
            state["sum"].fill_(group["initial_accumulator_value"])


def _by_kind(pairs: Pairs) -> Iterable[Pairs]:
    """The pairs by the device and dtype of the parameter, as kernels of many tensors need them."""
    groups: dict[tuple[torch.device, torch.dtype], Pairs] = {}
    for pair in pairs:
        groups.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    return groups.values()


def _master_of(parameter: Tensor, master: Tensor | None) -> Tensor:
    """The master of a parameter that may have been moved or replaced."""
    # Optimizers that share a parameter share its master.
    shared = (owner._masters.get(parameter) for owner in _sharing)
    master = next((m for m in shared if m is not None), None) if master is None else master
    if master is None or master.shape != parameter.shape or master.is_meta:
        master = parameter.detach().float()
    if master.device == parameter.device and isinstance(master, Parameter):
        return master
    # Some optimizers ask for the class.
    return Parameter(master.to(parameter.device), requires_grad=False)


@torch.no_grad()
def _widen(parameter: Tensor, master: Tensor, dtype: torch.dtype) -> None:
    """Writes a master into its parameter, which `model.float()` has widened from a dtype."""
    master = master.to(parameter.device)
    rounded = master.to(dtype).to(parameter.dtype)
    parameter.copy_(torch.where(parameter == rounded, master.to(parameter.dtype), parameter))


@torch.no_grad()
def _round(pairs: Pairs) -> None:
    """Rounds masters into their parameters."""
    for some in _by_kind(pairs):
        torch._foreach_copy_([parameter for parameter, _ in some], [master for _, master in some])


def _together(pairs: Pairs) -> Iterator[Pairs]:
    """Parts of pairs that are compared together."""
    most, part, size = _TOGETHER.get(pairs[0][0].device.type, 2**26), Pairs(), 0
    for pair in pairs:
        size += pair[0].numel()
        if part and size > most:
            yield part
            part, size = [], pair[0].numel()
        part.append(pair)
    yield part


def _merged(pairs: Pairs, waits: bool = False) -> Iterator[tuple[Pairs, list[Tensor]]]:
    """Parts of pairs, and their masters with what was written into the parameters.

    An element of a master is replaced if the parameter is not its rounding, by their bits.

    Args:
        pairs: Parameters with their masters.
        waits: Whether the host may wait to leave out parts without a change. On a CPU it always
            does, which is no wait.
    """
    for part in (part for some in _by_kind(pairs) for part in _together(some)):
        parameters, masters = ([pair[place] for pair in part] for place in (0, 1))
        now, wide = _flatten_dense_tensors(parameters), _flatten_dense_tensors(masters)
        bits, expected = now.view(torch.int16), wide.to(now.dtype).view(torch.int16)
        if (waits or now.device.type == "cpu") and _is_same(bits, expected):
            continue
        wide = torch.where(bits == expected, wide, now)
        yield part, list(_unflatten_dense_tensors(wide, masters))


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether tensors have the same bits; compared eight bytes at a time, which is faster."""
    flat = [tensor.reshape(-1).view(torch.int16) for tensor in (first, second)]
    whole = flat[0].numel() // 4 * 4 if all(t.storage_offset() % 4 == 0 for t in flat) else 0
    words = (tensor[:whole].view(torch.int64) for tensor in flat)
    rest = (tensor[whole:] for tensor in flat)
    return bool(torch.equal(*words)) and bool(torch.equal(*rest))


# --- What cannot have masters -------------------------------------------------------------------


def _check_can_have_masters(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    narrow = list(filter(_is_narrow, parameters))
    if not narrow:
        return
    if not hasattr(Tensor, "grad_dtype"):
        raise UnsupportedError(
            "MasterWeights needs PyTorch 2.10 or later, where gradients of float16 parameters can "
            f"be float32. Received: PyTorch {torch.__version__}. Keep the parameters in float32 "
            "and compute under torch.autocast(device, torch.float16)."
        )
    for parameter in narrow:
        if ranks.is_spread(parameter) or hasattr(parameter, "_fsdp_flattened"):
            raise UnsupportedError(
                f"A parameter of shape {tuple(parameter.shape)} and dtype {parameter.dtype} is "
                "sharded. FSDP keeps float32 shards itself: call fully_shard on the float32 model "
                "with mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16), and leave "
                "MasterWeights out."
            )
    # Such as ZeroRedundancyOptimizer, which would update the parameters themselves.
    lists = {id(group["params"]) for group in optimizer.param_groups}
    ids = set(map(id, narrow))
    for held in _with_held(optimizer):
        of_groups = [("param_groups", g["params"]) for g in held.param_groups]
        attributes = [(n, v) for n, v in vars(held).items() if n not in ("state", "param_groups")]
        for name, value in of_groups + attributes:
            if id(value) not in lists and not ids.isdisjoint(_ids_in(value)):
                raise UnsupportedError(
                    f"{type(held).__name__} keeps parameters in its attribute {name!r}. It would "
                    "not find their masters there. Keep the parameters in float32 and compute "
                    "under torch.autocast."
                )


def _ids_in(value: object, depth: int = 3) -> Iterator[int]:
    """The ids of tensors in a collection, and integers, which may be ids."""
    if torch.is_tensor(value) or isinstance(value, int):
        yield value if isinstance(value, int) else id(value)
    elif depth and isinstance(value, (list, tuple, set, frozenset, dict)):
        parts = itertools.chain(*value.items()) if isinstance(value, dict) else value
        for part in parts:
            yield from _ids_in(part, depth - 1)


def check_not_of_ddp(error: RuntimeError) -> None:
    """Says what to do about an error of a backward pass under `DistributedDataParallel`."""
    # Nothing public shows before the pass that parameters belong to one.
    if str(error).startswith(("Expected Half, got Float", "Expected BFloat16, got Float")):
        raise UnsupportedError(
            "DistributedDataParallel cannot average the float32 gradients of float16 parameters. "
            "Keep the parameters in float32 (model.float()), compute under "
            "torch.autocast(device, torch.float16), and leave MasterWeights out."
        ) from error
