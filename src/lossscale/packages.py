"""Optional packages: the extra that installs each, and the error if one is missing.

Nothing is imported here, so that a command can report a missing package at once.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Iterable

from lossscale.errors import LossScaleWarning, MissingPackageError

EXTRAS = {
    "h5py": "keras",
    "jax": "jax",
    "keras": "keras",
    "numpy": "diagnosis",
    "optax": "optax",
    "tensorflow": "tensorflow",
    "tf_keras": "tf-keras",
    "torch": "torch",
}
"""Maps each optional package to the smallest extra that installs it."""

INCLUDED = {
    "optax": {"jax"},
    "tensorflow": {"keras"},
    "tf-keras": {"tensorflow", "keras"},
}
"""Maps an extra to other extras that it includes."""

OLD_FILES = (
    "to read files of TensorFlow 2.0 to 2.15, pip install lossscale-migration, which has "
    "lossscale_migration.load_model, restore_checkpoint and the command lossscale-migrate"
)
"""The end of a message to somebody who looks for them in this package."""

BACKENDS = ("tensorflow", "jax", "torch")
"""The backends of Keras 3; each is a row of the registry."""


def is_installed(module: str) -> bool:
    """Returns whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # It is imported, or other code has set it in sys.modules.
        return True


def require(*modules: str, purpose: str = "", hint: str = "") -> None:
    """Raises unless modules can be imported.

    Args:
        *modules: Keys of `EXTRAS`.
        purpose: The feature that needs them, as the start of a sentence.
        hint: A sentence at the end of the message.

    Raises:
        MissingPackageError: If some cannot. The message has the command to install them.

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
    """Returns the error for missing packages, with the command to install them.

    Args:
        modules: Keys of `EXTRAS`.
        purpose: The feature that needs them, as the start of a sentence.
        hint: A sentence at the end of the message.
        extras: The extras that install them; by default the smallest ones.

    Examples:
        >>> str(not_installed(["h5py", "optax"]))
        'h5py, optax not found: pip install "lossscale[keras,optax]"'
        >>> str(not_installed(["optax"], purpose="This schedule"))
        'This schedule needs optax, which is not installed: pip install "lossscale[optax]"'
    """
    modules = list(modules)
    named = ", ".join(modules)
    command = install_command(extras or map(EXTRAS.__getitem__, modules))
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
    """Returns the modules to install for Keras 3: Keras, and a backend if there is none.

    The default backend is TensorFlow, as in Keras.
    """
    return ["keras"] if any(map(is_installed, BACKENDS)) else ["keras", "tensorflow"]


_SKIPPED_FRAMES = {*EXTRAS, "lossscale", "contextlib", "accelerate", "lightning", "transformers"}
"""Modules that may be on the call stack between the user's line and the warning."""


def warn(message: str, category: type[Warning] = LossScaleWarning) -> None:
    """Warns, with the line of the user's code as the location."""
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED_FRAMES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)
