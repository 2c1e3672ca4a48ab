"""Optional packages: the extra that installs each, and the error if one is missing.

Nothing is imported here, so that a command can tell at once what it lacks.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Iterable
from typing import NamedTuple

from lossscale.errors import LossScaleWarning, MissingPackageError


class Package(NamedTuple):
    """An optional package.

    Attributes:
        distribution: What pip calls it.
        extra: The smallest extra of lossscale that installs it.
    """

    distribution: str
    extra: str


PACKAGES = {
    "h5py": Package("h5py", "keras"),
    "jax": Package("jax", "jax"),
    "keras": Package("keras", "keras"),
    "matplotlib": Package("matplotlib", "plots"),
    "ml_dtypes": Package("ml_dtypes", "plots"),
    "numpy": Package("numpy", "plots"),
    "optax": Package("optax", "optax"),
    "tensorflow": Package("tensorflow", "tensorflow"),
    "tf_keras": Package("tf_keras", "tf-keras"),
    "torch": Package("torch", "torch"),
}
"""For each module that is imported, the package it comes in."""

INCLUDED = {
    "optax": {"jax"},
    "tensorflow": {"keras"},
    "tf-keras": {"tensorflow", "keras"},
}
"""For an extra, others that install nothing that it does not install."""

BACKENDS = ("tensorflow", "jax", "torch")
"""What Keras 3 can compute with; each is a row of the registry."""


def is_installed(module: str) -> bool:
    """Returns whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # Imported, or put into sys.modules by hand.
        return True


def require(*modules: str, purpose: str = "", hint: str = "") -> None:
    """Raises unless modules can be imported.

    Args:
        *modules: Keys of `PACKAGES`.
        purpose: What needs them, as the start of a sentence.
        hint: A sentence at the end of the message.

    Raises:
        MissingPackageError: If some cannot. The message has the command that installs them.
    Examples:
        >>> require("numpy")
    """
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        raise not_installed(missing, purpose=purpose, hint=hint)


def not_installed(
    modules: Iterable[str],
    *,
    purpose: str = "",
    hint: str = "",
    extras: Iterable[str] | None = None,
) -> MissingPackageError:
    """Returns the error that says how to install what is missing.

    Args:
        modules: Keys of `PACKAGES`.
        purpose: What needs them, as the start of a sentence.
        hint: A sentence at the end of the message.
        extras: What installs them here; by default the smallest extras that do.

    Examples:
        >>> str(not_installed(["h5py", "matplotlib"]))
        'h5py, matplotlib not found: pip install "lossscale[keras,plots]"'
        >>> str(not_installed(["optax"], purpose="This schedule"))
        'This schedule needs optax, which is not installed: pip install "lossscale[optax]"'
    """
    modules = list(modules)
    named = ", ".join(PACKAGES[module].distribution for module in modules)
    command = install_command(extras or (PACKAGES[module].extra for module in modules))
    if purpose:
        are = "is" if len(modules) == 1 else "are"
        message = f"{purpose} needs {named}, which {are} not installed: {command}"
    else:
        message = f"{named} not found: {command}"
    return MissingPackageError(f"{message}. {hint}" if hint else message)


def install_command(extras: Iterable[str]) -> str:
    """Returns the command that installs extras.

    Args:
        extras: Their names; what another one includes is left out.

    Examples:
        >>> install_command(["keras", "jax"]), install_command(["keras", "tensorflow"])
        ('pip install "lossscale[keras,jax]"', 'pip install "lossscale[tensorflow]"')
    """
    names = list(dict.fromkeys(extras))
    included = set().union(*(INCLUDED.get(name, set()) for name in names))
    return f'pip install "lossscale[{",".join(n for n in names if n not in included)}]"'


def lacking_for_keras() -> list[str]:
    """Returns what to install where there is no Keras 3: it, and a backend unless one is there.

    The backend is TensorFlow, as it is in Keras.
    """
    return ["keras"] if any(map(is_installed, BACKENDS)) else ["keras", "tensorflow"]


_BETWEEN = {*PACKAGES, "lossscale", "contextlib", "accelerate", "lightning", "transformers"}
"""What may stand between a user's line and the warning about it."""


def warn(message: str, category: type[Warning] = LossScaleWarning) -> None:
    """Warns, at the line of the user's code that led to it."""
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)
