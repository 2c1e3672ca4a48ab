"""A small model, gradients that are given, and what is left of a step."""

import contextlib
import copy
import functools
import inspect
import io
import os
import pickle
import re
import sys
import warnings
from unittest import mock

import pytest
import torch
from torch import distributed

import lossscale
from lossscale.torch.grad_scaler import GradScaler

DEVICE = os.environ.get("LOSSSCALE_TEST_DEVICE", "cpu")
SHAPES = ((3,), (2, 2))
ONES = [torch.ones(shape) for shape in SHAPES]
pairs = functools.partial(zip, strict=True)
KINDS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}


def forget_accelerate():
    """Accelerate, which Hugging Face's Trainer uses too, keeps its state in classes."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def run_page(source, prints=True):
    """Runs a program of a page, which prints what it says; returns its names."""
    for name in re.findall(
        "^(?:import|from) (accelerate|lightning|transformers)", source, re.MULTILINE
    ):
        # Where PyTorch alone is installed, there are no trainers.
        pytest.importorskip(name)
    names = {"__name__": "__main__"}
    # Trainers warn of their surroundings; a page must not show our warnings.
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        warnings.filterwarnings("error", module="lossscale")
        exec(compile(source, "<page>", "exec"), names)
    expected = re.search(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)[1]
    assert not prints or printed.getvalue().strip().splitlines()[-1] == expected
    return names


def drawn(seed, *shape):
    """Numbers, the same on each device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(DEVICE)


def parameters(*shapes, dtype=torch.float32):
    """Parameters with different values."""
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def parameter(size=2):
    """A parameter of ones."""
    return torch.nn.Parameter(torch.ones(size))


def sgd(*given, **settings):
    return torch.optim.SGD(list(given), **{"lr": 1.0, **settings})


def wrapped(inner, **settings):
    return lossscale.torch.LossScaleOptimizer(inner, **settings)


def made(decide="host", **settings):
    """Parameters of `SHAPES`, and an SGD with momentum around them that is wrapped."""
    given = parameters(*SHAPES)
    inner = torch.optim.SGD(given, lr=0.5, momentum=0.9, fused=decide == "device")
    return given, wrapped(inner, decide=decide, **settings)


def scaled(optimizer, loss):
    """The loss to backpropagate: through the scale if there is one."""
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def backward(optimizer, given, gradients, factor=1.0):
    """Backpropagates a loss that has these gradients; through the scale if there is one."""
    total = sum(
        (p * (g.to(p.device) * factor)).sum() for p, g in zip(given, gradients, strict=True)
    )
    scaled(optimizer, total).backward()


def fill(optimizer, given, gradients):
    """Sets the gradients, multiplied by the scale if there is one, as they are."""
    scale = scaled(optimizer, torch.ones(()))
    for p, g in zip(given, gradients, strict=True):
        p.grad = None if g is None else (g.to(p.device) * scale).to(p.dtype)


def step(optimizer, given, gradients):
    """A step with these gradients."""
    fill(optimizer, given, gradients)
    optimizer.step()


def derive(optimizer, loss, way="verb", **arguments):
    """Backpropagates by one of the ways; plainly if the optimizer is not wrapped."""
    if not hasattr(optimizer, "scale_loss"):
        loss.backward(**arguments)
    elif way == "verb":
        optimizer.backward(loss, **arguments)
    else:
        optimizer.scale_loss(loss).backward(**arguments)
        if way.endswith("unscaled"):
            optimizer.unscale_()


@contextlib.contextmanager
def counted(operation="all_reduce"):
    """Collects how many numbers are sent, once for each group."""
    sent, original = [], getattr(distributed, operation)

    def counting(*tensors, **arguments):
        sent.append(tensors[-1].numel())
        return original(*tensors, **arguments)

    with mock.patch.object(distributed, operation, counting):
        yield sent


def train_step(optimizer, loss, way="scale_loss"):
    """A step of a training loop."""
    optimizer.zero_grad()
    derive(optimizer, loss, way)
    optimizer.step()


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization, as its repositories write it: with a closure, or two calls."""

    def __init__(self, parameters, rho=0.05):
        super().__init__(parameters, {"rho": rho})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        weights = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        for p in weights:
            self.state[p]["e"] = p.grad * (self.defaults["rho"] / norm)
            p.data.add_(self.state[p]["e"])

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["e"])
        self.base.step()

    def step(self, closure):
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


def raised_by(call, *arguments):
    """What a call raises, or None."""
    try:
        call(*arguments)
    except Exception as error:
        return error
    return None


def alone(inner, **_):
    return inner


def ends_as_without_scaling(program):
    """A test: a program ends alike with what it is given, which wraps an optimizer or leaves it."""

    @functools.wraps(program)
    def test(**row):
        assert program(wrapped, **row) == program(alone, **row)

    signature = inspect.signature(program)
    test.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return test


def bits(value):
    """Something that is equal only if each bit is."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            value = value.to_dense()
        value = value.detach().cpu().contiguous()
        stored = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
        return value.dtype, tuple(value.shape), stored.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def snapshot(given, optimizer):
    """The bits of parameters and of the state of the optimizer inside."""
    inner = getattr(optimizer, "inner_optimizer", getattr(optimizer, "optimizer", optimizer))
    return bits([list(given), copy.deepcopy(inner.state_dict()["state"])])


