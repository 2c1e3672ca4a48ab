"""How programs are compiled for tests."""

import contextlib
import os


@contextlib.contextmanager
def compiled_quickly():
    """Within it JAX compiles in less time what then runs slower.

    Not for tests that promise bits: a user's program is optimized, and may round otherwise.
    """
    if os.environ["KERAS_BACKEND"] != "jax":
        yield
        return
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
