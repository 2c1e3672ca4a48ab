"""What this release of JAX has of what it does not document."""

import weakref

import jax


def test_functions_that_are_traced_are_told_apart():
    seen = []

    # As the wrapper of Keras makes what it asks: a zero of the function that is being traced.
    def trace():
        return getattr(jax.numpy.zeros(()) + 0, "_trace", None)

    def inner(x):
        seen.append(getattr(x, "_trace", None))
        return x

    def outer(x):
        seen.append(getattr(x, "_trace", None))
        jax.jit(inner)(x)
        return x

    jax.jit(outer)(1.0)
    assert None not in seen, f"{jax.__version__} has no Tracer._trace"
    assert trace() is None
    assert seen[0] is not seen[1]
    # The trace is remembered as long as it lives.
    assert weakref.ref(seen[0])() is seen[0]
