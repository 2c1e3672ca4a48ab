"""State dictionaries, copies and pickles.

`torch.distributed.checkpoint` keeps of an optimizer's state dictionary what is in `state` and in
`param_groups`, and nothing beside them. So the numbers of the loss scale are in the first group,
and only in the dictionary: the groups themselves stay as the optimizer inside made them.
"""

from __future__ import annotations

import copy
import math
import reprlib
import warnings
from collections.abc import Mapping
from typing import Any

from lossscale.common.checks import remember_wrapper
from lossscale.errors import ArgumentError, LossScaleWarning, StateDictError
from lossscale.rules import ScaleRule
from lossscale.torch.optimizer.marks import Marks
from lossscale.torch.optimizer.scales import Counts, DeviceScales, HostScales

_PREFIX = "loss_scale"
_COUNTS = ("iterations", "steps_skipped")


class LossScaleState:
    """The state of a loss scale by itself, as `torch.distributed.checkpoint` takes it.

    Args:
        optimizer: Whose state it is.
    """

    def __init__(self, optimizer: Saving) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns the numbers by name: Python numbers."""
        return self._optimizer._saved_numbers()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the numbers that `state_dict` returned.

        Raises:
            ArgumentError: If one of them is no number. Then nothing is changed.
        """
        self._optimizer._restore_numbers(self._optimizer._checked_numbers(state_dict))


class Saving:
    """`state_dict`, `load_state_dict`, `loss_scale_state`, copies and pickles."""

    inner_optimizer: Any
    _rule: ScaleRule
    _marks: Marks
    _scales: HostScales | DeviceScales

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside, with that of the loss scale in it.

        Returns:
            The dictionary of the optimizer inside. Its first parameter group has besides
            `loss_scale` (dimensionless), `loss_scale_good_steps`, `loss_scale_steps_skipped` and
            `loss_scale_iterations` (in steps): Python numbers. The optimizer inside can load it.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.state_dict()["param_groups"][0]["loss_scale"]
            32768.0
        """
        saved = dict(self.inner_optimizer.state_dict())
        first, *others = saved["param_groups"]
        saved["param_groups"] = [{**first, **self._saved_numbers()}, *others]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this or of the plain optimizer inside returned.

        Without the numbers of a loss scale the scale stays as it is. Others are brought into the
        range of the rule.

        Args:
            state_dict: The dictionary; it is not changed.

        Raises:
            ValueError: If it does not match the parameter groups, or a number of the loss scale is
                no number. Then nothing is changed.
            StateDictError: If it is no optimizer's. It is a `KeyError` and a `RuntimeError`.
        """
        groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
        if not groups:
            keys = list(state_dict) if isinstance(state_dict, Mapping) else state_dict
            raise StateDictError(
                "An optimizer's state is a dictionary with 'state' and 'param_groups', as "
                f"state_dict() returns it. Received: {reprlib.repr(keys)}. Of a checkpoint with "
                "several parts, load that of the optimizer."
            )
        first, *others = groups
        numbers = {name: first[name] for name in self._saved_names() if name in first}
        checked = self._checked_numbers(numbers)
        rest = {name: value for name, value in first.items() if name not in numbers}
        self.inner_optimizer.load_state_dict({**state_dict, "param_groups": [rest, *others]})
        self._restore_numbers(checked)

    @property
    def loss_scale_state(self) -> LossScaleState:
        """The state of the loss scale alone, an object with `state_dict` and `load_state_dict`.

        For checkpoints that flatten the optimizer's dictionary
        (`StateDictOptions(flatten_optimizer_state_dict=True)`), which loses the numbers: save
        `{"loss_scale": optimizer.loss_scale_state}` beside it.
        """
        return LossScaleState(self)

    def _saved_names(self) -> dict[str, str]:
        """The names in a dictionary, and what they stand for."""
        fields = self._scales.first._fields
        named = {f"{_PREFIX}_{name}": name for name in (*fields, *_COUNTS)}
        del named[f"{_PREFIX}_scale"]
        return {_PREFIX: "scale", **named}

    def _saved_numbers(self) -> dict[str, Any]:
        values = self._scales.values()
        return {name: values[meant] for name, meant in self._saved_names().items()}

    def _checked_numbers(self, numbers: dict[str, Any]) -> dict[str, Any]:
        checked = {}
        for name, meant in self._saved_names().items():
            if name not in numbers:
                continue
            try:
                checked[meant] = float(numbers[name])
            except (TypeError, ValueError):
                raise ArgumentError(
                    f"`{name}` in the state must be a number. Received: {numbers[name]!r} of type "
                    f"{type(numbers[name]).__name__}."
                ) from None
            if meant != "scale" and not math.isfinite(checked[meant]):
                raise ArgumentError(
                    f"`{name}` in the state must be finite. Received: {numbers[name]!r}."
                )
        return checked

    def _restore_numbers(self, numbers: dict[str, float]) -> None:
        if not numbers:
            return
        values = self._scales.values()
        first = self._scales.first
        fields = {}
        for field, now in zip(first._fields, first, strict=True):
            given = numbers.get(field, values[field])
            fields[field] = type(now)(given)
        asked = type(first)(**fields)
        state = self._rule.restored(asked)
        if self._rule.moves and state.scale != asked.scale:
            warnings.warn(
                f"The saved loss scale {asked.scale!r} is outside of what {self._rule} can reach; "
                f"{state.scale!r} is used.",
                LossScaleWarning,
                stacklevel=4,
            )
        made, skipped = (max(int(numbers.get(name, values[name])), 0) for name in _COUNTS)
        self._scales.restore(state, Counts(made, skipped, False))

    # --- Copies -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Schedulers and trainers replace methods by their own, which refer to this optimizer.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in _OF_OTHERS and (name in _OWN or not hasattr(type(self), name))
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__.setdefault("_layout", None)
        remember_wrapper(self.inner_optimizer, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        # Process groups are not copied: the copy talks to the same processes.
        shared = {"_process_group": self.__dict__["_process_group"]}
        state = {k: v for k, v in self.__getstate__().items() if k not in shared}
        copied.__setstate__({**copy.deepcopy(state, memo), **shared})
        return copied


_OWN = frozenset({"_marks", "_scales", "_rule", "_is_ordinary", "name"})
"""What is declared in a class, and set here."""

_OF_OTHERS = frozenset({"_layout", "_strategy", "_on_before_step", "_on_after_step"})
"""What is found out again, and what Lightning puts on an optimizer."""
