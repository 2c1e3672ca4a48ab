"""Several optimizers as one, which share one loss scale, one decision and one norm."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lossscale.common.signatures import takes
from lossscale.errors import ArgumentError, UnsupportedError
from lossscale.torch.closures import step_with_closure
from lossscale.torch.scaling import uncompiled


class OuterOptimizer(Optimizer):
    """An optimizer that steps others; its own hooks run before and after them.

    Attributes:
        optimizers: The others.
    """

    optimizers: list[Optimizer]
    # Defined by each subclass: steps the others.
    _step: Callable[..., object]

    def check_can_step(self) -> None:
        """Checks, before anything is changed, that the optimizers can step."""
        for optimizer in self.optimizers:
            check_can_step(optimizer)

    @uncompiled
    def step(self, closure: Callable[[], object] | None = None, **more: Any) -> Any:
        self.check_can_step()
        if closure is not None:
            return step_with_closure(parts_of(self), closure, functools.partial(self.step, **more))
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(self, (), {})
        returned = self._step(**more)
        for hook in list(self._optimizer_step_post_hooks.values()):
            hook(self, (), {})
        return returned

    # PyTorch's own wrapper around a `step` would call global hooks for this one, too.
    step.hooked = True  # type: ignore[attr-defined]  # of a function

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            zero_grad(optimizer, set_to_none)


class OptimizerList(OuterOptimizer):
    """A list of optimizers with the interface of one: groups, states, one state dictionary.

    The state dictionary has the format of one optimizer with all groups, as
    `torch.distributed.checkpoint.state_dict` writes a list of optimizers.

    Args:
        optimizers: The optimizers. No two share a parameter.

    Attributes:
        is_loading: Whether a state is loaded into one after the other.

    Raises:
        ArgumentError: If the list is empty, or two optimizers share a parameter.
    """

    is_loading = False

    def __init__(self, optimizers: list[Optimizer]) -> None:
        if not optimizers:
            raise ArgumentError("The list of optimizers to wrap is empty.")
        owner: dict[int, int] = {}
        for number, optimizer in enumerate(optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    first = owner.setdefault(id(parameter), number)
                    if first != number:
                        raise ArgumentError(
                            f"Optimizers {first} and {number} (group {index}) would both update a "
                            f"parameter of shape {tuple(parameter.shape)}. Leave it in one."
                        )
        # `Optimizer.__init__` would create groups and states, which the optimizers already have.
        self.__setstate__({"optimizers": optimizers})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    # Groups, state and defaults belong to the optimizers, and cannot be set here.

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # only read
        """The defaults that all optimizers have, by the first: schedulers read momentum here."""
        first, *others = (each.defaults for each in self.optimizers)
        return {k: v for k, v in first.items() if all(k in other for other in others)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # only read
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]  # only read
        """The states of all optimizers, by parameter; each can be changed, the mapping cannot."""
        return types.MappingProxyType(
            {key: state for each in self.optimizers for key, state in each.state.items()}
        )

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def __getattr__(self, name: str) -> Any:
        """Returns a method such as `train`, called on all optimizers that have it."""
        parts = self.__dict__.get("optimizers", ())
        methods = [getattr(part, name) for part in parts if hasattr(part, name)]
        if name.startswith("_") or not methods or not all(map(callable, methods)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def call_all(*args: Any, **kwargs: Any) -> None:
            for method in methods:
                method(*args, **kwargs)

        return call_all

    def _step(self, **more: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        parts = ", ".join(f"{i} is {type(part).__name__}" for i, part in enumerate(self.optimizers))
        raise UnsupportedError(
            "Ambiguous: several optimizers could get the group. Call "
            f"optimizer.optimizers[i].add_param_group(group); {parts}."
        )

    def state_dict(self) -> dict[str, Any]:
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        saved = joined([each.state_dict() for each in self.optimizers])
        for change in self._optimizer_state_dict_post_hooks.values():
            saved = change(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = change(self, state_dict) or state_dict
        groups, state = list(state_dict["param_groups"]), state_dict["state"]
        sizes = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in groups]
        if theirs != sizes:
            raise ArgumentError(
                "The parameter groups of the state dictionary do not match the optimizers'. "
                f"Expected groups with {sizes} parameters. Received: {theirs}."
            )
        before = [optimizer.state_dict() for optimizer in self.optimizers]
        self.is_loading = True
        try:
            for number, optimizer in enumerate(self.optimizers):
                mine = [groups.pop(0) for _ in optimizer.param_groups]
                own = [key for group in mine for key in group["params"]]
                states = {key: state[key] for key in own if key in state}
                # State that belongs to no parameter was saved with the number of its optimizer.
                loose = [key for key in state if isinstance(key, tuple) and key[0] == number]
                states |= {key[1]: state[key] for key in loose}
                others = state_dict.get("others", {}).get(number, {})
                optimizer.load_state_dict({**others, "state": states, "param_groups": mine})
        except BaseException:
            for optimizer, saved_before in zip(self.optimizers, before, strict=True):
                optimizer.load_state_dict(saved_before)
            raise
        finally:
            self.is_loading = False
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)


def joined(state_dicts: Sequence[Any]) -> dict[str, Any]:
    """Joins the state dictionaries of several optimizers to that of one with all groups."""
    state: dict[object, object] = {}
    groups: list[dict[str, Any]] = []
    others: dict[int, dict[str, Any]] = {}
    for number, saved in enumerate(state_dicts):
        first = sum(len(group["params"]) for group in groups)
        own = [key for group in saved["param_groups"] for key in group["params"]]
        place = {key: first + index for index, key in enumerate(own)}
        state.update({place.get(key, (number, key)): v for key, v in saved["state"].items()})
        groups += [
            {**group, "params": [place[key] for key in group["params"]]}
            for group in saved["param_groups"]
        ]
        others[number] = {k: v for k, v in saved.items() if k not in ("state", "param_groups")}
    more = {"others": others} if any(others.values()) else {}
    return {**more, "state": state, "param_groups": groups}


def with_parts(inner: Optimizer) -> list[Optimizer]:
    """The optimizer itself, and those that it steps."""
    others = inner.optimizers if isinstance(inner, OuterOptimizer) else ()
    return [inner, *(part for other in others for part in with_parts(other))]


def parts_of(inner: Optimizer) -> list[Optimizer]:
    """The optimizers that update parameters: those that others step, or the one optimizer."""
    return [part for part in with_parts(inner) if not isinstance(part, OuterOptimizer)]


def check_can_step(optimizer: Optimizer) -> None:
    """Checks that an optimizer can step now: `MasterWeights` may not."""
    if isinstance(optimizer, OuterOptimizer):
        optimizer.check_can_step()


def zero_grad(optimizer: Optimizer, set_to_none: bool) -> None:
    """Calls `zero_grad` of an optimizer, which may take no arguments."""
    if not set_to_none or takes(optimizer.zero_grad, "set_to_none"):
        optimizer.zero_grad(set_to_none=set_to_none)
    else:
        optimizer.zero_grad()


def watch_step(inner: Optimizer, hook: Callable[[Optimizer, object, object], None]) -> None:
    """Calls a hook of ours, which may refuse it, before each step of an optimizer and its parts."""
    hook.of_lossscale = True  # type: ignore[attr-defined]  # of a function
    for optimizer in with_parts(inner):
        # An object with the interface of an optimizer, such as Lookahead, may have no hooks.
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            optimizer.register_step_pre_hook(hook)
