"""Several optimizers as one, so that one scale, one decision and one norm are for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch

from lossscale.errors import ArgumentError, StateDictError, UnsupportedError


class Several(torch.optim.Optimizer):
    """Optimizers one after the other: their groups, their states, and one state dictionary.

    The dictionary is that of one optimizer with all groups, which is also what
    `torch.distributed.checkpoint.state_dict` makes of a list of optimizers.

    Args:
        optimizers: The optimizers; no parameter is in two of them.

    Raises:
        ArgumentError: If there is none, or a parameter is in two.
    """

    def __init__(self, optimizers: list[Any]) -> None:
        if not optimizers:
            raise ArgumentError("The list of optimizers to wrap is empty.")
        owner: dict[int, int] = {}
        for number, each in enumerate(optimizers):
            for index, group in enumerate(each.param_groups):
                for parameter in group["params"]:
                    first = owner.setdefault(id(parameter), number)
                    if first != number:
                        raise ArgumentError(
                            f"A parameter of shape {tuple(parameter.shape)} is in optimizers "
                            f"{first} and {number} (group {index}), and both would move it. Leave "
                            "it in one."
                        )
        # Groups and states stay where they are: of `Optimizer.__init__` only the rest is needed.
        self.__setstate__({"optimizers": optimizers})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    @property
    def defaults(self) -> dict[str, Any]:
        """What all have, with the value of the first: schedules look for momentum here."""
        first, *others = (each.defaults for each in self.optimizers)
        return {k: v for k, v in first.items() if all(k in other for other in others)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> _States:
        return _States(self.optimizers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def __getattr__(self, name: str) -> Any:
        """A method of some of the optimizers, such as `train`, which is called on all of these."""
        having = [each for each in self.__dict__.get("optimizers", ()) if hasattr(each, name)]
        methods = [getattr(each, name) for each in having]
        if name.startswith("_") or not methods or not all(map(callable, methods)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def call_all(*args: Any, **kwargs: Any) -> None:
            for method in methods:
                method(*args, **kwargs)

        return call_all

    def step(self, closure: None = None) -> None:
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(self, (), {})
        for each in self.optimizers:
            each.step()
        for hook in list(self._optimizer_step_post_hooks.values()):
            hook(self, (), {})

    # PyTorch's own wrapper around a `step` would call global hooks for this one, too.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            zero_grad(each, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UnsupportedError(
            "Ambiguous: several optimizers could get the group. Call "
            f"optimizer.optimizers[i].add_param_group(group); {self.described()}."
        )

    def described(self) -> str:
        """Which optimizer has which number, for messages."""
        return ", ".join(f"{i} is {type(each).__name__}" for i, each in enumerate(self.optimizers))

    def state_dict(self) -> dict[str, Any]:
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        saved = joined([each.state_dict() for each in self.optimizers])
        for hook in self._optimizer_state_dict_post_hooks.values():
            saved = hook(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups, state = list(state_dict["param_groups"]), state_dict["state"]
        sizes = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in groups]
        if theirs != sizes:
            raise ArgumentError(
                "The parameter groups of the state dictionary do not match the optimizers'. "
                f"Expected groups with {sizes} parameters. Received: {theirs}."
            )
        before = [each.state_dict() for each in self.optimizers]
        try:
            for number, each in enumerate(self.optimizers):
                mine = [groups.pop(0) for _ in each.param_groups]
                own = [key for group in mine for key in group["params"]]
                # What is not of a parameter was saved with the number of its optimizer.
                named = {key: key for key in own} | {
                    key: key[1] for key in state if isinstance(key, tuple) and key[0] == number
                }
                others = state_dict.get("others", {}).get(number, {})
                found = {name: state[key] for key, name in named.items() if key in state}
                each.load_state_dict({**others, "state": found, "param_groups": mine})
        except BaseException:
            for each, saved_before in zip(self.optimizers, before, strict=True):
                each.load_state_dict(saved_before)
            raise
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)


def joined(state_dicts: Sequence[Any]) -> dict[str, Any]:
    """The state dictionaries of several optimizers as that of one with all of their groups."""
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    others: dict[int, dict[str, Any]] = {}
    for number, each in enumerate(state_dicts):
        if not isinstance(each, dict) or not {"state", "param_groups"} <= each.keys():
            raise StateDictError(
                f"The state of optimizer {number} must be a dictionary with 'state' and "
                "'param_groups', as state_dict() returns it."
            )
        first = sum(len(group["params"]) for group in groups)
        own = [key for group in each["param_groups"] for key in group["params"]]
        place = {key: first + index for index, key in enumerate(own)}
        state.update({place.get(key, (number, key)): v for key, v in each["state"].items()})
        groups += [
            {**group, "params": [place[key] for key in group["params"]]}
            for group in each["param_groups"]
        ]
        others[number] = {k: v for k, v in each.items() if k not in ("state", "param_groups")}
    rest = {"others": others} if any(others.values()) else {}
    return {**rest, "state": state, "param_groups": groups}


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers by parameter, each where it is."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers = optimizers

    def _of(self, parameter: Any) -> Any:
        for each in self._optimizers:
            if parameter in each.state:
                return each.state
        for each in self._optimizers:
            if any(p is parameter for group in each.param_groups for p in group["params"]):
                return each.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Any) -> Any:
        return self._of(parameter)[parameter]

    def get(self, parameter: Any, default: Any = None) -> Any:
        # That of a Mapping would make an entry in the state that is asked.
        if parameter not in self:
            return default
        return self[parameter]

    def __setitem__(self, parameter: Any, value: Any) -> None:
        self._of(parameter)[parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[Any]:
        return (parameter for each in self._optimizers for parameter in each.state)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)

    def __contains__(self, parameter: Any) -> bool:
        return any(parameter in each.state for each in self._optimizers)


def parts_of(inner: Any) -> list[Any]:
    """The optimizers that an optimizer inside is made of."""
    return inner.optimizers if isinstance(inner, Several) else [inner]


def zero_grad(optimizer: Any, set_to_none: bool) -> None:
    """Resets the gradients of an optimizer, whose `zero_grad` may take no arguments."""
    try:
        takes = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
    except (TypeError, ValueError):
        # A built-in function may have no signature.
        takes = True
    if set_to_none and not takes:
        optimizer.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=set_to_none)
