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
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lossscale.common.wrapped import check_not_wrapped, remember_wrapper
from lossscale.errors import AlreadyWrappedError, ArgumentTypeError, CallOrderError
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.torch import fused, ranks
from lossscale.torch.masters import (
    Pairs,
    check_can_have_masters,
    check_shape,
    check_value,
    converted,
    is_narrow,
    is_same,
    merged,
    round_into,
    with_held,
)
from lossscale.torch.optimizer_list import OuterOptimizer, check_needs_no_closure, with_parts

_P = ParamSpec("_P")
_R = TypeVar("_R")
_KEY, _REFUSES = "master_weight", "masters"
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_KIND = operator.attrgetter("dtype", "device")
_NO_STATE: dict[str, Any] = {}
_numbers = itertools.count()
_living: weakref.WeakSet[MasterWeights] = weakref.WeakSet()


class MasterWeights(OuterOptimizer):
    """Makes an optimizer update float32 copies of float16 and bfloat16 parameters.

    ```
    inner = MasterWeights(torch.optim.AdamW(model.half().parameters()))
    optimizer = LossScaleOptimizer(inner)
    ```

    The copies start from the parameters. Each step updates them and rounds them into the
    parameters, so that updates too small for float16 add up. `.grad` of a float16 parameter is
    float32. What other code writes into a parameter between two steps replaces the copy. After
    `model.float()` the copies are kept until the next applied step, which continues from them. A
    newer `MasterWeights` over a parameter starts from the parameter, and the older one refuses to
    step while the newer lives.

    The groups, the state and the hyperparameters are those of the optimizer. In its state each
    parameter also has `master_weight`, which state dictionaries contain. Hooks of either optimizer
    see the parameters; PyTorch's global optimizer hooks see the masters. It can be used with a
    gradient scaler, and alone for bfloat16.

    Args:
        optimizer: The `torch.optim.Optimizer`, an instance.
        grad_dtype: In which dtype gradients arrive and add up: float32, or None for that of the
            parameter, in which `DistributedDataParallel` averages them. When they are unscaled they
            become float32.

    Raises:
        TypeError: If it is not an optimizer, or has loss scaling or masters already.
        UnsupportedError: Before PyTorch 2.10, if a float16 parameter is sharded, if two have the
            same elements, or if an attribute of the optimizer, besides its groups, holds float16
            parameters.

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

    def __init__(
        self, optimizer: Optimizer, *, grad_dtype: torch.dtype | None = torch.float32
    ) -> None:
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
        if grad_dtype not in (None, torch.float32):
            raise ArgumentTypeError(
                "`grad_dtype` must be torch.float32, or None: gradients then arrive in the dtype "
                f"of their parameter, as DistributedDataParallel needs. Received: {grad_dtype!r}."
            )
        check_not_wrapped(optimizer)
        check_needs_no_closure(optimizer)
        first = {"inner_optimizer": optimizer, "_masters": {}, "_grad_dtype": grad_dtype}
        self.__setstate__(first)

    def __getstate__(self) -> dict[str, Any]:
        self._prepare()
        written = [parameter for parameter, _ in self._written(self._masters.items())]
        masters = {"_masters": self._masters, "_written_then": written}
        masters["_grad_dtype"] = self._grad_dtype
        return {"inner_optimizer": self.inner_optimizer, **masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # States of older versions have none.
        self._grad_dtype: torch.dtype | None = torch.float32
        self.__dict__.update(state, optimizers=[state["inner_optimizer"]])
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._is_stepping = self._is_compared = False
        self._number = next(_numbers)
        # Those that were made later over a parameter of this one, as long as they live.
        self._newer: weakref.WeakSet[MasterWeights] = weakref.WeakSet()
        # Of the masters, those whose parameters are narrow now; the others are parked.
        self._pairs: Pairs = []
        self._facts: list[object] = []
        with torch.inference_mode(False):
            self._masters = {p: _master_of(p, master) for p, master in self._masters.items()}
        # By the id of each master, as this optimizer has left it.
        self._remember()
        self._versions |= {id(self._masters[p]): -1 for p in vars(self).pop("_written_then", ())}
        # It may refuse parameters, and has changed nothing then.
        self._prepare()
        self._refuse_other_steps()
        remember_wrapper(self.inner_optimizer, self)

    # --- What it shows of the optimizer -----------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, with the parameters of the model."""
        # A loss scale reads them before the backward pass, and before it unscales.
        if not (self._is_stepping or self._is_compared) and self._has_changed():
            self._prepare()
        return self.inner_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner_optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the optimizer by parameter, with `master_weight` after the first step."""
        return self.inner_optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.inner_optimizer.state = state

    @property
    def masters(self) -> Mapping[Tensor, Tensor]:
        """The float32 masters by parameter: `masters[parameter]` is a copy.

        It contains what was written into the parameter since the last step. Writing into it is an
        error; `set_masters` changes masters.
        """
        return _Masters(self)

    @torch.no_grad()
    def set_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Sets masters to weights that were not rounded to float16, and rounds them at once.

        Args:
            values: The weights by parameter, of any dtype. A parameter that has no master, because
                it is float32, gets them itself. They are copied.

        Raises:
            StateDictError: If a key is not a parameter of the optimizer, or its values have another
                shape or are not finite in its dtype. Then nothing is changed.
            CallOrderError: If a newer `MasterWeights` has a parameter of this one.

        Examples:
            >>> model = torch.nn.Linear(3, 1).half()
            >>> inner = lossscale.torch.MasterWeights(torch.optim.AdamW(model.parameters()))
            >>> inner.set_masters({model.bias: torch.tensor([0.1])})
            >>> inner.masters[model.bias], model.bias.detach()
            (tensor([0.1000]), tensor([0.1000], dtype=torch.float16))
        """
        self._check_is_newest()
        self._prepare()
        own = set(map(id, ranks.parameters_of(self.inner_optimizer)))
        for parameter, value in values.items():
            check_value(parameter if id(parameter) in own else None, value)
        self._take_written()
        for parameter, value in values.items():
            self._masters.get(parameter, parameter).copy_(value)
        self._take_written()

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
            self._prepare()
            with self._stepping():
                return value(*args, **kwargs)

        return with_masters

    # --- The masters --------------------------------------------------------------------------

    def _has_changed(self) -> bool:
        """Whether other code has changed properties of the parameters.

        A copy of a model has lost the dtype of its gradients, and `model.half()` leaves float16
        gradients: of all, so that two are enough.
        """
        two = [pair[0] for pair in (self._pairs[:1] + self._pairs[-1:])]
        return self._facts_now() != self._facts or any(map(self._has_other_gradient, two))

    def _has_other_gradient(self, parameter: Tensor) -> bool:
        """Whether a gradient is, or may come, in a dtype that was not asked for."""
        if self._grad_dtype is None:
            return parameter.grad_dtype is not None
        return parameter.grad_dtype is not torch.float32 or is_narrow(parameter.grad)

    def _facts_now(self) -> list[object]:
        parameters = ranks.parameters_of(self.inner_optimizer)
        shapes = [parameter.shape for parameter in self._masters]
        return [*map(id, parameters), *map(type, parameters), *map(_KIND, parameters), *shapes]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _prepare(self) -> None:
        """Makes masters for the narrow parameters that the optimizer has now."""
        if self._facts_now() != self._facts:
            self._make_masters()
            self._facts = self._facts_now()
        for parameter, _ in () if self._is_stepping else self._pairs:
            if self._has_other_gradient(parameter):
                gradient, parameter.grad = parameter.grad, None
                parameter.grad_dtype = self._grad_dtype
                setattr(parameter, ranks.WIDENED, True)
                if gradient is not None and self._grad_dtype is not None:
                    gradient = gradient.to(self._grad_dtype)
                parameter.grad = gradient

    def _make_masters(self) -> None:
        inner, before = self.inner_optimizer, self._masters
        parameters = ranks.parameters_of(inner)
        check_can_have_masters(inner, parameters)
        self._masters = {
            p: _master_of(p, before.get(p)) for p in parameters if is_narrow(p) or p in before
        }
        for p in self._masters.keys() - before.keys():
            state = inner.state.get(p, {})
            state.update({key: v.float() for key, v in state.items() if is_narrow(v)})
            if "initial_accumulator_value" in inner.defaults and state.get("step", 1) == 0:
                # Adagrad has made it, rounded to float16.
                state["sum"].fill_(inner.defaults["initial_accumulator_value"])
        # Values that were written into other masters are still to be taken.
        known = self._versions
        self._remember()
        self._versions |= {key: known[key] for key in self._versions.keys() & known.keys()}
        self._note_masters()
        _living.add(self)

    def _remember(self) -> None:
        """Remembers that masters are as this optimizer has left them."""
        self._versions = {id(master): master._version for master in self._masters.values()}

    def _note_masters(self) -> None:
        """Notes which masters are parked, and who has masters of the same parameters."""
        self._pairs = [pair for pair in self._masters.items() if is_narrow(pair[0])]
        # Lightning gives the attributes of an optimizer to another object.
        others = (each for each in _living if each.inner_optimizer is not self.inner_optimizer)
        for other in others:
            older, newer = sorted((self, other), key=lambda each: each._number)
            is_shared = not older._masters.keys().isdisjoint(newer._masters)
            (older._newer.add if is_shared else older._newer.discard)(newer)

    def _check_is_newest(self) -> None:
        if self._newer:
            raise CallOrderError(
                "A MasterWeights that was made later has a parameter of this one, and its master. "
                "For several models or rates, make one optimizer with several parameter groups. "
                "To train again from the start, use the new one."
            )

    def _written(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Pairs:
        """Parameters, with the master that other code has written or assigned in the state."""
        state, versions, found = self.inner_optimizer.state, self._versions, Pairs()
        for p, master in pairs:
            value = state.get(p, _NO_STATE).get(_KEY, master)
            if value is not master or master._version != versions[id(master)]:
                found.append((p, value))
        return found

    @torch.no_grad()
    def _take_written(self) -> None:
        """Rounds masters that other code has written in the state, as a broadcast does."""
        written = self._written(self._masters.items())
        for parameter, value in written:
            master = self._masters[parameter]
            if value is not master:
                master.copy_(value)
                self.inner_optimizer.state[parameter][_KEY] = master
            parameter.copy_(master)
        if written:
            self._remember()

    def current(self, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """The masters of parameters as the next step will have them, which it leaves as they are.

        What is in a parameter now may be swapped out again, as averages are.

        Args:
            parameters: Parameters; those without a master are left out.
        """
        self._prepare()
        return self._current([(p, self._masters[p]) for p in parameters if p in self._masters])

    @torch.no_grad()
    def _current(self, pairs: Pairs) -> dict[Tensor, Tensor]:
        now, written = dict(pairs), dict(self._written(pairs))
        rest = [pair for pair in now.items() if pair[0] not in written]
        for part, values in merged(rest, waits=True):
            now.update(zip((parameter for parameter, _ in part), values, strict=True))
        return now | written

    @torch.no_grad()
    def _adopt(self) -> None:
        """Replaces elements of masters whose parameters other code has overwritten."""
        for part, values in merged(self._pairs):
            torch._foreach_copy_([master for _, master in part], values)
        self._remember()

    @torch.no_grad()
    def _unpark(self) -> None:
        """Lets parameters that are wide now continue from their masters, and drops these."""
        self._take_written()
        for part, values in merged([p for p in self._masters.items() if not is_narrow(p[0])]):
            for (parameter, _), value in zip(part, values, strict=True):
                # Of `data`: the graph of a loss may hold the parameter.
                parameter.data.copy_(value)
                self.inner_optimizer.state.get(parameter, {}).pop(_KEY, None)
                del self._masters[parameter]
        self._note_masters()

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Within it, the optimizer has the masters in place of the parameters."""
        self._check_is_newest()
        self._take_written()
        self._adopt()
        pairs, gradients = self._pairs, [parameter.grad for parameter, _ in self._pairs]
        narrow = list(filter(is_narrow, gradients))
        made = converted(narrow, itertools.repeat(torch.float32))
        wide = dict(zip(map(id, narrow), made, strict=True))
        for (parameter, master), gradient in zip(pairs, gradients, strict=True):
            # Optimizers ask for these, and for what users have set on a parameter.
            master.requires_grad = parameter.requires_grad
            vars(master).update(vars(parameter))
            master.grad = wide.get(id(gradient), gradient)
        versions = [master._version for _, master in pairs]
        self._is_stepping = True
        try:
            with self._naming_masters():
                yield
        finally:
            self._is_stepping = False
            stepped = Pairs()
            for pair, gradient, version in zip(pairs, gradients, versions, strict=True):
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
            self._remember()
            round_into(stepped)

    @contextlib.contextmanager
    def _naming_masters(self) -> Iterator[None]:
        """Within it, the groups and the state name the masters; `_KEY` is not in the state."""
        pairs, state = self._pairs, self.inner_optimizer.state
        # Adam takes a state with this entry alone for one that it has made.
        stored = [
            (p, master)
            for p, master in self._masters.items()
            if state.get(p, _NO_STATE).pop(_KEY, None) is not None
        ]
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
        for optimizer in with_held(self.inner_optimizer):
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
            if owner is not None and owner._masters:
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
        of_scaler = [vars(self).get(name) for name in ("grad_scale", "found_inf")]
        self._check_is_newest()
        hooks = {name: getattr(inner, name) for name in _HOOKS if hasattr(inner, name)}
        before, after = (list(hooks.get(name, {}).values()) for name in _HOOKS)
        # Its hooks see the parameters.
        for hook in before:
            if getattr(hook, "of_lossscale", None) != _REFUSES:
                hook(inner, (), more)
        self._prepare()
        if len(self._masters) > len(self._pairs):
            # Ours sets them on the innermost optimizer. Of parked masters the host waits once.
            flags = of_scaler[1], vars(inner).get("found_inf")
            if not any(flag is not None and flag.item() for flag in flags):
                self._unpark()
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
        if not self._is_compared and self._has_changed():
            self._prepare()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer; its float16 parameters get masters."""
        added = param_group["params"]
        param_group["params"] = added = [added] if torch.is_tensor(added) else list(added)
        # With named parameters they are pairs.
        tensors = [item[1] if isinstance(item, tuple) else item for item in added]
        check_can_have_masters(self.inner_optimizer, tensors)
        self.inner_optimizer.add_param_group(param_group)
        self._prepare()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer, with the master of each parameter that has moved."""
        parameters = ranks.parameters_of(self.inner_optimizer)
        masters = self.current(parameters)
        saved: dict[str, Any] = self.inner_optimizer.state_dict()
        if "param_groups" not in saved:
            # The optimizer writes a format of its own.
            by_index = {i: masters[p] for i, p in enumerate(parameters) if p in masters}
            return {**saved, _KEY: by_index}
        for key, parameter in self._keyed(saved):
            entries, master = saved["state"].get(key, {}), masters.get(parameter)
            # Before the first step it may have been set; else it is the parameter.
            if master is not None and (_KEY in entries or not is_same(master, parameter.float())):
                saved["state"][key] = {**entries, _KEY: master}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this or of a plain optimizer returned.

        Without masters in it, they start from the parameters. The parameters stay as they are: load
        the state of the model, too, before or after. A parameter that is float32 now takes the
        master of the file where it is the rounded master.

        Args:
            state_dict: The dictionary; it is not changed.

        Raises:
            ValueError: If it does not match the parameter groups.
            StateDictError: If a master has another shape than its parameter. Then nothing is
                changed.
        """
        self._prepare()
        rest = dict(state_dict)
        own = rest.pop(_KEY, {})
        parameters = ranks.parameters_of(self.inner_optimizer)
        loaded = {p: own[index] for index, p in enumerate(parameters) if index in own}
        if "state" in rest:
            state = {k: dict(v) if isinstance(v, dict) else v for k, v in rest["state"].items()}
            saved = {k: v.pop(_KEY) for k, v in state.items() if isinstance(v, dict) and _KEY in v}
            loaded |= {p: saved[key] for key, p in self._keyed(rest) if key in saved}
            rest["state"] = {key: v for key, v in state.items() if v or key not in saved}
        for parameter, value in loaded.items():
            check_shape(parameter, value)
        with self._naming_masters():
            self.inner_optimizer.load_state_dict(rest)
        self._put(loaded)

    @torch.no_grad()
    def _put(self, loaded: dict[Tensor, Tensor]) -> None:
        """Puts masters that were loaded in place of the present ones."""
        state = self.inner_optimizer.state
        for parameter in ranks.parameters_of(self.inner_optimizer):
            master = self._masters.get(parameter)
            # A hook of the optimizer may have read another dictionary.
            other = state.get(parameter, _NO_STATE).get(_KEY, master)
            if other is not master:
                loaded.setdefault(parameter, other)
            if parameter in loaded:
                if master is None:
                    # Parked: the state of the model may be loaded after this one.
                    master = self._masters[parameter] = _master_of(parameter, loaded[parameter])
                master.copy_(loaded[parameter])
                state.setdefault(parameter, {})[_KEY] = master
            elif master is not None:
                master.copy_(parameter)
        self._remember()
        self._note_masters()
        parked = [pair for pair in self._masters.items() if not is_narrow(pair[0])]
        for part, values in merged(parked):
            for (parameter, _), value in zip(part, values, strict=True):
                parameter.data.copy_(value)
        self._facts = self._facts_now()

    def _keyed(self, state_dict: dict[str, Any]) -> Iterable[tuple[object, Tensor]]:
        """The parameters, with their keys in the state of a state dictionary."""
        keys = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        return zip(keys, ranks.parameters_of(self.inner_optimizer), strict=False)


def compares_once(verb: Callable[_P, _R]) -> Callable[_P, _R]:
    """Lets a verb of a loss scale compare the parameters of masters once, when it begins.

    Args:
        verb: A method of an object that has `inner_optimizer`, or that takes an optimizer first.
    """

    @functools.wraps(verb)
    def compared(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        inner = getattr(args[0], "inner_optimizer", args[1] if len(args) > 1 else None)
        parts = with_parts(inner) if isinstance(inner, Optimizer) else ()
        some = [part for part in parts if isinstance(part, MasterWeights)]
        before = [each._is_compared for each in some]
        for each in some:
            each._is_compared = False
            each._is_compared = bool(each.param_groups)
        try:
            return verb(*args, **kwargs)
        finally:
            for each, was in zip(some, before, strict=True):
                each._is_compared = was

    return compared


def living_masters() -> list[MasterWeights]:
    """Those that have masters, the newest last."""
    return sorted(_living, key=lambda each: each._number)


class _Masters(Mapping[Tensor, Tensor]):
    """The masters of an optimizer, of which each look makes a copy."""

    def __init__(self, owner: MasterWeights) -> None:
        self._owner = owner

    def __getitem__(self, parameter: Tensor) -> Tensor:
        owner = self._owner
        master = owner._masters.get(parameter)
        if master is None or (master.shape, master.device) != (parameter.shape, parameter.device):
            # Not in each look, which compares all parameters.
            owner._prepare()
            master = owner._masters[parameter]
        now = owner._current([(parameter, master)])[parameter]
        # So that a write into the copy, which would change nothing, is an error.
        with torch.inference_mode():
            return now.to(torch.float32, copy=True)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._prepared()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._prepared())

    def __len__(self) -> int:
        return len(self._prepared())

    def _prepared(self) -> dict[Tensor, Tensor]:
        self._owner._prepare()
        return self._owner._masters


# --- Parameters and masters ---------------------------------------------------------------------


def _reversed(pairs: Pairs) -> Pairs:
    return [(second, first) for first, second in pairs]


def _master_of(parameter: Tensor, master: Tensor | None) -> Tensor:
    """The master of a parameter that may have been moved or replaced."""
    if master is None or master.shape != parameter.shape or master.is_meta:
        master = parameter.detach().float()
    if master.is_inference():
        # A copy that was made in inference mode.
        master = master.clone()
    if master.device == parameter.device and isinstance(master, Parameter):
        return master
    # Some optimizers ask for the class.
    return Parameter(master.to(parameter.device), requires_grad=False)
