"""JAX arrays without Keras, for the Optax transformation, the Keras backend and the diagnosis."""