def through_a_file(value, weights_only=True):
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda it: pickle.loads(pickle.dumps(it)),
    "torch.save": lambda it: through_a_file(it, weights_only=False),
}


class ByHand:
    """Float32 masters by hand.

    Args:
        model: A model whose parameters are narrow, which computes the gradients.
        make: Makes the optimizer of the masters.
    """

    def __init__(self, model, make):
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float() for p in self.parameters]
        self.optimizer = make(self.masters)

    def adopt(self):
        """What was written into a parameter, which is not the rounded master, becomes it."""
        for parameter, master in pairs(self.parameters, self.masters):
            rounded = master.to(parameter.dtype).flatten().tolist()
            now = parameter.flatten().tolist()
            wide = master.flatten().tolist()
            kept = [w if r == n else n for w, r, n in pairs(wide, rounded, now)]
            master.copy_(torch.tensor(kept).view_as(master))

    def step(self, losses, scale, clip):
        """Returns whether the step was applied."""
        found = [
            torch.autograd.grad(loss * scale, self.parameters, allow_unused=True) for loss in losses
        ]
        for master, *each in pairs(self.masters, *found):
            given = [gradient.float() for gradient in each if gradient is not None]
            master.grad = sum(given[1:], given[0]) / scale if given else None
        if not all(m.grad.isfinite().all() for m in self.masters if m.grad is not None):
            return False
        if clip:
            torch.nn.utils.clip_grad_norm_(self.masters, clip)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs(self.parameters, self.masters):
                parameter.copy_(master)
        return True

    def saved(self):
        return copy.deepcopy([self.masters, self.parameters, self.optimizer.state_dict()])

    @torch.no_grad()
    def load(self, saved):
        for tensor, value in pairs(self.masters + self.parameters, saved[0] + saved[1]):
            tensor.copy_(value)
        self.optimizer.load_state_dict(saved[2])


# The wrapper and the scaler, where both are tried with the same calls.


class WithScaler:
    """An optimizer and a gradient scaler, with the names that a wrapper has."""

    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler = optimizer, scaler
        self.scale_loss, self.state_dict = scaler.scale, scaler.state_dict
        self.zero_grad = optimizer.zero_grad

    loss_scale = property(lambda self: self.scaler.get_scale())
    dynamic_counter = property(lambda self: self.scaler._get_growth_tracker())

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def unscale_(self):
        self.scaler.unscale_(self.optimizer)


def watched(run):
    """The scaler, or the wrapper itself."""
    return getattr(run, "scaler", run)


def shown(run):
    return [float(run.loss_scale), int(run.dynamic_counter)]


def theirs(optimizer):
    return WithScaler(optimizer, torch.amp.GradScaler("cpu", init_scale=8.0))


def scaler(optimizer, *, rule=None, **arguments):
    if rule is not None:
        arguments |= {"init_scale": rule.initial_scale, "growth_interval": rule.growth_interval}
        arguments |= {"min_scale": rule.min_scale, "max_scale": rule.max_scale}
    return WithScaler(optimizer, GradScaler("cpu", **{"init_scale": 8.0, **arguments}))


def wrapper(optimizer, **arguments):
    first = {} if "rule" in arguments else {"initial_scale": 8.0}
    return wrapped(optimizer, **{**first, **arguments})


OURS = {"scaler": scaler, "wrapper": wrapper}


# The scaler alone: a few weights, steps with chosen gradients.

MAKERS = {"torch": torch.amp.GradScaler, "lossscale": GradScaler}

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def weights_of(count=2):
    return [torch.nn.Parameter(torch.full((3,), float(i + 1))) for i in range(count)]


def with_scaler(name="sgd", make=GradScaler, **settings):
    """A parameter, an optimizer of it, and a scaler."""
    weights = weights_of(1)
    return weights, OPTIMIZERS[name](weights), make("cpu", **settings)


def one_step(scaler, optimizer, parameters, slope=1.0, *, unscale=False, update=True):
    """A step whose gradients are `slope` everywhere; returns what the step returned."""
    optimizer.zero_grad()
    scaler.scale(sum((p * slope).sum() for p in parameters)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    returned = scaler.step(optimizer)
    if update:
        scaler.update()
    return returned


def numbers(parameters):
    return [p.detach().tolist() for p in parameters]


def scale_and_tracker(scaler):
    return scaler.get_scale(), scaler._get_growth_tracker()
