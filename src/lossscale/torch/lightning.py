"""The monitor as a callback of Lightning."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lossscale.torch.trainer_monitor import HostedMonitor

if TYPE_CHECKING:
    Callback: Any = object
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    # The same library under its former name, whose callbacks are others.
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class LightningMonitor(HostedMonitor, Callback):
    """Records what the loss scale does in a `lightning.pytorch.Trainer`.

    It does what `lossscale.torch.Monitor` does. The trainer needs a `lossscale.torch.GradScaler`,
    as `MixedPrecision("16-mixed", device, scaler=scaler)` takes it. Of several processes the first
    one writes the files.

    Args:
        settings: As of `lossscale.torch.Monitor`: `path`, `every`, `on_floor`,
            `max_consecutive_skips`, `append`.

    Raises:
        ArgumentError, ArgumentTypeError: As of `lossscale.torch.Monitor`. In
            `fit` ArgumentError if the trainer has no loss scale of this library,
            TrainingHaltedError if an alarm ends training.

    Examples:
        >>> lossscale.torch.LightningMonitor(every=100, max_consecutive_skips=20).last_record
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to watch."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        found = [scaler, *trainer.optimizers]
        self._begin(found, pl_module, trainer.global_step, trainer.is_global_zero)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes note of a step, if this batch ended one."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            # Lightning has divided it, for the sum of what is accumulated.
            loss = loss * trainer.accumulate_grad_batches
        self._took(trainer.global_step, loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Records the last step, and closes the files."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Records the last step, and closes the files."""
        self._end()
