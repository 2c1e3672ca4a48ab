"""Explains the first two skipped steps of a run of Hugging Face's Trainer in float16."""

import tempfile

import torch
import transformers

import lossscale
from lossscale.torch import explain


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, labels=None):
        with torch.autocast(x.device.type, torch.float16):
            return {"loss": self.layer(x).float().mean()}


class Trainer(transformers.Trainer):
    kept = None

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        loss = super().compute_loss(model, inputs, return_outputs, **more)
        return optimizer.scale_loss(loss) if model.training and not return_outputs else loss

    def training_step(self, model, inputs, *args, **more):
        record = monitor.last_record  # of the step before
        if self.kept is not None and record.skipped and len(found) < 2:
            loss_fn = super().compute_loss
            found.append(explain(self.model, loss_fn, self.kept, scale=record.scale))
        self.kept = self._prepare_inputs(inputs)
        return super().training_step(model, inputs, *args, **more)


class Callback(transformers.TrainerCallback):
    def on_step_end(self, *args, **more):
        monitor.step()  # the Trainer does not pass the loss: reasons are "unknown"


model, found = Model(), []
inner = torch.optim.AdamW(model.parameters())
optimizer = lossscale.torch.LossScaleOptimizer(inner, initial_scale=2.0**40)
trainer = Trainer(
    model,
    transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=3,
        max_grad_norm=0.0,
        use_cpu=True,  # on a GPU: False
        report_to=[],
    ),
    train_dataset=[{"x": torch.ones(8)}] * 24,
    optimizers=(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)),
    callbacks=[Callback()],
)
with lossscale.torch.Monitor(optimizer, model) as monitor:
    trainer.train()
print(monitor.last_record.step, found[0].cause)  # 3 scale
