"""What `lossscale.torch` offers."""

from lossscale.frameworks.torch.amp_names import install
from lossscale.frameworks.torch.diagnose import diagnose
from lossscale.frameworks.torch.grad_scaler import GradScaler
from lossscale.frameworks.torch.guard import guard
from lossscale.frameworks.torch.monitor import Monitor
from lossscale.frameworks.torch.optimizer import TorchLossScaleOptimizer as LossScaleOptimizer

__all__ = ["GradScaler", "LossScaleOptimizer", "Monitor", "diagnose", "guard", "install"]
