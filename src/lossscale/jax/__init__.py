"""JAX without Keras: arrays here, and what serves the Optax transformation and the diagnosis."""
