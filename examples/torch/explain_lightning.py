"""Explains the first two skipped steps of a run of Lightning in float16."""

import lightning
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision

from lossscale.torch import GradScaler, Monitor, explain

found = []


def loss_fn(module, batch):
    return module.training_step(batch, 0)["loss"]


def on_train_batch_end(trainer, module, outputs, batch, i):
    record = monitor.step(outputs["loss"])
    if record is not None and record.skipped and len(found) < 2:
        found.append(explain(module, loss_fn, batch, scale=record.scale))


module, scaler = BoringModel(), GradScaler("cpu", init_scale=2.0**40)
trainer = lightning.Trainer(
    max_steps=3,
    accelerator="cpu",
    plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    callbacks=[LambdaCallback(on_train_batch_end=on_train_batch_end)],
    logger=False,
    enable_checkpointing=False,
)
with Monitor(scaler, module) as monitor:  # a path as third argument writes a file
    trainer.fit(module)
print(monitor.last_record.step, found[0].cause)  # 3 scale
