"""Measures what float16 does to the gradients of a loss in JAX."""
