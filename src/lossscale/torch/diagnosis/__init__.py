"""Measures what float16 does to the gradients of a PyTorch model."""
