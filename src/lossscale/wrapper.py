"""`Wrapper`: what the wrappers of all frameworks have in common, as TensorFlow documented it.

Also which optimizers have a wrapper that lives, so that none gets a second one.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import lossscale.framework_types as ft
from lossscale.arguments import growth_steps
from lossscale.errors import AlreadyWrappedError, UnknownSettingError
from lossscale.rules import ScaleRule


class VariableList(list[ft.Variable]):
    """A list of variables that returns itself when called.

    Keras 3 has `optimizer.variables`, TensorFlow documented `optimizer.variables()`.
    """

    def __call__(self) -> VariableList:
        return self


class Wrapper:
    """The base class of the wrappers of all frameworks.

    Attributes:
        inner_optimizer: The optimizer that is wrapped.
        name: The optimizer's name.
    """

    inner_optimizer: Any
    name: str
    _rule: ScaleRule
    # The key of the inner optimizer in `__dict__`.
    _inner_attribute: ClassVar[str] = "inner_optimizer"

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None: ...
        # For subclasses.
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not found here, or if a property raised this error.
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        inner = self.__dict__.get(self._inner_attribute)
        if inner is None or name.startswith("_"):
            early = " before super().__init__(optimizer) is called" if inner is None else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{early}")
        try:
            return getattr(inner, name)
        except AttributeError:
            if hasattr(type(inner), name):
                raise
            raise UnknownSettingError(
                f"Neither LossScaleOptimizer nor its inner optimizer, {type(inner).__name__}, has "
                f"an attribute {name!r}."
            ) from None

    @property
    def rule(self) -> ScaleRule:
        """The rule that moves the loss scale."""
        return self._rule

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is adjusted during training."""
        return bool(self._rule.is_dynamic)

    @property
    def initial_scale(self) -> float:
        """The first loss scale, or the fixed one."""
        return float(self._rule.init().scale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The number of finite steps after which the scale grows; None if the scale is fixed."""
        return growth_steps(self._rule)

    def __repr__(self) -> str:
        names = [type(each).__name__ for each in (self, self.inner_optimizer, self._rule)]
        return "<{} around {}, {}{}>".format(*names, self._state_in_words())

    def _state_in_words(self) -> str:
        try:
            if not self._is_on_host():
                return ": loss scale on the device"
            scale, skipped = float(self._scale_now()), int(self.steps_skipped)
            return f": loss scale {scale:g}, {skipped} of {int(self.iterations)} steps skipped"
        except Exception:
            # A debugger may call this at any time. In a traced function and in a TensorFlow 1 graph
            # there are no numbers, and each framework raises its own exceptions for that.
            return ""

    def _is_on_host(self) -> bool:
        """Whether the host reads the scale and the counters without waiting for a device."""
        return True

    def _scale_now(self) -> ft.Scalar:
        return self.loss_scale


# By identity: an optimizer may be unhashable, or equal to another one.
_wrappers: dict[int, tuple[weakref.ref[object], weakref.ref[object]]] = {}


def living_wrapper(inner: object) -> Any:
    """Returns the living wrapper of an optimizer, or None."""
    found = _wrappers.get(id(inner))
    return found[1]() if found is not None and found[0]() is inner else None


def check_not_wrapped(inner: object, wrappers: type | tuple[type, ...] = ()) -> None:
    """Checks that an optimizer has no loss scaling and no living wrapper.

    Args:
        inner: The optimizer.
        wrappers: The framework's own class of loss scale optimizers, if it has one.

    Raises:
        AlreadyWrappedError: If it has.
    """
    if isinstance(inner, wrappers):
        raise AlreadyWrappedError(
            "The optimizer to wrap is a LossScaleOptimizer itself; the gradients would be "
            f"divided twice. Wrap its inner optimizer. Received: {inner!r}."
        )
    wrapper = living_wrapper(inner)
    if wrapper is not None:
        raise AlreadyWrappedError(
            f"Another {type(wrapper).__name__} already wraps this {type(inner).__name__}. Use that "
            "one, or make a new optimizer to wrap."
        )


def remember_wrapper(inner: object, wrapper: object) -> None:
    """Records that `wrapper` wraps `inner`, as long as the wrapper lives."""
    key = id(inner)
    _wrappers[key] = weakref.ref(inner, lambda _: _wrappers.pop(key, None)), weakref.ref(wrapper)
