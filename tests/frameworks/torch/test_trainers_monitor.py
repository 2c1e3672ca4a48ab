"""A monitor in trainers of other libraries."""

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
from frameworks.torch.trainers import hugging_face_trainer, lightning_trainer
from lossscale.errors import TrainingHaltedError
from lossscale.monitoring import read_records
from lossscale.torch.grad_scaler import GradScaler
from records import column

pytestmark = pytest.mark.filterwarnings("ignore")


def check(path, *, reason):
    assert column(path, "step") == [1, 2, 3, 4]
    assert column(path, "scale") == [8.0, 8.0, 4.0, 4.0]
    assert column(path, "skipped") == [False, True, False, False]
    assert column(path, "steps_skipped") == [0, 1, 1, 1]
    bad = read_records(path)[BAD]
    # A trainer that clips before the step makes NaN of infinities.
    counts = [(tensor.name, tensor.infs + tensor.nans) for tensor in bad.nonfinite]
    assert counts == [("net.weight", 2)]
    assert str(bad.reason) == reason


# --- Lightning ------------------------------------------------------------------------------------


@pytest.fixture
def fit(tmp_path):
    lightning = pytest.importorskip("lightning")

    def fit(settings, **arguments):
        model, scaler = module(lightning, "sgd", []), GradScaler("cpu", init_scale=8.0)
        monitor = lossscale.torch.Monitor(scaler, model, **settings)
        record = lightning.pytorch.callbacks.LambdaCallback(
            on_train_batch_end=lambda trainer, module, outputs, *_: monitor.step(outputs["loss"])
        )
        arguments = {"max_epochs": 1, **arguments}
        with monitor:
            trainer(lightning, scaler, tmp_path, callbacks=[record], **arguments).fit(
                model, loader()
            )

    return fit


def test_lightning_records_every_step(fit, tmp_path):
    path = tmp_path / "run.jsonl"
    fit({"path": path})
    # The loss of the second batch is infinite, as its gradients are.
    check(path, reason="loss")
    assert column(path, "loss")[0] == 2.0


def test_accumulated_batches_are_one_step(fit, tmp_path):
    path = tmp_path / "run.jsonl"
    fit({"path": path}, accumulate_grad_batches=2)
    assert column(path, "step") == [1, 2]
    assert column(path, "skipped") == [True, False]


def test_an_alarm_ends_training_and_the_file_is_there(fit, tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(TrainingHaltedError):
        fit({"path": path, "max_consecutive_skips": 1})
    assert column(path, "step") == [1, 2]


def test_the_optimizers_of_lightnings_module_are_watched(tmp_path):
    """`self.optimizers()` returns a look-alike of the wrapper, whose `step` is the wrapper's."""
    lightning = pytest.importorskip("lightning")
    path = tmp_path / "run.jsonl"

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = Net(), False

        def on_train_start(self):
            self.monitor = lossscale.torch.Monitor(self.optimizers(), self, path)

        def training_step(self, batch, index):
            optimizer, loss = self.optimizers(), self.net(batch[0])
            optimizer.zero_grad()
            self.manual_backward(optimizer.scale_loss(loss))
            optimizer.step()
            self.monitor.step(loss)

        def on_train_end(self):
            self.monitor.close()

        def configure_optimizers(self):
            inner = OPTIMIZERS["sgd"](self.parameters())
            return lossscale.torch.LossScaleOptimizer(inner, initial_scale=8.0)

    lightning_trainer(lightning, tmp_path, max_epochs=1).fit(Module(), loader())
    check(path, reason="loss")


# --- Accelerate and Hugging Face's Trainer --------------------------------------------------------


def test_what_accelerate_prepares_is_watched(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    path, model = tmp_path / "run.jsonl", Net()
    wrapper = lossscale.torch.LossScaleOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), initial_scale=8.0
    )
    prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(model, wrapper)
    with lossscale.torch.Monitor(optimizer, prepared, path) as monitor:
        for batch in data():
            optimizer.zero_grad()
            loss = prepared(batch)
            wrapper.scale_loss(loss).backward()
            optimizer.step()
            monitor.step(loss)
    assert column(path, "scale") == [8.0, 8.0, 4.0, 4.0]
    assert [str(tensor) for tensor in read_records(path)[BAD].nonfinite] == ["weight (2 inf)"]


def test_hf_trainer_records_every_step(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Record(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            monitor.step()

    path, net, scaler = tmp_path / "run.jsonl", Net(), GradScaler("cpu", init_scale=8.0)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    runner = hugging_face_trainer(
        net,
        (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)),
        data(),
        tmp_path,
        callbacks=[Record()],
        num_train_epochs=1,
        save_strategy="no",
    )
    use(runner.accelerator, scaler)
    with lossscale.torch.Monitor(scaler, runner.model, path) as monitor:
        runner.train()
    check(path, reason="unknown")
    assert monitor.last_record.step == 4
