"""The wrapper where others drive it: Lightning, Fabric, Accelerate, Hugging Face's Trainer.

Each trains with a step that overflows and a schedule, is saved in the middle and goes on in a new
one, to the last bit as if it had never stopped; and as a plain loop does it.
"""

import pytest
import torch

import lossscale.torch
from frameworks.torch.support import snapshot
from frameworks.torch.trainers import hugging_face_trainer, lightning_trainer

STEPS, SAVED = 6, 3
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        )

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            return self.layers(x).float().square().mean()


def data():
    """Two make the gradients infinite at any scale, one of them the first after the file."""
    batches = torch.randn(STEPS, 2, 3, generator=torch.Generator().manual_seed(1))
    batches[1] = batches[SAVED] = torch.inf
    return batches


def made(net, clip=None):
    """A wrapper that also overflows by itself in the first step, and its schedule."""
    inner = torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer = lossscale.torch.LossScaleOptimizer(inner, True, 2.0**17, 2, clip_norm=clip)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer, lossscale.torch.guard(scheduler, optimizer)


def compared(net, optimizer, scheduler):
    """All by which runs can differ."""
    counts = [int(optimizer.iterations), int(optimizer.steps_skipped)]
    scale = [float(optimizer.loss_scale), int(optimizer.dynamic_counter)]
    return snapshot(net.parameters(), optimizer), scale, counts, scheduler.get_last_lr()


