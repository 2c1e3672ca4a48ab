"""Where others drive: Lightning, Fabric, Accelerate, Hugging Face's Trainer, pages' recipes.

The wrapper trains with a step that overflows and a schedule, is saved in the middle and goes on in
a new one, to the last bit as if it had never stopped; and as a plain loop does it. The drop-in
takes the way of PyTorch's scaler where that is right. The recipes of docs/trainers.md compute in
float16, and clip and log unscaled gradients.
"""

import copy
import functools
import inspect
import re

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import lossscale.torch
from frameworks.torch.support import DEVICE, OPTIMIZERS, run_page, snapshot
from pages import programs
from records import column, nonfinite

ON_THE_CPU = DEVICE == "cpu"
ACCELERATOR = "cpu" if ON_THE_CPU else "gpu"
STEPS, SAVED = 6, 3
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(torch.nn.Module):
    """A network under autocast, or of float16 parameters."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        ).to(dtype)
        self.dtype = dtype

    def forward(self, x):
        with torch.autocast(x.device.type, torch.float16, self.dtype == torch.float32):
            return self.layers(x.to(self.dtype)).float().square().mean()


def data():
    """Two make the gradients infinite at any scale, one of them the first after the file."""
    generator = torch.Generator().manual_seed(1)
    # Lightning's "16-true" changes the default dtype within a step.
    batches = torch.randn(STEPS, 2, 3, generator=generator, dtype=torch.float32)
    batches[1] = batches[SAVED] = torch.inf
    return batches.to(DEVICE)


def made(net, clip=None):
    """A wrapper that also overflows by itself in the first step, and its schedule."""
    inner = torch.optim.AdamW(net.parameters(), lr=0.1)
    if net.dtype == torch.float16:
        inner = lossscale.torch.MasterWeights(inner)
    optimizer = lossscale.torch.LossScaleOptimizer(inner, True, 2.0**17, 2, clip_norm=clip)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer, lossscale.torch.guard(scheduler, optimizer)


def compared(net, optimizer, scheduler):
    """All by which runs can differ."""
    counts = [int(optimizer.iterations), int(optimizer.steps_skipped)]
    scale = [float(optimizer.loss_scale), int(optimizer.dynamic_counter)]
    return snapshot(net.parameters(), optimizer), scale, counts, scheduler.get_last_lr()


@pytest.fixture(
    scope="module",
    params=[(None, torch.float32), (0.05, torch.float32), (None, torch.float16)],
    ids=["", "clipped", "float16 model"],
)
def plain(request):
    """What a plain loop ends with, how it clips, and the dtype of the parameters."""
    clip, dtype = request.param
    net = Net(dtype).to(DEVICE)
    optimizer, scheduler = made(net, clip)
    for batch in data():
        optimizer.scale_loss(net(batch)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    result = compared(net, optimizer, scheduler)
    assert result[2][0] == STEPS
    assert 1 < result[2][1] < STEPS - 1
    return result, clip, dtype


def test_a_protocol_finds_the_attributes_of_an_optimizer():
    """Lightning accepts what has them; since Python 3.12 it does not ask `__getattr__`."""
    inner = torch.optim.AdamW(Net().parameters())
    wrapper = lossscale.torch.LossScaleOptimizer(inner)
    for name in (name for name in vars(inner) if not name.startswith("_")):
        inspect.getattr_static(wrapper, name)
        assert getattr(wrapper, name) is getattr(inner, name)
        setattr(wrapper, name, new := copy.copy(getattr(inner, name)))
        assert getattr(inner, name) is new


# Lightning


def module(lightning, clip, dtype, *, manual):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization, self.logged = Net(dtype), not manual, []

        def configure_optimizers(self):
            self.made = optimizer, scheduler = made(self.net, clip)
            each = {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": each}

        def on_train_start(self):
            # What `self.optimizers()` returns is a look-alike, whose `step` is the wrapper's.
            self.monitor = lossscale.torch.Monitor(self.optimizers(), self, log=self.logged.append)

        def backward(self, loss):
            (loss if manual else self.optimizers().scale_loss(loss)).backward()

        def training_step(self, batch, index):
            # A loader starts anew where training goes on in the middle of an epoch.
            optimizer, loss = self.optimizers(), self.net(data()[self.trainer.global_step])
            if manual:
                self.manual_backward(optimizer.scale_loss(loss))
                optimizer.step()
                self.lr_schedulers().step()
                optimizer.zero_grad()
                self.monitor.step(loss)
            return loss

        def on_train_end(self):
            self.monitor.close()

    return Module()


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning(lightning, tmp_path, plain, manual):
    expected, clip, dtype = plain

    def runner(steps):
        names = "logger", "enable_progress_bar", "enable_model_summary"
        quiet = dict.fromkeys(names, False)
        where = {"accelerator": ACCELERATOR, "devices": 1, "default_root_dir": tmp_path}
        precision = "32-true" if dtype == torch.float32 else "16-true"
        return lightning.Trainer(**quiet, **where, precision=precision, max_steps=steps)

    loader = torch.utils.data.DataLoader(torch.zeros(STEPS))
    whole = module(lightning, clip, dtype, manual=manual)
    runner(STEPS).fit(whole, loader)
    assert compared(whole.net, *whole.made) == expected
    if manual:
        skipped = [record for record in whole.logged if record["skipped"]]
        reasons = [(record["step"], record["reason"]) for record in skipped]
        assert reasons == [(1, "overflow"), (2, "loss"), (4, "loss")]
        assert skipped[1]["nonfinite"][0]["name"] == "net.layers.0.weight"
    first = runner(SAVED)
    first.fit(module(lightning, clip, dtype, manual=manual), loader)
    first.save_checkpoint(path := tmp_path / "at_three.ckpt")
    resumed = module(lightning, clip, dtype, manual=manual)
    runner(STEPS).fit(resumed, loader, ckpt_path=path)
    assert compared(resumed.net, *resumed.made) == expected


# Fabric and Accelerate: what prepares a model, its optimizer and its schedule, saves and loads.


def by_fabric(net, wrapper, scheduler):
    lightning = pytest.importorskip("lightning")
    fabric = lightning.Fabric(accelerator=ACCELERATOR, devices=1, precision="32-true")
    model, optimizer = fabric.setup(net, wrapper)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    save, load = (functools.partial(call, state=state) for call in (fabric.save, fabric.load))
    return fabric, model, optimizer, scheduler, save, load


def new_accelerator():
    return pytest.importorskip("accelerate").Accelerator(cpu=ON_THE_CPU)


def by_accelerate(net, wrapper, scheduler):
    accelerator = new_accelerator()
    prepared = accelerator.prepare(net, wrapper, scheduler)
    return accelerator, *prepared, accelerator.save_state, accelerator.load_state


@pytest.mark.parametrize("prepare", [by_fabric, by_accelerate])
def test_fabric_and_accelerate(prepare, tmp_path, plain):
    expected, clip, dtype = plain
    path = str(tmp_path / "saved")
    for batches in (data()[:SAVED], data()[SAVED:]):
        net = Net(dtype)
        run = made(net, clip)
        by, model, optimizer, scheduler, save, load = prepare(net, *run)
        if len(list(tmp_path.iterdir())):
            load(path)
        for batch in batches:
            by.backward(run[0].scale_loss(model(batch)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        save(path)
    assert compared(net, *run) == expected


# Hugging Face's Trainer


class WithLabels(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels=None):
        return {"loss": self.net(x)}


def test_transformers(tmp_path, plain):
    expected, clip, dtype = plain
    transformers = pytest.importorskip("transformers")

    def start(folder):
        net = Net(dtype)
        optimizer, scheduler = made(net, clip)

        class Trainer(transformers.Trainer):
            def compute_loss(self, *args, **more):
                return optimizer.scale_loss(super().compute_loss(*args, **more))

        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            max_grad_norm=0.0,
            per_device_train_batch_size=1,
            use_cpu=ON_THE_CPU,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
            save_strategy="steps",
            save_steps=SAVED,
        )
        trainer = Trainer(
            WithLabels(net),
            arguments,
            data_collator=lambda samples: samples[0],
            train_dataset=[{"x": batch} for batch in data()],
            optimizers=(optimizer, scheduler),
        )
        return trainer, net, optimizer, scheduler

    whole, *run = start(tmp_path)
    whole.train()
    assert compared(*run) == expected
    resumed, *run = start(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    assert compared(*run) == expected


# The drop-in.


class Weight(torch.nn.Module):
    """A weight whose gradient is the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return (self.weight * x).sum()


