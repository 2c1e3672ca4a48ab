"""PyTorch without Keras: arrays, what a monitor notes."""
