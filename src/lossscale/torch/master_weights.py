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
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parameter import is_lazy

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
from lossscale.torch.optimizer_list import OuterOptimizer

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters, each with its master."""

_KEY = "master_weight"
_NARROW = frozenset({torch.float16, torch.bfloat16})
_FACTS = operator.attrgetter("dtype", "device", "shape")
_TOGETHER = {"cpu": 2**15}
"""Elements that are compared together, in a few times their memory: in a cache, or all that fit."""


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
    parameter also has `master_weight`, which state dictionaries contain. It can be used with a
    gradient scaler, and alone for bfloat16.

    Args:
        optimizer: The `torch.optim.Optimizer`, an instance.

    Raises:
        TypeError: If it is not an optimizer, or has loss scaling or masters already.
        UnsupportedError: Before PyTorch 2.10, if a float16 parameter is sharded, or if the
            optimizer keeps parameters elsewhere than in its groups.

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

    inner_optimizer: torch.optim.Optimizer
    _masters: dict[torch.Tensor, torch.Tensor]

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, (FrontDoor, MasterWeights)):
            raise AlreadyWrappedError(
                f"Received: {type(optimizer).__name__}. The order is "
                "LossScaleOptimizer(MasterWeights(optimizer))."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(
                "MasterWeights takes a torch.optim.Optimizer, an instance. Received: "
                f"{optimizer!r} of type {type(optimizer).__name__}."
            )
        check_not_wrapped(optimizer)
        _check_can_have_masters(optimizer, ranks.parameters_of(optimizer))
        self.__setstate__({"inner_optimizer": optimizer, "_masters": {}})

    def __getstate__(self) -> dict[str, Any]:
        return {"inner_optimizer": self.inner_optimizer, "_masters": self._masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, optimizers=[state["inner_optimizer"]])
        self._optimizer_step_pre_hooks: dict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: dict[int, Any] = OrderedDict()
        self._is_stepping = self._warned = False
        self._pairs: Pairs = []
        self._facts: list[Any] = []
        self._dtypes: dict[int, torch.dtype] = {}
        self._refuse_other_steps()
        remember_wrapper(self.inner_optimizer, self)
        self._prepare()

    # --- What it shows of the optimizer -----------------------------------------------------------

    @property
    def param_groups(self) -> Any:
        """The groups of the optimizer, with the parameters of the model."""
        # Each verb of a loss scale reads them before the backward pass, or before it unscales.
        if not self._is_stepping and self._first() != self._last_first:
            self._prepare()
        return self.inner_optimizer.param_groups

    @property
    def defaults(self) -> Any:
        """The default hyperparameters of the optimizer."""
        return self.inner_optimizer.defaults

    @property
    def state(self) -> Any:
        """The state of the optimizer by parameter, with `master_weight` after the first step."""
        if not self.inner_optimizer.state and all(p.grad is None for p, _ in self._pairs):
            # torch.distributed.checkpoint makes an empty state by a step with gradients of the
            # parameters' dtype. Then reading `param_groups` makes these float32.
            for parameter, _ in self._pairs:
                parameter.grad_dtype = parameter.dtype
            self._last_first = self._first()
        return self.inner_optimizer.state

    @property
    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """The float32 copies by parameter, for the float16 and bfloat16 parameters.

        Fill them before the first step to start from weights that were not rounded to float16.
        """
        return dict(self._adopt_written())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return fused.can_skip(self.inner_optimizer)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the optimizer; its methods, such as `train`, see the masters."""
        is_own = name.startswith("_") and not name.startswith("_optimizer_")
        if is_own or "inner_optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self.inner_optimizer, name)
        if not inspect.ismethod(found):
            return found

        @functools.wraps(found)
        def with_masters(*args: Any, **kwargs: Any) -> Any:
            with self._stepping():
                return found(*args, **kwargs)

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
            for p in parameters:
                state = inner.state.get(p, {})
                if p in self._masters and p not in before:
                    # Adagrad makes its state with the dtype of the parameter before a step.
                    state.update({k: v.float() for k, v in state.items() if _is_narrow(v)})
                elif p in before and p not in self._masters:
                    _widen(p, before[p], self._dtypes.get(id(p), torch.float16))
                    state.pop(_KEY, None)
            self._pairs, self._facts = list(self._masters.items()), facts
            self._dtypes = {id(p): p.dtype for p in narrow}
        if not self._is_stepping:
            self._receive_float32()
        return self._pairs

    def _receive_float32(self) -> None:
        """Makes the gradients of narrow parameters accumulate in float32."""
        for parameter, _ in self._pairs:
            gradient = parameter.grad
            if parameter.grad_dtype != torch.float32:
                parameter.grad = None
                parameter.grad_dtype = torch.float32
            elif gradient is None or gradient.dtype == torch.float32:
                continue
            parameter.grad = None if gradient is None else gradient.to(torch.float32)
        self._last_first = self._first()

    def _first(self) -> Any:
        """What other code changes of the first parameter if it changes that of all.

        A copy of a model has lost the dtype of its gradients, and `model.half()` leaves float16
        gradients.
        """
        groups = self.inner_optimizer.param_groups
        first = next((group["params"][0] for group in groups if group["params"]), None)
        is_narrow = first is not None and first.grad is not None and _is_narrow(first.grad)
        count = sum(len(group["params"]) for group in groups)
        dtypes = getattr(first, "dtype", None), getattr(first, "grad_dtype", None)
        return count, id(first), dtypes, is_narrow

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _adopt_written(self) -> Pairs:
        """Adopts what other code has written into parameters or the state, without waiting."""
        pairs, state = self._prepare(), self.inner_optimizer.state
        for parameter, master in pairs:
            entry = state.get(parameter, {})
            if entry.get(_KEY, master) is not master:
                master.copy_(entry[_KEY])
                entry[_KEY] = master
        for some in _by_kind(pairs):
            for part in _together(some):
                _adopt([parameter for parameter, _ in part], [master for _, master in part])
        return pairs

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Within it, the optimizer has the masters in place of the parameters."""
        pairs = self._adopt_written()
        gradients = [parameter.grad for parameter, _ in pairs]
        versions = [master._version for _, master in pairs]
        for (_, master), gradient in zip(pairs, gradients, strict=True):
            master.grad = gradient
        self._is_stepping = True
        try:
            with self._naming_masters():
                yield
        finally:
            self._is_stepping = False
            moved = []
            for pair, gradient, version in zip(pairs, gradients, versions, strict=True):
                parameter, master = pair
                if master.grad is not gradient:
                    parameter.grad = master.grad
                master.grad = None
                if gradient is not None or master._version != version:
                    moved.append(pair)
                    self.inner_optimizer.state.setdefault(parameter, {})[_KEY] = master
            _round(moved)

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
                self.inner_optimizer.state.setdefault(parameter, {})[_KEY] = master

    def _rename(self, pairs: Pairs) -> None:
        """Puts the second tensor of each pair in place of the first, in groups and state."""
        by_id = {id(old): new for old, new in pairs}
        for group in self.inner_optimizer.param_groups:
            # In place: LBFGS keeps the list.
            group["params"][:] = [by_id.get(id(p), p) for p in group["params"]]
        state = self.inner_optimizer.state
        renamed = {by_id.get(id(key), key): value for key, value in state.items()}
        state.clear()
        state.update(renamed)

    def _refuse_other_steps(self) -> None:
        """Refuses a direct step of the optimizer, which would update float16 parameters."""
        mine = weakref.ref(self)

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            owner = None if torch.compiler.is_compiling() else mine()
            if owner is not None and owner._pairs and not owner._is_stepping:
                raise CallOrderError(
                    f"step() of {type(optimizer).__name__} would update float16 parameters, not "
                    "their masters. Call step() of the MasterWeights, or of what wraps "
                    "it; pass that one to a gradient scaler."
                )

        hook.of_lossscale = "masters"  # type: ignore[attr-defined]
        if hasattr(self.inner_optimizer, "_optimizer_step_pre_hooks"):
            self.inner_optimizer.register_step_pre_hook(hook)

    # --- The methods of an optimizer ------------------------------------------------------------

    def _step(self, closure: Callable[[], Any] | None, **more: Any) -> Any:
        if closure is not None:
            more["closure"] = functools.partial(self._evaluate, closure)
        # A gradient scaler has set them on this optimizer.
        of_scaler = (vars(self).get(name) for name in ("grad_scale", "found_inf"))
        with self._stepping(), fused.attributes([self.inner_optimizer], *of_scaler):
            return self.inner_optimizer.step(**more)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluates a closure with rounded parameters, as they are at this point of a step."""
        _round(self._pairs)
        self._rename(_reversed(self._pairs))
        try:
            with torch.enable_grad():
                loss = closure()
        finally:
            self._rename(self._pairs)
        for parameter, master in self._pairs:
            master.grad = parameter.grad
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._prepare()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer; its float16 parameters get masters."""
        added = param_group["params"]
        param_group["params"] = added = [added] if torch.is_tensor(added) else list(added)
        # With named parameters they are pairs.
        tensors = [each[1] if isinstance(each, tuple) else each for each in added]
        _check_can_have_masters(self.inner_optimizer, tensors)
        self.inner_optimizer.add_param_group(param_group)
        self._prepare()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer, with the master of each parameter that has moved."""
        masters = dict(self._adopt_written())
        saved: dict[str, Any] = self.inner_optimizer.state_dict()
        for key, parameter in self._keyed(saved):
            master = masters.get(parameter)
            if master is None or _KEY in saved["state"].get(key, {}):
                continue
            # Filled before the first step.
            if not torch.equal(master, parameter.to(master.dtype)):
                saved["state"][key] = {**saved["state"].get(key, {}), _KEY: master}
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
        pairs = self._prepare()
        saved = {k: dict(v) if isinstance(v, dict) else v for k, v in state_dict["state"].items()}
        masters = {k: v.pop(_KEY) for k, v in saved.items() if isinstance(v, dict) and _KEY in v}
        loaded = {p: masters[key] for key, p in self._keyed(state_dict) if key in masters}
        for parameter, master in loaded.items():
            if parameter.shape != master.shape:
                raise StateDictError(
                    f"`{_KEY}` of a parameter of shape {tuple(parameter.shape)} has the shape "
                    f"{tuple(master.shape)}. Load the state of the same model."
                )
        saved = {key: value for key, value in saved.items() if value or key not in masters}
        with self._naming_masters():
            self.inner_optimizer.load_state_dict({**state_dict, "state": saved})
        with torch.no_grad():
            for parameter, master in pairs:
                master.copy_(loaded.get(parameter, parameter))
                if parameter in loaded:
                    self.inner_optimizer.state.setdefault(parameter, {})[_KEY] = master
        if saved and not loaded and pairs and not self._warned:
            self._warned = True
            warn(
                f"The state has no master weights (`{_KEY}`). They start from the parameters, "
                "which are rounded to float16."
            )

    def _keyed(self, state_dict: dict[str, Any]) -> Iterable[tuple[Any, torch.Tensor]]:
        """The parameters, with their keys in the state of a state dictionary."""
        keys = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        return zip(keys, ranks.parameters_of(self.inner_optimizer), strict=False)


