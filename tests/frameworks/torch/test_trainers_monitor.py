"""The monitor in trainers of other libraries: on each step it records what the loop's one does."""

import sys

import pytest
import torch

import lossscale
from frameworks.torch.test_recipes import (
    BAD,
    OPTIMIZERS,
    Net,
    data,
    loader,
    module,
    trainer,
    use,
)
from histories import TrainingHistory
from lossscale.errors import ArgumentError, MissingPackageError, TrainingHaltedError
from lossscale.torch.grad_scaler import GradScaler


def check(path, *, reason):
    history = TrainingHistory.read(path)
    assert history.steps == [1, 2, 3, 4]
    assert history.scales == [8.0, 8.0, 4.0, 4.0]
    assert [record.skipped for record in history.records] == [False, True, False, False]
    bad = history.records[BAD]
    # A trainer that clips before the step makes NaN of infinities.
    counts = [(tensor.name, tensor.infs + tensor.nans) for tensor in bad.nonfinite]
    assert counts == [("net.weight", 2)]
    assert str(bad.reason) == reason
    assert history.records[-1].steps_skipped == 1
    return history


@pytest.mark.filterwarnings("ignore")
class TestLightning:
    @pytest.fixture(autouse=True)
    def _lightning(self):
        self.lightning = pytest.importorskip("lightning")

    def fit(self, folder, monitor, scaler=None, **arguments):
        scaler = scaler or GradScaler("cpu", init_scale=8.0)
        arguments = {"max_epochs": 1, **arguments}
        runner = trainer(self.lightning, scaler, folder, callbacks=[monitor], **arguments)
        runner.fit(module(self.lightning, "sgd", []), loader())

    def test_it_records_every_step(self, tmp_path):
        path = tmp_path / "run.jsonl"
        monitor = lossscale.torch.LightningMonitor(path)
        assert isinstance(monitor, self.lightning.pytorch.Callback)
        self.fit(tmp_path, monitor)
        # The loss of the second batch is infinite, as its gradients are.
        history = check(path, reason="loss")
        assert history.records[0].loss == 2.0
        assert monitor.last_record.step == 4

    def test_accumulated_batches_are_one_step(self, tmp_path):
        path = tmp_path / "run.jsonl"
        monitor = lossscale.torch.LightningMonitor(path)
        self.fit(tmp_path, monitor, accumulate_grad_batches=2)
        history = TrainingHistory.read(path)
        assert history.steps == [1, 2]
        assert [record.skipped for record in history.records] == [True, False]
        assert history.records[1].loss == 2.0

    def test_an_alarm_ends_training_and_the_file_is_there(self, tmp_path):
        path = tmp_path / "run.jsonl"
        monitor = lossscale.torch.LightningMonitor(path, max_consecutive_skips=1)
        with pytest.raises(TrainingHaltedError):
            self.fit(tmp_path, monitor)
        assert TrainingHistory.read(path).steps == [1, 2]

    def test_a_scaler_of_pytorch_is_named(self, tmp_path):
        with pytest.raises(ArgumentError, match=r"Received: a torch\.amp\.grad_scaler\.GradScaler"):
            self.fit(tmp_path, lossscale.torch.LightningMonitor(), torch.amp.GradScaler("cpu"))


@pytest.fixture
def hf_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x, labels=None):
            return {"loss": self.net(x)}

    def make(monitor):
        assert isinstance(monitor, transformers.TrainerCallback)
        model = Model()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            num_train_epochs=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
        )
        return transformers.Trainer(
            model,
            arguments,
            train_dataset=[{"x": batch} for batch in data()],
            optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)),
            callbacks=[monitor],
        )

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore")
def test_hf_trainer_records_every_step(hf_trainer, tmp_path):
    path = tmp_path / "run.jsonl"
    monitor = lossscale.torch.TransformersMonitor(path)
    runner = hf_trainer(monitor)
    use(runner.accelerator, GradScaler("cpu", init_scale=8.0))
    runner.train()
    check(path, reason="unknown")
    assert monitor.last_record.step == 4


@pytest.mark.filterwarnings("ignore")
def test_hf_trainer_without_a_loss_scale_is_named(hf_trainer):
    with pytest.raises(ArgumentError, match="no loss scale of lossscale to watch"):
        hf_trainer(lossscale.torch.TransformersMonitor()).train()


def test_without_the_library_there_is_a_sentence(monkeypatch):
    for name, package in (
        ("LightningMonitor", "lightning"),
        ("TransformersMonitor", "transformers"),
    ):
        monkeypatch.delitem(vars(lossscale.torch), name, raising=False)
        where = f"lossscale.torch.{package}"
        monkeypatch.delitem(sys.modules, where, raising=False)
        monkeypatch.delattr(lossscale.torch, package, raising=False)
        for loaded in [m for m in sys.modules if m.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingPackageError, match=f"needs {package}.*pip install {package}"):
            getattr(lossscale.torch, name)
