"""The drop-in and its monitor where others drive them: Lightning, Fabric, Accelerate, HF's Trainer.

Each is driven with a step that overflows, and the same with PyTorch's scaler where it is right.
"""

import contextlib
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import lossscale
from frameworks.torch.scaling import MAKERS, OPTIMIZERS, scale_and_tracker
from frameworks.torch.trainers import hugging_face_trainer, lightning_trainer
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


def check(path, reason):
    assert column(path, "step") == [1, 2, 3, 4]
    assert column(path, "scale") == [8.0, 8.0, 4.0, 4.0]
    assert column(path, "steps_skipped") == [0, 1, 1, 1]
    bad = read_records(path)[BAD]
    # A trainer that clips before the step makes NaN of infinities.
    counts = [(tensor.name, tensor.infs + tensor.nans) for tensor in bad.nonfinite]
    assert (counts, str(bad.reason)) == ([("net.weight", 2)], reason)


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
        check(path, "loss")
        assert column(path, "loss")[0] == 2.0


@pytest.mark.filterwarnings("ignore")
def test_accumulated_batches_are_one_step_of_a_monitor(lightning, tmp_path):
    scaler, path = GradScaler("cpu", init_scale=8.0), tmp_path / "run.jsonl"
    runner = trainer(lightning, scaler, tmp_path, max_epochs=1, accumulate_grad_batches=2)
    model = module(lightning, "sgd", [])
    with monitored(scaler, model, path) as model.monitor:
        runner.fit(model, loader())
    assert column(path, "step") == [1, 2]
    assert column(path, "skipped") == [True, False]


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes(lightning, tmp_path):
    trace = []
    first = trainer(lightning, GradScaler("cpu", init_scale=8.0), tmp_path, max_steps=3)
    model = module(lightning, "adamw-foreach", trace)
    first.fit(model, loader())
    first.save_checkpoint(path := tmp_path / "at_three.ckpt")
    saved = torch.load(path, weights_only=True)["MixedPrecision"]
    assert saved["scale"] == 4
    assert saved["steps_skipped"] == 1
    scaler = GradScaler("cpu")
    second = trainer(lightning, scaler, tmp_path, max_steps=4)
    second.fit(module(lightning, "adamw-foreach", trace), loader(), ckpt_path=path)
    assert trace == TRACE
    assert scaler.steps_skipped == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clip", [False, True])
def test_fabric(lightning, clip):
    precision = lightning.fabric.plugins.MixedPrecision
    scaler = GradScaler("cpu", init_scale=8.0)
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, plugins=[precision("16-mixed", "cpu", scaler=scaler)]
    )
    net = Net()
    model, optimizer = fabric.setup(net, OPTIMIZERS["sgd"](net.parameters()))
    trace = []
    for batch in data():
        optimizer.zero_grad()
        fabric.backward(model(batch))
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        trace.append(scale_and_tracker(scaler))
    assert trace == TRACE
    norm = 2**0.5 if clip else 1
    assert net.weight.tolist() == pytest.approx([1 - 3 * 0.5 / norm] * 2, abs=1e-3)


# Accelerate


@pytest.fixture
def accelerator():
    return pytest.importorskip("accelerate").Accelerator(cpu=True)


def use(accelerator, scaler):
    # Accelerate makes no scaler of its own on the processor.
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


def test_accelerate_accumulates_saves_and_loads(accelerator, tmp_path):
    accelerator.gradient_accumulation_steps = 2
    scaler = GradScaler("cpu", init_scale=8.0)
    use(accelerator, scaler)
    net = Net()
    net, optimizer = accelerator.prepare(net, OPTIMIZERS["adamw-foreach"](net.parameters()))
    trace = []
    for batch in torch.cat([data(), data()[:2]]):
        with accelerator.accumulate(net):
            accelerator.backward(net(batch))
            optimizer.step()
            optimizer.zero_grad()
        trace.append(scale_and_tracker(scaler))
    assert trace == [(8.0, 0), (4.0, 0), (4.0, 0), (4.0, 1), (4.0, 1), (2.0, 0)]
    accelerator.save_state(str(tmp_path))
    saved = scaler.state_dict()
    scaler.load_state_dict({"scale": 1024.0, "_growth_tracker": 7, "steps_skipped": 0})
    accelerator.load_state(str(tmp_path))
    assert scaler.state_dict() == saved
    assert saved["steps_skipped"] == 2


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


# HF's Trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", ["adamw-foreach", "adamw-fused"])
def test_hf_trainer(make, name, tmp_path):
    transformers = pytest.importorskip("transformers")
    rates, trace, path = [], [], tmp_path / "run.jsonl"

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, arguments, state, control, lr_scheduler, **_):
            rates.append(lr_scheduler.get_last_lr()[0])
            trace.append(scale_and_tracker(scaler))
            if monitor is not None:
                monitor.step()

    net, scaler = Net(), make("cpu", init_scale=8.0)
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    runner = hugging_face_trainer(
        net, (optimizer, scheduler), data(), tmp_path, [Watch()], num_train_epochs=1
    )
    use(runner.accelerator, scaler)
    with monitored(scaler, runner.model, path) as monitor:
        runner.train()
    assert trace == TRACE
    assert bool(net.weight.isfinite().all())
    if name == "adamw-foreach":
        assert rates == [0.05, 0.05, 0.025, 0.0125]
    if make is GradScaler:
        check(path, "unknown")
