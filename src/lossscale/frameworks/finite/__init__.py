"""Whether gradients are finite, reading each of them once: one module for each framework."""
