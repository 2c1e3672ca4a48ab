"""Which backend Keras computes with: it has to be chosen before Keras is imported."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

from lossscale.cli.errors import UsageError
from lossscale.packages import BACKENDS


def choose_backend(requested: str | None, others: Iterable[str] = ()) -> str:
    """Returns the backend to use, and has Keras use it.

    Args:
        requested: One of `BACKENDS`, or None: then the one Keras was imported with, or the one
            that the environment variable KERAS_BACKEND names, or tensorflow.
        others: What else the caller takes, for the message.

    Raises:
        UsageError: If there is no such backend, or Keras is imported with another one.
    """
    loaded = sys.modules.get("keras")
    in_use = loaded.backend.backend() if loaded is not None else None
    backend = requested
    if backend is None:
        backend = in_use or os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend not in BACKENDS:
        known = ", ".join((*BACKENDS, *others))
        raise UsageError(f"the backend must be one of {known}, not {backend!r}")
    if in_use not in (None, backend):
        raise UsageError(
            f"Keras is already imported with the backend {in_use}; "
            f"use a new process for the backend {backend}"
        )
    if in_use is None:
        os.environ["KERAS_BACKEND"] = backend
        # TensorFlow's notes on the processor would be drawn over the progress bars.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return backend


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drops what is written to standard error meanwhile, by compiled code as well.

    TensorFlow writes some notes as it is imported that TF_CPP_MIN_LOG_LEVEL does not reach.
    Exceptions are raised as ever.
    """
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
