"""What this release of JAX has of what it does not document."""

from __future__ import annotations

import weakref

import jax

import undocumented


def test_tracers_have_what_is_assumed():
    [name] = undocumented.JAX["tracers"]
    seen = []

    def traced(x):
        seen.append(hasattr(x, name))
        return x

    jax.jit(traced)(1.0)
    assert seen == [True], f"{jax.__version__} has no {name}"


def test_functions_that_are_traced_are_told_apart():
    # As the shell of Keras makes what it asks: a zero of the function that is being traced.
    def trace():
        return getattr(jax.numpy.zeros(()) + 0, "_trace", None)

    seen = []

    def inner(x):
        seen.append(x._trace)
        return x

    def outer(x):
        seen.append(x._trace)
        jax.jit(inner)(x)
        return x

    jax.jit(outer)(1.0)
    assert trace() is None
    assert seen[0] is not seen[1]
    # The trace is remembered as long as it lives.
    assert weakref.ref(seen[0])() is seen[0]
