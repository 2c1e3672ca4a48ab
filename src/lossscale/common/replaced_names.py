"""Names in other modules that are replaced for a time.

`lossscale.install()` replaces the documented names in TensorFlow and tf_keras, and
`lossscale.torch.install()` the scaler in PyTorch.
"""

from __future__ import annotations

import contextlib
from typing import ClassVar, Self

_ABSENT = object()


def replace(stack: contextlib.ExitStack, target: object, name: str, value: object) -> None:
    """Sets an attribute of a module; closing the stack restores the old value, or removes it."""
    before = vars(target).get(name, _ABSENT)
    setattr(target, name, value)
    if before is _ABSENT:
        stack.callback(delattr, target, name)
    else:
        stack.callback(setattr, target, name, before)


class Installation:
    """Replaced names; a context manager that restores the old ones.

    While one installation of a subclass stands, it also owns what later ones replace.

    Args:
        replaced: Restores the old names when it is closed; it is empty afterwards.
    """

    _first: ClassVar[Installation | None] = None

    def __init__(self, replaced: contextlib.ExitStack) -> None:
        self._replaced, first = replaced.pop_all(), type(self)._first
        if first is None:
            type(self)._first = self
        else:
            first._replaced.enter_context(self._replaced.pop_all())

    def undo(self) -> None:
        """Restores the old names; does nothing if this is a second call or not the first one."""
        if type(self)._first is self:
            type(self)._first = None
            self._replaced.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()
