"""A float16 model in two processes of trainers, by the lines of docs/trainers.md.

`cases_of_processes.main` runs them, where the trainers are installed.
"""

import operator
import os
import warnings
from unittest import mock

import accelerate
import lightning
import transformers
from torch import distributed
from torch.utils.data import DataLoader

from frameworks.torch.cases_of_float16 import Run, named
from frameworks.torch.support import forget_accelerate

FIRST = operator.itemgetter(0)


class Module(lightning.LightningModule):
    def __init__(self, run):
        super().__init__()
        self.net, self.run = run.net, run

    def configure_optimizers(self):
        return self.run.by

    def backward(self, loss):
        self.optimizers().backward(loss)

    def training_step(self, x, index):
        return self.net(x)


def by_lightning(run, folder):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    where = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "default_root_dir": folder}
    # Its own sampler would shuffle.
    quiet = dict.fromkeys((*quiet, "use_distributed_sampler"), False)
    run_for = {"precision": "16-true", "accumulate_grad_batches": 2, "max_epochs": 1}
    trainer = lightning.Trainer(**quiet, **where, **run_for)
    mine = run.given()[distributed.get_rank() :: 2]
    trainer.fit(Module(run), DataLoader(mine, collate_fn=FIRST))


def by_accelerate(run, folder):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(run.given(), collate_fn=FIRST)
    model, optimizer, loader = accelerator.prepare(run.net, run.by, loader)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(run.by.scale_loss(model(x)))
            optimizer.step()
            optimizer.zero_grad()


def by_transformers(run, folder):
    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, *_, **more):
            return run.by.scale_loss(model(inputs["x"]))

        def training_step(self, *args, **more):
            loss = super().training_step(*args, **more)
            run.by.unscale_()
            return loss / run.by.loss_scale

    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    quiet |= {"dataloader_pin_memory": False, "remove_unused_columns": False}
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    sizes |= {"num_train_epochs": 1, "max_grad_norm": 0.1, "lr_scheduler_type": "constant"}
    sizes |= {"train_sampling_strategy": "sequential", "use_cpu": True}
    arguments = transformers.TrainingArguments(str(folder), **quiet, **sizes)
    more = {"data_collator": FIRST, "optimizers": (run.by, None)}
    Trainer(run.net, arguments, train_dataset=[{"x": x} for x in run.given()], **more).train()


def in_a_trainer(folder, train, row):
    forget_accelerate()
    own = {name: str(distributed.get_rank()) for name in ("RANK", "LOCAL_RANK")}
    own |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    run = Run(row)
    with mock.patch.dict(os.environ, own, TORCHELASTIC_RUN_ID="none"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(run, folder)
    return run.check()


CASES = (
    named("by_lightning", in_a_trainer, train=by_lightning, row="twice bad"),
    named("by_accelerate", in_a_trainer, train=by_accelerate, row="twice bad"),
    named("by_transformers", in_a_trainer, train=by_transformers, row="twice bad by_hand"),
)
