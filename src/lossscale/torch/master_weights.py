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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lossscale.errors import AlreadyWrappedError, ArgumentTypeError, CallOrderError
from lossscale.optimizer import LossScaleOptimizer as FrontDoor
from lossscale.torch import fused, gradients, ranks
from lossscale.torch.closures import check_needs_no_closure
from lossscale.torch.masters import (
    NARROW,
    Pairs,
    adopt,
    check_can_have_masters,
    check_value,
    is_narrow,
    is_same,
    merged,
    round_into,
    with_held,
)
from lossscale.torch.optimizer_list import OuterOptimizer, parts_of, watch_step
from lossscale.wrapper import check_not_wrapped, remember_wrapper

_KEY = "master_weight"
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_DTYPE, _KIND = operator.attrgetter("dtype"), operator.attrgetter("dtype", "device")
_STATE = "inner_optimizer", "_grad_dtype", "_masters", "_kept"
_numbers = itertools.count()
LIVING: weakref.WeakValueDictionary[int, MasterWeights] = weakref.WeakValueDictionary()
"""All of them by their number, the newest last."""


class MasterWeights(OuterOptimizer):
    """Makes an optimizer update float32 copies of float16 and bfloat16 parameters.

    ```
    inner = MasterWeights(torch.optim.AdamW(model.half().parameters()))
    optimizer = LossScaleOptimizer(inner)
    ```

    The copies start from the parameters. Each step updates them and rounds them into the
    parameters, so that updates too small for float16 add up. `.grad` of a float16 parameter is
    float32. What other code writes into a parameter between two steps replaces the copy; into a
    copy itself only `set_masters` writes. After `model.float()` and `model.half()` the copies are
    what they were, and a step in between is an error. A newer `MasterWeights` over a parameter
    starts from the parameter, and the older one refuses to step while the newer lives.

    The groups, the state and the hyperparameters are those of the optimizer. In its state each
    parameter also has `master_weight`, as it is saved; a write into it alone is lost, because the
    next step starts from the parameter. Hooks of either optimizer see the parameters; PyTorch's
    global optimizer hooks see the masters. It can be used with a gradient scaler, and alone for
    bfloat16.

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
    _grad_dtype: torch.dtype | None
    _masters: dict[Tensor, Tensor]
    _kept: dict[Tensor, Tensor]
    """Masters of a file whose parameters are wide now, until the next step."""

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
        check_needs_no_closure(parts_of(optimizer))
        self.__setstate__(dict(zip(_STATE, (optimizer, grad_dtype, {}, {}), strict=True)))

    def __getstate__(self) -> dict[str, Any]:
        self._prepare()
        return {name: vars(self)[name] for name in _STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, optimizers=[state["inner_optimizer"]])
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._is_stepping, self._number = False, next(_numbers)
        self._facts, self._ends = list[object](), list[Tensor]()
        # It may refuse parameters, and has changed nothing then.
        self._prepare()
        LIVING[self._number] = self
        self._refuse_other_steps()
        remember_wrapper(self.inner_optimizer, self)

    # --- What it shows of the optimizer -----------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, with the parameters of the model."""
        self._check_gradients()
        return self.inner_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner_optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the optimizer by parameter, with `master_weight` after the first step.

        `set_masters` changes a master.
        """
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
            check_value(parameter if id(parameter) in own else None, value, finite=True)
        for parameter, value in values.items():
            self._kept.pop(parameter, None)
            self._masters.get(parameter, parameter).copy_(value)
        round_into([pair for pair in self._masters.items() if pair[0] in values])

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
            self.check_can_step()
            with self._stepping():
                return value(*args, **kwargs)

        return with_masters

    # --- The masters --------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Makes masters for the narrow parameters that there are now; sets the dtype of gradients.

        While it steps, the groups name the masters.
        """
        if self._is_stepping:
            return
        has_changed = self._facts_now() != self._facts
        if not (has_changed or any(map(self._has_other_gradient, self._masters))):
            return
        with torch.inference_mode(False), torch.no_grad():
            if has_changed:
                self._make_masters()
                self._facts = self._facts_now()
            for parameter in filter(self._has_other_gradient, self._masters):
                gradient, parameter.grad = parameter.grad, None
                parameter.grad_dtype = self._grad_dtype
                setattr(parameter, ranks.WIDENED, True)
                parameter.grad = None if gradient is None else gradient.to(dtype=self._grad_dtype)

    def _check_gradients(self) -> None:
        # Conversions change the dtype of all gradients: two are enough.
        if any(map(self._has_other_gradient, self._ends)):
            self._prepare()

    def _has_other_gradient(self, parameter: Tensor) -> bool:
        """Whether a gradient is, or may come, in a dtype that was not asked for."""
        gradient, wanted = parameter.grad, self._grad_dtype
        is_cast = gradient is not None and wanted is not None and gradient.dtype in NARROW
        return is_cast or parameter.grad_dtype is not wanted

    def _facts_now(self) -> list[object]:
        parameters = ranks.parameters_of(self.inner_optimizer)
        shapes = [parameter.shape for parameter in self._masters]
        return [*map(id, parameters), *map(type, parameters), *map(_KIND, parameters), *shapes]

    def _make_masters(self) -> None:
        inner, before, kept = self.inner_optimizer, self._masters, self._kept
        parameters = ranks.parameters_of(inner)
        check_can_have_masters(inner, parameters)
        self._masters = {
            p: _master_of(p, before.get(p, kept.get(p)))
            for p in parameters
            if is_narrow(p) or p in before
        }
        self._ends = [*self._masters][:1] + [*self._masters][-1:]
        self._kept = {p: _master_of(p, kept[p]) for p in kept if p not in self._masters}
        for p in self._masters.keys() - before.keys():
            state = inner.state.get(p, {})
            state.update({key: v.float() for key, v in state.items() if is_narrow(v)})
            if "initial_accumulator_value" in inner.defaults and state.get("step", 1) == 0:
                # Adagrad has made it, rounded to float16.
                state["sum"].fill_(inner.defaults["initial_accumulator_value"])

    def _check_is_newest(self) -> None:
        references = reversed(LIVING.valuerefs())
        newer = itertools.takewhile(lambda each: each.key > self._number, references)
        masters = (other._masters for each in newer if (other := each()) is not None)
        if not all(map(self._masters.keys().isdisjoint, masters)):
            raise CallOrderError(
                "A MasterWeights that was made later has a parameter of this one, and its master. "
                "For several models or rates, make one optimizer with several parameter groups. "
                "To train again from the start, use the new one."
            )

    def check_can_step(self) -> None:
        self._check_is_newest()
        if not NARROW.issuperset(map(_DTYPE, self._masters)):
            wide = next(p for p in self._masters if p.dtype not in NARROW)
            raise CallOrderError(
                f"A parameter of shape {tuple(wide.shape)} with a master is {wide.dtype} now. Call "
                "model.half() (or bfloat16()) again, which loses nothing. To stay in float32, load "
                "float32_state_dict(model, optimizer) into the model and make a new optimizer."
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def current(self, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """The masters of parameters as the next step will have them, which it leaves as they are.

        What is in a parameter now may be swapped out again, as averages are.

        Args:
            parameters: Parameters; those without a master are left out.
        """
        masters = self.all_masters()
        now = {p: masters[p] for p in parameters if p in masters}
        for part, values in merged(list(now.items()), waits=True):
            now.update(zip((parameter for parameter, _ in part), values, strict=True))
        return now

    def all_masters(self) -> dict[Tensor, Tensor]:
        """All masters by parameter, as the last step or load has left them."""
        self._prepare()
        return {**self._masters, **self._kept}

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Within it, the optimizer has the masters in place of the parameters."""
        self._prepare()
        pairs, grads = list(self._masters.items()), [p.grad for p in self._masters]
        adopt([*pairs, *self._kept.items()])
        narrow = [] if self._grad_dtype else [g for g in grads if is_narrow(g)]
        made = gradients.converted(narrow, itertools.repeat(torch.float32))
        wide = dict(zip(map(id, narrow), made, strict=True))
        for (parameter, master), gradient in zip(pairs, grads, strict=True):
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
            before = zip(pairs, grads, versions, strict=True)
            for (parameter, master), gradient, version in before:
                if master.grad is not gradient:
                    parameter.grad = master.grad
                has_moved = gradient is not None or master.grad is not None
                master.grad, master.requires_grad = None, False
                if has_moved or master._version != version:
                    stepped.append((parameter, master))
                    self.inner_optimizer.state.setdefault(parameter, {})[_KEY] = master
                elif parameter.requires_grad:
                    # Old optimizers write to `data`, of which no graph takes notice.
                    stepped.append((parameter.data, master))
            round_into(stepped)

    @contextlib.contextmanager
    def _naming_masters(self) -> Iterator[None]:
        """Within it, the groups and the state name the masters; `_KEY` is not in the state."""
        pairs, state = list(self._masters.items()), self.inner_optimizer.state
        # Adam takes a state with this entry alone for one that it has made.
        stored = [(p, m) for p, m in pairs if state.get(p, {}).pop(_KEY, None) is not None]
        self._rename(pairs)
        try:
            yield
        finally:
            self._rename([(master, parameter) for parameter, master in pairs])
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

        watch_step(self.inner_optimizer, refuse)

    # --- The methods of an optimizer ------------------------------------------------------------

    def _step(self, **more: Any) -> object:
        inner = self.inner_optimizer
        # A gradient scaler has set them on this optimizer.
        of_scaler = [vars(self).get(name) for name in ("grad_scale", "found_inf")]
        hooks = {name: getattr(inner, name) for name in _HOOKS if hasattr(inner, name)}
        before, after = (list(hooks.get(name, {}).values()) for name in _HOOKS)
        # Its hooks see the parameters.
        for hook in before:
            if not hasattr(hook, "of_lossscale"):
                hook(inner, (), more)
        try:
            with self._stepping(), fused.attributes([inner], *of_scaler):
                vars(inner).update({name: {} for name in hooks})
                returned = inner.step(**more)
                self._kept = {}
        finally:
            vars(inner).update(hooks)
        for hook in after:
            hook(inner, (), more)
        return returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._check_gradients()

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
            # Before the first step it is the parameter, unless it was set: Adam would take a state
            # with this entry alone for one that it has made.
            if master is not None and (entries or not is_same(master, parameter.float())):
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
        rest, parameters = dict(state_dict), ranks.parameters_of(self.inner_optimizer)
        own = rest.pop(_KEY, {})
        loaded = {p: own[index] for index, p in enumerate(parameters) if index in own}
        if "state" in rest:
            state = {k: dict(v) if isinstance(v, dict) else v for k, v in rest["state"].items()}
            saved = {k: v.pop(_KEY) for k, v in state.items() if isinstance(v, dict) and _KEY in v}
            loaded |= {p: saved[key] for key, p in self._keyed(rest) if key in saved}
            rest["state"] = {key: v for key, v in state.items() if v or key not in saved}
        for parameter, value in loaded.items():
            check_value(parameter, value)
        with self._naming_masters():
            self.inner_optimizer.load_state_dict(rest)
        self._put(loaded)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _put(self, loaded: dict[Tensor, Tensor]) -> None:
        """Puts masters that were loaded in place of the present ones."""
        states = self.inner_optimizer.state
        for parameter in ranks.parameters_of(self.inner_optimizer):
            master, state = self._masters.get(parameter), states.get(parameter, {})
            # A hook of the optimizer may have read another dictionary.
            found = state.get(_KEY, master)
            if found is not master:
                loaded.setdefault(parameter, found)
            if master is None:
                state.pop(_KEY, None)
                continue
            master.copy_(loaded.get(parameter, parameter))
            if parameter in loaded:
                states.setdefault(parameter, {})[_KEY] = master
        wide = ((p, v.to(torch.float32, copy=True)) for p, v in loaded.items())
        self._kept = {p: _master_of(p, v) for p, v in wide if p not in self._masters}
        adopt(list(self._kept.items()))

    def _keyed(self, state_dict: dict[str, Any]) -> Iterable[tuple[object, Tensor]]:
        """The parameters, with their keys in the state of a state dictionary."""
        keys = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        return zip(keys, ranks.parameters_of(self.inner_optimizer), strict=False)


class _Masters(Mapping[Tensor, Tensor]):
    """The masters of an optimizer, of which each look makes a copy."""

    def __init__(self, owner: MasterWeights) -> None:
        self._owner = owner

    def __getitem__(self, parameter: Tensor) -> Tensor:
        now = self._owner.current([parameter])[parameter]
        # So that a write into the copy, which would change nothing, is an error.
        with torch.inference_mode():
            return now.to(torch.float32, copy=True)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._owner.all_masters())

    def __len__(self) -> int:
        return len(self._owner.all_masters())


def _master_of(parameter: Tensor, master: Tensor | None) -> Tensor:
    """The master of a parameter that may have been moved or replaced."""
    if master is None or master.shape != parameter.shape or master.is_meta:
        master = parameter.detach().float()
    # A copy that was made in inference mode cannot be changed.
    stays = not master.is_inference()
    if stays and master.device == parameter.device and isinstance(master, Parameter):
        return master
    # Some optimizers ask for the class.
    return Parameter(master.to(parameter.device, copy=not stays), requires_grad=False)
