"""The drop-in for PyTorch's gradient scaler."""
