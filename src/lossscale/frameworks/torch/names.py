"""What `lossscale.torch` offers."""

from lossscale.frameworks.torch.guard import guard
from lossscale.frameworks.torch.optimizer import TorchLossScaleOptimizer as LossScaleOptimizer

__all__ = ["LossScaleOptimizer", "guard"]