def test_what_accelerate_prepares_is_watched_and_it_is_told_of_a_skipped_step(tmp_path):
    accelerator, path, model = new_accelerator(), tmp_path / "run.jsonl", Weight()
    inner = OPTIMIZERS["sgd"](model.parameters())
    wrapper = lossscale.torch.LossScaleOptimizer(inner, initial_scale=8.0)
    prepared, optimizer = accelerator.prepare(model, wrapper)
    # As trainers.md has it.
    wrapper.register_step_skipped_hook(lambda *_: setattr(optimizer, "_is_overflow", True))
    wrapper.register_step_post_hook(lambda *_: setattr(optimizer, "_is_overflow", False))
    plain = accelerator.prepare(OPTIMIZERS["sgd"](model.parameters()))
    with lossscale.torch.Monitor(optimizer, prepared, path) as monitor:
        for number in range(4):
            optimizer.zero_grad()
            # The second one makes the gradients infinite.
            loss = prepared(torch.full((2,), torch.inf if number == 1 else 1.0, device=DEVICE))
            accelerator.backward(wrapper.scale_loss(loss))
            optimizer.step()
            monitor.step(loss)
            skipped = number == 1
            assert accelerator.optimizer_step_was_skipped is optimizer.step_was_skipped is skipped
            assert not plain.step_was_skipped
    assert column(path, "scale") == [8.0, 8.0, 4.0, 4.0]
    assert nonfinite(path)[1] == [("weight", 2, 0)]


