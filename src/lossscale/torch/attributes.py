"""Attributes of the wrapper that are those of the inner optimizer."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from lossscale.errors import UnknownSettingError
from lossscale.torch.optimizer_list import OptimizerList, with_parts
from lossscale.wrapper import Wrapper


def _of_inner(name: str) -> Any:
    """An attribute of the inner optimizer."""

    def set_(wrapper: InnerAttributes, value: object) -> None:
        setattr(wrapper.inner_optimizer, name, value)

    doc = f"`{name}` of the inner optimizer."
    return property(lambda wrapper: getattr(wrapper.inner_optimizer, name), set_, doc=doc)


_CALLS = "Call optimizer.backward(loss), then optimizer.step()."
_BATCHES = "`Join` is not supported: give each process as many batches as the others."
_INSTEAD = {
    **dict.fromkeys(("minimize", "get_scaled_loss", "get_unscaled_gradients"), _CALLS),
    **dict.fromkeys(("apply_gradients", "get_gradients", "get_updates"), _CALLS),
    # An inner ZeroRedundancyOptimizer has them, and would step beside the loss scale.
    **dict.fromkeys(("join_hook", "join_device", "join_process_group"), _BATCHES),
}
"""Names that are not read from the inner optimizer, and what to do."""


class InnerAttributes(Wrapper):
    """The inner optimizer's groups, hooks and methods."""

    _inner_attribute = "_inner"

    # Since Python 3.12 a protocol, such as Lightning's of an optimizer, sees what a class has.
    param_groups: list[dict[str, Any]] = _of_inner("param_groups")
    state: Any = _of_inner("state")
    defaults: dict[str, Any] = _of_inner("defaults")

    def _check_no_setting(self, name: str) -> None:
        setting = "lr" if name == "learning_rate" else name
        if setting == "lr" or any(setting in group for group in self.param_groups):
            raise UnknownSettingError(
                f"{name!r} is a setting of the parameter groups. Read or set "
                f"optimizer.param_groups[i][{setting!r}], as with any optimizer of PyTorch."
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_optimizer_"):
            # The inner optimizer calls its hooks, once for each step that it takes.
            return getattr(self.inner_optimizer, name)
        if name in _INSTEAD and not hasattr(type(self), name):
            raise UnknownSettingError(
                f"LossScaleOptimizer has no `{name}` on PyTorch. {_INSTEAD[name]}"
            )
        try:
            value = super().__getattr__(name)
        except UnknownSettingError:
            # Otherwise a property of this class has raised it.
            if not hasattr(type(self), name):
                self._check_no_setting(name)
            raise
        if not (inspect.ismethod(value) or inspect.isfunction(value)):
            return value

        @functools.wraps(value)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            """First checks that `.grad` is unscaled."""
            self._check_unscaled(name)
            return value(*args, **kwargs)

        return guarded

    def __setattr__(self, name: str, value: object) -> None:
        inner = self.__dict__.get("_inner")
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        # Schedulers replace `step`, a method, by one that counts its calls.
        if inner is None or own:
            object.__setattr__(self, name, value)
            return
        self._check_no_setting(name)
        if any(hasattr(part, name) for part in (*with_parts(inner), self._rule)):
            place = "optimizers[i]" if isinstance(inner, OptimizerList) else "inner_optimizer"
            raise UnknownSettingError(
                f"{name!r} belongs to the inner optimizer or to the rule, and is only read here. "
                f"Write optimizer.{place}.{name} = ..., or make the optimizer with another `rule`."
            )
        object.__setattr__(self, name, value)
