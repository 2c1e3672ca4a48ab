"""The monitor of a training loop in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from lossscale.callbacks import checked_settings
from lossscale.checks import checked_count
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.frameworks.common.loop_monitor import LoopMonitor
from lossscale.frameworks.common.notes import DecidedStep, Noted, Skip
from lossscale.frameworks.common.watching import Status, Watch
from lossscale.frameworks.torch.grad_scaler import GradScaler
from lossscale.frameworks.torch.notes import Notes
