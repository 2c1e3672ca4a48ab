"""What JAX does not document and is used here: a list; the tests hold releases to it."""

from __future__ import annotations

OF_TRACERS = {"_trace": "which function is being traced, by the shell of Keras"}
