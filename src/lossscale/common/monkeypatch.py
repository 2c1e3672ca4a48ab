"""Names in modules of others: replaced for a while, and put back exactly.

`lossscale.install()` puts the documented names into TensorFlow and tf_keras so, and
`lossscale.torch.install()` its scaler into PyTorch.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

_ABSENT = object()


def replace(stack: contextlib.ExitStack, target: Any, name: str, value: Any) -> None:
    """Sets an attribute of a module; closing the stack puts back what was there, or nothing."""
    before = vars(target).get(name, _ABSENT)
    setattr(target, name, value)
    if before is _ABSENT:
        stack.callback(delattr, target, name)
    else:
        stack.callback(setattr, target, name, before)


class Installation:
    """Names in the places of others; a context manager that takes them out again.

    A subclass is for certain places. Its names stand as long as one of its installations asks for
    them, in whatever order they are undone.
    """

    _standing: ClassVar[list[Installation]]
    _taking_out: ClassVar[contextlib.ExitStack]

    def __init_subclass__(cls) -> None:
        cls._standing, cls._taking_out = [], contextlib.ExitStack()

    def undo(self) -> None:
        """Puts everything back as it was, unless another installation still stands.

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
        """Returns another installation, and keeps what undoes its replacements."""
        cls._taking_out.enter_context(stack.pop_all())
        installation = cls()
        cls._standing.append(installation)
        return installation


def submodule(stack: contextlib.ExitStack, parent: Any, name: str) -> Any:
    """Returns the module of this name in `parent`; makes an empty one where there is none."""
    found = getattr(parent, name, None)
    if found is not None:
        return found
    path = f"{parent.__name__}.{name}"
    module = types.ModuleType(path, "Names that TensorFlow documented, from lossscale.")
    replace(stack, parent, name, module)
    # `from tensorflow.keras.mixed_precision import experimental` looks here.
    if path not in sys.modules:
        sys.modules[path] = module
        stack.callback(sys.modules.pop, path, None)
    return module


class DocumentedNames(NamedTuple):
    """What `lossscale.install()` puts in place.

    Attributes:
        optimizer: The class of the pages for TensorFlow 2.4 and later.
        loss_scales: The classes of the loss scale objects.
        older: Takes a `mixed_precision` module of a Keras, and returns what the pages for
            TensorFlow 2.0 to 2.3 have in its `experimental`, by name.
        wrap: Takes the optimizer that `compile` was given and the global policy of its Keras, and
            returns the optimizer to train with.
    """

    optimizer: type[Any]
    loss_scales: Sequence[type[Any]]
    older: Callable[[Any], Mapping[str, Any]]
    wrap: Callable[[Any, Any], Any]


class Wrapping:
    """Stands in a trainer for the class that it wraps optimizers in, and that it looks for.

    Args:
        own: The trainer's own class. Its instances are the ones that are not wrapped.
        wrap: Takes the optimizer to wrap, and returns the wrapped one.
    """

    def __init__(self, own: type[Any], wrap: Callable[[Any], Any]) -> None:
        self._own = own
        self._wrap = wrap

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._own)

    def __call__(self, optimizer: Any, name: str | None = None) -> Any:
        return self._wrap(optimizer)


def put_into_mixed_precision(
    stack: contextlib.ExitStack, mixed_precision: Any, names: DocumentedNames, policies: Any
) -> None:
    """Sets the names in a `mixed_precision` module of a Keras.

    Args:
        stack: Puts back what was there before when it is closed.
        mixed_precision: The module.
        names: What the names lead to.
        policies: The `mixed_precision` module of the same Keras that has its policies.
    """
    replace(stack, mixed_precision, "LossScaleOptimizer", names.optimizer)
    experimental = submodule(stack, mixed_precision, "experimental")
    for name, value in names.older(policies).items():
        replace(stack, experimental, name, value)
