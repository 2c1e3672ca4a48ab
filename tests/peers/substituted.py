"""Runs pytest with a gradient scaler in the places of PyTorch's.

Usage: python substituted.py {torch,lossscale} ARGUMENTS_OF_PYTEST...
"""

import sys

import pytest

import lossscale.torch

if __name__ == "__main__":
    # Before the suite is imported, since what is imported from a module stays what it was.
    if sys.argv[1] == "lossscale":
        lossscale.torch.install()
    sys.exit(pytest.main(sys.argv[2:]))
