"""Compiling on JAX in less time what then runs slower."""

import contextlib
import functools
import os
from unittest import mock

# A program in one part, by the older emitters: XLA takes a quarter of the time.
_WANTED = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@functools.cache
def _options():
    """Those that this release of XLA has, each tried once."""
    import jax

    options = {}
    for name, value in _WANTED.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda x: x).lower(0.0).compile(compiler_options={name: value})
            options[name] = value
    return options


@contextlib.contextmanager
def compiling_quickly(backend=None):
    """JAX compiles so while this is open; on another backend than JAX nothing happens."""
    if (backend or os.environ["KERAS_BACKEND"]) != "jax":
        yield
        return
    import jax
    from jax._src import compiler

    usual = compiler.get_compile_options

    def options(*arguments, env_options_overrides=None, **named):
        # Not before something is compiled: a program may have to say first what devices there are.
        with mock.patch.object(compiler, "get_compile_options", usual):
            wanted = _options()
        overrides = {**wanted, **(env_options_overrides or {})}
        return usual(*arguments, env_options_overrides=overrides, **named)

    before = jax.config.values["jax_disable_most_optimizations"]
    # They are no settings of JAX, and XLA reads its flags only once.
    with mock.patch.object(compiler, "get_compile_options", options):
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)
