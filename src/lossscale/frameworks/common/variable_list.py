"""A list of variables that is an attribute in one release and a method in another."""

from __future__ import annotations

from typing import Any


class VariableList(list[Any]):
    """A list of variables that returns itself when called.

    Keras 3 has `optimizer.variables`, the documents have `optimizer.variables()`.
    """

    def __call__(self) -> VariableList:
        return self
