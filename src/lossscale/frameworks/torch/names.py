"""What `lossscale.torch` offers."""

from lossscale.frameworks.torch.amp_names import install
from lossscale.frameworks.torch.grad_scaler import GradScaler
from lossscale.frameworks.torch.guard import guard
from lossscale.frameworks.torch.optimizer import TorchLossScaleOptimizer as LossScaleOptimizer

__all__ = ["GradScaler", "LossScaleOptimizer", "guard", "install"]
