"""Temporary replacements of names in other modules.

`lossscale.install()` uses it for the documented names in TensorFlow and tf_keras, and
`lossscale.torch.install()` for the scaler in PyTorch.
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

    Each subclass replaces certain names. They stay replaced until all of its installations are
    undone, in any order.
    """

    _standing: ClassVar[list[Installation]]
    _taking_out: ClassVar[contextlib.ExitStack]

    def __init_subclass__(cls) -> None:
        cls._standing, cls._taking_out = [], contextlib.ExitStack()

    def undo(self) -> None:
        """Restores the old names, unless another installation is still active.

        A second call does nothing.
        """
        if self in self._standing:
            self._standing.remove(self)
            if not self._standing:
                self._taking_out.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    @classmethod
    def _made(cls, stack: contextlib.ExitStack) -> Self:
        """Returns another installation, with the stack that undoes its replacements."""
        cls._taking_out.enter_context(stack.pop_all())
        installation = cls()
        cls._standing.append(installation)
        return installation