# --- Parameters and masters ---------------------------------------------------------------------


def _is_narrow(value: Any) -> bool:
    """Whether it is a tensor that gets a master, or of such a dtype."""
    return torch.is_tensor(value) and value.dtype in _NARROW and not is_lazy(value)


def _reversed(pairs: Pairs) -> Pairs:
    return [(second, first) for first, second in pairs]


def _by_kind(pairs: Pairs) -> Iterable[Pairs]:
    """The pairs by the device and dtype of the parameter, as kernels of many tensors need them."""
    groups: dict[Any, Pairs] = {}
    for pair in pairs:
        groups.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    return groups.values()


def _master_of(parameter: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """The master of a parameter that may have been moved or replaced."""
    if master is None or master.shape != parameter.shape or master.is_meta:
        return parameter.detach().float()
    return master.to(parameter.device)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _widen(parameter: torch.Tensor, master: torch.Tensor, dtype: torch.dtype) -> None:
    """Writes a master into its parameter, which `model.float()` has widened from a dtype."""
    master = master.to(parameter.device)
    rounded = master.to(dtype).to(parameter.dtype)
    parameter.copy_(torch.where(parameter == rounded, master.to(parameter.dtype), parameter))


@torch.no_grad()  # type: ignore[untyped-decorator]
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


def _adopt(parameters: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    """Replaces elements of masters whose parameter is not the rounded master, by their bits.

    Args:
        parameters: Tensors of one dtype on one device.
        masters: Their masters.
    """
    now, wide = _flatten_dense_tensors(parameters), _flatten_dense_tensors(masters)
    rounded = wide.to(now.dtype)
    bits, expected = now.view(torch.int16), rounded.view(torch.int16)
    if now.device.type == "cpu" and _are_equal(bits, expected):
        # Only the CPU knows without a wait.
        return
    wide = torch.where(bits == expected, wide, now)
    torch._foreach_copy_(masters, list(_unflatten_dense_tensors(wide, masters)))


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether flat int16 tensors are equal; four elements at a time, which takes half as long."""
    whole = first.numel() // 4 * 4 if first.storage_offset() % 4 == 0 else 0
    words = (each[:whole].view(torch.int64) for each in (first, second))
    return bool(torch.equal(*words)) and bool(torch.equal(first[whole:], second[whole:]))


# --- What cannot have masters -------------------------------------------------------------------


def _check_can_have_masters(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]
) -> None:
    narrow = list(filter(_is_narrow, parameters))
    if not narrow:
        return
    if not hasattr(torch.Tensor, "grad_dtype"):
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
    for name, value in vars(optimizer).items():
        groups = getattr(value, "param_groups", None)
        held = [value] if groups is None else [group["params"] for group in groups]
        for each in held:
            is_own = id(each) in lists or not isinstance(each, (list, tuple))
            if not (is_own or ids.isdisjoint(map(id, each))):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps parameters in its attribute {name!r}. It "
                    "would update these in place of their masters. Keep the parameters in float32 "
                    "and compute under torch.autocast."
                )


def check_not_of_ddp(error: RuntimeError) -> None:
    """Says what to do about an error of a backward pass under `DistributedDataParallel`."""
    # Nothing public shows before the pass that parameters belong to one.
    if str(error).startswith(("Expected Half, got Float", "Expected BFloat16, got Float")):
        raise UnsupportedError(
            "DistributedDataParallel cannot average the float32 gradients of float16 parameters. "
            "Keep the parameters in float32 (model.float()), compute under "
            "torch.autocast(device, torch.float16), and leave MasterWeights out."
        ) from error
