"""The settings of the optimizer inside, read through the one around it."""

from __future__ import annotations

from typing import Any, ClassVar

from lossscale.common.checks import unknown_setting
from lossscale.keras_common.parts import SharedParts


class SharedSettings(SharedParts):
    """The learning rate, and each setting that is not found here."""

    # Under which name the instance's dictionary has the inner optimizer.
    _inner_attribute: ClassVar[str]

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def lr(self) -> Any:
        return self.inner_optimizer.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not found here.
        inner = self.__dict__.get(type(self)._inner_attribute)
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(inner, name)
        except AttributeError:
            raise unknown_setting(type(self), inner, name) from None

    def _remember_name(self, name: str) -> None:
        """Notes an attribute of the user's, which copies keep."""
        self.__dict__.setdefault("_names_of_the_user", set()).add(name)
