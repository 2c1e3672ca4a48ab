"""Loss scaling as an Optax transformation."""
