"""The optimizer around one of `torch.optim`."""
