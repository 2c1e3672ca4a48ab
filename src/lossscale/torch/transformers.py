"""The monitor as a callback of Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lossscale.torch.trainer_monitor import HostedMonitor

if TYPE_CHECKING:
    TrainerCallback: Any = object
else:
    from transformers import TrainerCallback


class TransformersMonitor(HostedMonitor, TrainerCallback):
    """Records what the loss scale does in a `transformers.Trainer`.

    It does what `lossscale.torch.Monitor` does. The trainer needs a `lossscale.torch.GradScaler`:
    `trainer.accelerator.scaler = scaler` before `train()`. The trainer does not tell its callbacks
    the loss of a step, so the reason of a skipped one is unknown. Of several processes the first
    one writes the files.

    Args:
        settings: As of `lossscale.torch.Monitor`: `path`, `every`, `on_floor`,
            `max_consecutive_skips`, `append`.

    Raises:
        ArgumentError, ArgumentTypeError: As of `lossscale.torch.Monitor`. In
            `train` ArgumentError if the trainer has no loss scale of this library,
            TrainingHaltedError if an alarm ends training.

    Examples:
        >>> lossscale.torch.TransformersMonitor(every=100, max_consecutive_skips=20).last_record
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to watch."""
        optimizer = kwargs.get("optimizer")
        found = [
            getattr(optimizer, "scaler", None),
            optimizer,
            # Accelerate has put its own around it.
            getattr(optimizer, "optimizer", None),
        ]
        self._begin(found, kwargs["model"], state.global_step, state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes note of a step."""
        # It is counted only after this call in some releases, and before it in others.
        self._took(self._steps + 1, None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the last step, and closes the files."""
        self._end()
