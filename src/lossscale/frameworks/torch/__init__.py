"""PyTorch without Keras: arrays here, and a room for each thing that trains or watches."""