@pytest.fixture(scope="module", params=[None, 0.05], ids=["", "clipped"])
def plain(request):
    """What a plain loop ends with, and how it clips."""
    net = Net()
    optimizer, scheduler = made(net, request.param)
    for batch in data():
        optimizer.scale_loss(net(batch)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    result = compared(net, optimizer, scheduler)
    assert result[2][0] == STEPS
    assert 1 < result[2][1] < STEPS - 1
    return result, request.param


# Lightning


def module(lightning, clip, *, manual):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.automatic_optimization = not manual

        def configure_optimizers(self):
            self.made = made(self.net, clip)
            optimizer, scheduler = self.made
            each = {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": each}

        def loss(self):
            # A loader starts anew where training goes on in the middle of an epoch.
            return self.net(data()[self.trainer.global_step])

    class Automatic(Module):
        def training_step(self, batch, index):
            return self.loss()

        def backward(self, loss):
            self.optimizers().scale_loss(loss).backward()

    class Manual(Module):
        def on_train_start(self):
            # What `self.optimizers()` returns is a look-alike, whose `step` is the wrapper's.
            self.logged = []
            self.monitor = lossscale.torch.Monitor(self.optimizers(), self, log=self.logged.append)

        def training_step(self, batch, index):
            optimizer, loss = self.optimizers(), self.loss()
            self.manual_backward(optimizer.scale_loss(loss))
            optimizer.step()
            self.lr_schedulers().step()
            optimizer.zero_grad()
            self.monitor.step(loss)

        def on_train_end(self):
            self.monitor.close()

    return (Manual if manual else Automatic)()


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning(lightning, tmp_path, plain, manual):
    expected, clip = plain

    def runner(steps):
        return lightning_trainer(lightning, tmp_path, precision="32-true", max_steps=steps)

    loader = torch.utils.data.DataLoader(torch.zeros(STEPS))
    whole = module(lightning, clip, manual=manual)
    runner(STEPS).fit(whole, loader)
    assert compared(whole.net, *whole.made) == expected
    if manual:
        skipped = [record for record in whole.logged if record["skipped"]]
        reasons = [(record["step"], record["reason"]) for record in skipped]
        assert reasons == [(1, "overflow"), (2, "loss"), (4, "loss")]
        assert skipped[1]["nonfinite"][0]["name"] == "net.layers.0.weight"
    first = runner(SAVED)
    first.fit(module(lightning, clip, manual=manual), loader)
    first.save_checkpoint(path := tmp_path / "at_three.ckpt")
    resumed = module(lightning, clip, manual=manual)
    runner(STEPS).fit(resumed, loader, ckpt_path=path)
    assert compared(resumed.net, *resumed.made) == expected


def test_fabric(lightning, tmp_path, plain):
    expected, clip = plain

    def start():
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="32-true")
        net = Net()
        wrapper, scheduler = made(net, clip)
        model, optimizer = fabric.setup(net, wrapper)
        return fabric, net, model, wrapper, optimizer, scheduler

    def train(started, batches):
        fabric, _, model, wrapper, optimizer, scheduler = started
        for batch in batches:
            fabric.backward(wrapper.scale_loss(model(batch)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def state(started):
        _, _, model, _, optimizer, scheduler = started
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    first = start()
    train(first, data()[:SAVED])
    first[0].save(path := tmp_path / "fabric.ckpt", state(first))
    resumed = start()
    resumed[0].load(path, state(resumed))
    train(resumed, data()[SAVED:])
    assert compared(resumed[1], resumed[3], resumed[5]) == expected


# Accelerate


@pytest.fixture
def accelerate():
    return pytest.importorskip("accelerate")


def test_accelerate(accelerate, tmp_path, plain):
    expected, clip = plain

    def start():
        accelerator = accelerate.Accelerator(cpu=True)
        net = Net()
        wrapper, scheduler = made(net, clip)
        return accelerator, net, wrapper, *accelerator.prepare(net, wrapper, scheduler), scheduler

    def train(started, batches):
        accelerator, _, wrapper, model, optimizer, prepared, _ = started
        for batch in batches:
            accelerator.backward(wrapper.scale_loss(model(batch)))
            optimizer.step()
            prepared.step()
            optimizer.zero_grad()

    first = start()
    train(first, data()[:SAVED])
    first[0].save_state(str(tmp_path))
    resumed = start()
    resumed[0].load_state(str(tmp_path))
    train(resumed, data()[SAVED:])
    assert compared(resumed[1], resumed[2], resumed[-1]) == expected


def test_accelerate_is_told_of_a_step_that_is_skipped(accelerate):
    accelerator = accelerate.Accelerator(cpu=True)
    net = torch.nn.Linear(2, 1)
    wrapper = lossscale.torch.LossScaleOptimizer(torch.optim.SGD(net.parameters(), lr=0.5))
    net, optimizer = accelerator.prepare(net, wrapper)
    lossscale.torch.report_skips_to_accelerate(optimizer)
    with pytest.raises(TypeError, match=r"accelerator\.prepare\(\) returned"):
        lossscale.torch.report_skips_to_accelerate(wrapper)
    plain = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.5))
    for factor, skipped in ((1.0, False), (torch.inf, True), (1.0, False)):
        optimizer.zero_grad()
        accelerator.backward(wrapper.scale_loss((net(torch.ones(1, 2)) * factor).sum()))
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped is optimizer.step_was_skipped is skipped
        assert not plain.step_was_skipped


def test_accelerate_accumulates(accelerate):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, alone = Net(), Net()
    wrapper, _ = made(net)
    plain, _ = made(alone)
    model, optimizer = accelerator.prepare(net, wrapper)
    batches = data()
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model):
            accelerator.backward(wrapper.scale_loss(model(batch)))
            optimizer.step()
            optimizer.zero_grad()
        (plain.scale_loss(alone(batch)) / 2).backward()
        if number % 2:
            plain.step()
            plain.zero_grad()
    assert snapshot(net.parameters(), wrapper) == snapshot(alone.parameters(), plain)
    assert wrapper.iterations == 3


# Hugging Face's Trainer


def test_transformers(tmp_path, plain):
    expected, clip = plain

    saves = {"save_strategy": "steps", "save_steps": SAVED}

    def start(steps, folder):
        net = Net()
        optimizer, scheduler = run = made(net, clip)
        trainer = hugging_face_trainer(
            net, run, data(), folder, max_steps=steps, max_grad_norm=0.0, **saves
        )
        backward = trainer.accelerator.backward

        def scaled_backward(loss, **more):
            backward(optimizer.scale_loss(loss), **more)

        trainer.accelerator.backward = scaled_backward
        return trainer, net, optimizer, scheduler

    whole, *run = start(STEPS, tmp_path)
    whole.train()
    assert compared(*run) == expected
    resumed, *run = start(STEPS, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    assert compared(*run) == expected
