"""What `lossscale.torch` offers."""

from lossscale.frameworks.torch.diagnosis.diagnose import diagnose
from lossscale.frameworks.torch.grad_scaler.amp_names import install
from lossscale.frameworks.torch.grad_scaler.scaler import GradScaler
from lossscale.frameworks.torch.monitors.monitor import Monitor
from lossscale.frameworks.torch.optimizer.guard import guard
from lossscale.frameworks.torch.optimizer.optimizer import (
    TorchLossScaleOptimizer as LossScaleOptimizer,
)

__all__ = ["GradScaler", "LossScaleOptimizer", "Monitor", "diagnose", "guard", "install"]
