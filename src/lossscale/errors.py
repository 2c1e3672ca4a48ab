"""The errors and warnings of lossscale.

```
Exception
└── LossScaleError
    ├── ArgumentError(ValueError)          a value that cannot be used
    │   └── ScalerArgumentError(AssertionError)
    │                                      the same, of a gradient scaler of PyTorch
    ├── ArgumentTypeError(TypeError)       a value of the wrong type
    ├── AlreadyWrappedError(TypeError, ValueError)
    │                                      loss scaling would be applied twice
    ├── GradientsError(ValueError)         gradients that are missing
    ├── MalformedGradientsError(TypeError) gradients that are not (gradient, variable) pairs
    ├── UnknownSlotError(KeyError)         no such slot, or no such variable
    ├── UnknownSettingError(AttributeError)
    │                                      no such hyperparameter
    ├── CallOrderError(RuntimeError, AssertionError)
    │                                      a call that has no place at this point of a step
    ├── StateDictError(RuntimeError, KeyError)
    │                                      a state dictionary that is empty or not of this kind
    ├── OldFileError(ValueError)           a file that cannot be read, or lacks what is needed
    ├── MissingPackageError(ImportError)   a package that this needs is not installed
    └── UnsupportedError(NotImplementedError)
                                           the framework cannot do this
UserWarning
└── LossScaleWarning                       a step that is probably not what was meant
```

Each class also inherits from the built-in exception that TensorFlow documented for the same
mistake, or that PyTorch raises, so code that already catches `TypeError` or `ValueError` continues
working.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_AROUND = ("Exception encountered", "in user code", "File ", "Arguments received", "Call arguments")


class LossScaleError(Exception):
    """Base class of the errors of lossscale."""

    # Inside a tf.function, AutoGraph replaces unknown exceptions by its own class, which is neither
    # a ValueError nor a TypeError. It leaves exceptions with this attribute alone.
    ag_pass_through = True


class ArgumentError(LossScaleError, ValueError):
    """An argument has a value that cannot be used."""


class ScalerArgumentError(ArgumentError, AssertionError):
    """An argument of a gradient scaler has a value that cannot be used."""


class ArgumentTypeError(LossScaleError, TypeError):
    """An argument has the wrong type."""


class AlreadyWrappedError(LossScaleError, TypeError, ValueError):
    """The optimizer already has loss scaling; a second layer would divide the gradients twice."""


class GradientsError(LossScaleError, ValueError):
    """No variable has a gradient, or a gradient cannot be computed."""


class MalformedGradientsError(LossScaleError, TypeError):
    """The gradients are not a list of (gradient, variable) pairs."""


class UnknownSlotError(LossScaleError, KeyError):
    """The optimizer has no such slot, or does not know the variable."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which hides a sentence behind quotes.
        return str(self.args[0]) if self.args else ""


class UnknownSettingError(LossScaleError, AttributeError):
    """Neither the loss scale optimizer nor its inner optimizer has this setting."""


class CallOrderError(LossScaleError, RuntimeError, AssertionError):
    """A method was called at the wrong point of a step."""


class StateDictError(LossScaleError, RuntimeError, KeyError):
    """A state dictionary is empty, or belongs to another kind of object."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class OldFileError(LossScaleError, ValueError):
    """A file cannot be read, or lacks what was requested."""


class MissingPackageError(LossScaleError, ImportError):
    """A required package is not installed; the message has the command to install it."""


class UnsupportedError(LossScaleError, NotImplementedError):
    """The framework in use does not support this."""


class LossScaleWarning(UserWarning):
    """Something in a training step is probably a mistake, such as a loss that was never scaled."""


def first_names(names: Iterable[str], most: int = 5) -> str:
    """Returns the first of some names, for a message.

    Args:
        names: The names.
        most: The largest number of names.

    Examples:
        >>> first_names(["weight", "bias"]), first_names("abc", 2)
        ("'weight', 'bias'", "'a', 'b', ...")
    """
    quoted = list(map(repr, names))
    return ", ".join([*quoted[:most], *(["..."] if len(quoted) > most else [])])


def first_line(error: BaseException, most: int = 300) -> str:
    """Returns the line of an error that names the cause, or the name of its class.

    The line has no final full stop.

    Args:
        error: The error.
        most: The largest number of characters.

    Examples:
        >>> first_line(ValueError("no such file\\n  in line 3"))
        'no such file'
    """
    # Strip terminal escapes.
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # AutoGraph and Keras wrap the error of a layer in these lines.
    inner = [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    plain = [line for line in lines if not line.startswith(_AROUND)]
    return (inner[-1:] or plain[:1] or [type(error).__name__])[0][:most].removesuffix(".")


__all__ = [
    "AlreadyWrappedError",
    "ArgumentError",
    "ArgumentTypeError",
    "CallOrderError",
    "GradientsError",
    "LossScaleError",
    "LossScaleWarning",
    "MalformedGradientsError",
    "MissingPackageError",
    "OldFileError",
    "ScalerArgumentError",
    "StateDictError",
    "UnknownSettingError",
    "UnknownSlotError",
    "UnsupportedError",
]
