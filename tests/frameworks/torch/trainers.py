"""Trainers of other libraries, on the CPU and quiet."""

import pytest
import torch


def lightning_trainer(lightning, folder, **arguments):
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )


class _Model(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels=None):
        return {"loss": self.net(x)}


def hugging_face_trainer(net, optimizers, batches, folder, callbacks=(), **arguments):
    """Hugging Face's Trainer, which takes a step on each of the batches in turn."""
    transformers = pytest.importorskip("transformers")
    given = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        **{"save_strategy": "no", **arguments},
    )
    return transformers.Trainer(
        _Model(net),
        given,
        data_collator=lambda samples: samples[0],
        train_dataset=[{"x": batch} for batch in batches],
        optimizers=optimizers,
        callbacks=list(callbacks),
    )
