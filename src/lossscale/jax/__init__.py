"""JAX without Keras: arrays here, and a room for the Optax transformation and the diagnosis."""
