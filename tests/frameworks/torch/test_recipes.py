"""The drop-in and its monitor where others drive them: Lightning and Accelerate.

Each is driven with a step that overflows, and the same with PyTorch's scaler where it is right. The
calls of other trainers are in test_beside_torch.py, and their recipes in test_documents.py.
"""

import contextlib
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import lossscale
from frameworks.torch.scaling import MAKERS, OPTIMIZERS, scale_and_tracker
from frameworks.torch.trainers import lightning_trainer
from lossscale.monitoring import read_records
from lossscale.torch.grad_scaler import GradScaler
from records import column

BAD = 1
"""The number of the step that overflows."""

TRACE = [(8.0, 1), (4.0, 0), (4.0, 1), (4.0, 2)]


def data():
    """Four batches; the second one makes the gradients infinite."""
    batches = torch.ones(4, 2)
    batches[BAD] = torch.inf
    return batches


class Net(torch.nn.Module):
    """A weight whose gradient is the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return (self.weight * x).sum()


def monitored(scaler, model, path):
    """A monitor of the drop-in, or what does nothing beside PyTorch's scaler."""
    if isinstance(scaler, GradScaler):
        return lossscale.torch.Monitor(scaler, model, path)
    return contextlib.nullcontext()


def check(path):
    assert column(path, "step") == [1, 2, 3, 4]
    assert column(path, "scale") == [8.0, 8.0, 4.0, 4.0]
    assert column(path, "steps_skipped") == [0, 1, 1, 1]
    bad = read_records(path)[BAD]
    # A trainer that clips before the step makes NaN of infinities.
    counts = [(tensor.name, tensor.infs + tensor.nans) for tensor in bad.nonfinite]
    assert (counts, str(bad.reason)) == ([("net.weight", 2)], "loss")


# Lightning


def trainer(lightning, scaler, folder, **arguments):
    plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    return lightning_trainer(lightning, folder, plugins=[plugin], **arguments)


def module(lightning, name, trace):
    class Module(lightning.LightningModule):
        monitor = None

        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            return self.net(batch[0])

        def configure_optimizers(self):
            return OPTIMIZERS[name](self.parameters())

        def on_train_batch_end(self, outputs, *_):
            trace.append(scale_and_tracker(self.trainer.precision_plugin.scaler))
            if self.monitor is not None:
                self.monitor.step(outputs["loss"])

    return Module()


def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data()), batch_size=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(
    ("name", "clip"), [("sgd", None), ("sgd", 0.1), ("adamw-fused", None), ("adamw-foreach", 0.1)]
)
def test_lightning_trains(lightning, tmp_path, make, name, clip):
    trace, path = [], tmp_path / "run.jsonl"
    scaler = make("cpu", init_scale=8.0)
    runner = trainer(lightning, scaler, tmp_path, max_epochs=1, gradient_clip_val=clip)
    model = module(lightning, name, trace)
    with monitored(scaler, model, path) as model.monitor:
        runner.fit(model, loader())
    assert trace == TRACE
    assert bool(model.net.weight.isfinite().all())
    assert not torch.equal(model.net.weight.detach(), torch.ones(2))
    if make is GradScaler:
        # The loss of the second batch is infinite, as its gradients are.
        check(path)
        assert column(path, "loss")[0] == 2.0


# Accelerate


@pytest.fixture
def accelerator():
    return pytest.importorskip("accelerate").Accelerator(cpu=True)


def use(accelerator, scaler):
    # Accelerate makes no scaler of its own on the CPU.
    accelerator.scaler, accelerator.native_amp = scaler, True


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", ["adam", "adam-fused"])
def test_d8_accelerates_schedule_follows_the_applied_steps(accelerator, make, name):
    use(accelerator, make("cpu", init_scale=8.0))
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    skipped, rates, trace = [], [], []
    for batch in data()[:3]:
        accelerator.backward(net(batch))
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
        trace.append(scale_and_tracker(accelerator.scaler))
    assert trace == TRACE[:3]
    if name == "adam":
        assert skipped == [False, True, False]
        assert rates == [0.05, 0.05, 0.025]
    else:
        # A scaler calls a fused optimizer for a step that it skips.
        assert skipped == [False, False, False]
        assert rates == [0.05, 0.025, 0.0125]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_accelerate_4289_a_step_that_only_makes_state(accelerator, make):
    """torch.distributed.checkpoint makes the state of an optimizer by a step, here a scaled one."""
    scaler = make("cpu", init_scale=8.0)
    use(accelerator, scaler)
    net = Net()
    net, optimizer = accelerator.prepare(net, OPTIMIZERS["adam"](net.parameters()))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0, "_growth_tracker": 7})
    # As Accelerate does it, before it loads the optimizer of a sharded model.
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_optimizer_state_dict(net, optimizer)
    assert optimizer.optimizer.state
    assert scale_and_tracker(scaler) == (4.0, 7 if make is GradScaler else 8)
    assert net.weight.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:The loss of step 2 is inf")
def test_what_accelerate_prepares_is_watched(accelerator, tmp_path):
    path, model = tmp_path / "run.jsonl", Net()
    inner = OPTIMIZERS["sgd"](model.parameters())
    wrapper = lossscale.torch.LossScaleOptimizer(inner, initial_scale=8.0)
    prepared, optimizer = accelerator.prepare(model, wrapper)
    with lossscale.torch.Monitor(optimizer, prepared, path) as monitor:
        for batch in data():
            optimizer.zero_grad()
            loss = prepared(batch)
            wrapper.scale_loss(loss).backward()
            optimizer.step()
            monitor.step(loss)
    assert column(path, "scale") == [8.0, 8.0, 4.0, 4.0]
    assert [str(tensor) for tensor in read_records(path)[BAD].nonfinite] == ["weight (2 inf)"]