# The recipes of docs/trainers.md for one process.

RECIPES = [
    source
    for source in programs("trainers.md")
    if not re.search("^(import ray|from torchtitan)", source, re.MULTILINE)
]
# What a recipe says of a GPU, in comments.
ON_A_GPU = {
    r'accelerator="cpu"(, *)# or "gpu"': r'accelerator="gpu"\1',
    r'device = "cpu" *# or "cuda"': 'device = "cuda"',
    r"Accelerator\(cpu=True\) *# on a GPU: (.*)": r"\1",
    r"use_cpu=True, *# on a GPU: False": "use_cpu=False,",
    r".*# on a GPU, Accelerate does this itself\n": "",
}


@pytest.mark.parametrize("source", RECIPES)
def test_a_recipe_computes_in_float16_and_prints_what_it_says(source):
    dtypes = set()

    def note(module, inputs, output):
        if isinstance(module, torch.nn.Linear):
            dtypes.add(output.dtype)

    for pattern, instead in ({} if ON_THE_CPU else ON_A_GPU).items():
        source = re.sub(pattern, instead, source)
    hook = register_module_forward_hook(note)
    try:
        names = run_page(source, ON_THE_CPU)
    finally:
        hook.remove()
    # Accelerate has no float16 mode on a CPU. On a GPU it converts what a model returns.
    is_float32 = "fp16=True" in source if ON_THE_CPU else "accelerator.scaler" in source
    assert dtypes == {torch.float32 if is_float32 else torch.float16}
    if "import transformers" in source:
        # It clips and logs unscaled gradients; above the limit, so that they are clipped.
        norms = [e["grad_norm"] for e in names["trainer"].state.log_history if "grad_norm" in e]
        assert len(norms) == 3
        assert 1 < min(norms) <= max(norms) < 16
