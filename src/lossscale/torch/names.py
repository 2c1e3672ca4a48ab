"""What `lossscale.torch` offers."""

from lossscale.torch.diagnosis.diagnose import diagnose
from lossscale.torch.grad_scaler.amp_names import install
from lossscale.torch.grad_scaler.scaler import GradScaler
from lossscale.torch.monitors.monitor import Monitor
from lossscale.torch.optimizer.guard import guard
from lossscale.torch.optimizer.optimizer import (
    TorchLossScaleOptimizer as LossScaleOptimizer,
)

__all__ = ["GradScaler", "LossScaleOptimizer", "Monitor", "diagnose", "guard", "install"]
