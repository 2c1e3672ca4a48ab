"""Optional packages: the extra that installs each, and the error if one is missing.

No framework is imported here, so that a missing package is reported at once.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Sequence

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

BACKENDS = ("tensorflow", "jax", "torch")
"""The backends of Keras 3; each is a row of the registry."""


def is_installed(module: str) -> bool:
    """Returns whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # It is imported, or other code has set it in sys.modules.
        return True


def not_installed(modules: Sequence[str]) -> MissingPackageError:
    """Returns the error for missing packages, with the command to install them.

    Args:
        modules: Keys of `EXTRAS`.

    Examples:
        >>> str(not_installed(["h5py", "optax"]))
        'h5py, optax not found: pip install "lossscale[keras,optax]"'
    """
    extras = dict.fromkeys(map(EXTRAS.__getitem__, modules))
    return MissingPackageError(
        f'{", ".join(modules)} not found: pip install "lossscale[{",".join(extras)}]"'
    )


_SKIPPED_FRAMES = {*EXTRAS, "lossscale", "contextlib", "accelerate", "lightning", "transformers"}
"""Modules that may be on the call stack between the user's line and the warning."""


def warn(message: str, category: type[Warning] = LossScaleWarning) -> None:
    """Warns, with the line of the user's code as the location."""
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED_FRAMES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)  # noqa: TID251
