"""Monitors of training loops in PyTorch."""
