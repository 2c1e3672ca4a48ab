"""Random orders of all verbs train as PyTorch alone does, to the last bit."""

import os
import warnings

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import lossscale
from lossscale.torch import GradScaler, LossScaleOptimizer

PROGRAMS = int(os.environ.get("LOSSSCALE_SOAK_PROGRAMS", "1")) * 15
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.125),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.125, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}
CLEARS = ["optimizer", "model", "in place", "none"]

losses = st.sampled_from(["both", "first", "second", "derived later"])
of_wrapper = st.tuples(st.sampled_from(["verb", "scale_loss", "plain"]), losses)
of_scaler = st.tuples(st.just("scale"), losses)


def steps(of):
    """Steps: some backward passes, each perhaps unscaled after it; what is done then; a clear."""
    backward = st.tuples(of, st.booleans())
    return st.lists(
        st.tuples(
            st.lists(backward, min_size=1, max_size=3),
            st.sampled_from(["step", "step", "clip", "decay", "left out"]),
            st.sampled_from(CLEARS),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )


class Program:
    """Two layers and one optimizer; `way` is None for PyTorch alone."""

    def __init__(self, name, way, decide="host"):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        )
        self.parameters = list(self.model.parameters())
        self.inner = self.optimizer = OPTIMIZERS[name](self.parameters)
        self.way, self.scaler, self.pending, self.seed = way, None, [], 0
        self.is_scaled = False
        # It moves at each step, so that gradients of many scales meet.
        rule = lossscale.DynamicScale(initial_scale=2.0**10, growth_interval=1)
        if way == "wrapper":
            self.optimizer = LossScaleOptimizer(self.inner, rule=rule, decide=decide)
        if way == "scaler":
            self.scaler = GradScaler("cpu", rule=rule)

    def loss(self, part):
        self.seed += 1
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(self.seed))
        if part == "derived later":
            # Its graph keeps no parameter, which a step would change.
            return sum((p * x.sum()).sum() for p in self.parameters)
        hidden = self.model[0](x)
        if part == "second":
            hidden = hidden.detach()
        out = self.model[2](self.model[1](hidden))
        return hidden.square().mean() if part == "first" else out.square().mean()

    def derive(self, verb, part):
        loss = self.loss(part)
        if verb == "verb" and part == "derived later":
            verb = "scale_loss"
        if verb == "plain" and self.is_scaled:
            # What is added to scaled gradients has to be scaled.
            self.unscale()
        if self.way == "wrapper" and verb == "verb":
            self.optimizer.backward(loss)
            self.is_scaled = False
            return
        if self.way == "wrapper" and verb == "scale_loss":
            loss = self.optimizer.scale_loss(loss)
        if self.way == "scaler":
            loss = self.scaler.scale(loss)
        if part == "derived later" and verb != "plain":
            self.pending.append(loss)
        else:
            loss.backward()
            self.is_scaled = verb == "scale_loss"

    def unscale(self):
        self.is_scaled = False
        if self.way == "wrapper":
            self.optimizer.unscale_()
        elif self.way == "scaler":
            self.scaler.unscale_(self.inner)

    def run(self, program):
        for backwards, action, clear, late in program:
            for (verb, part), unscales in backwards:
                self.derive(verb, part)
                if unscales and self.way == "wrapper":
                    self.unscale()
            if late:
                while self.pending:
                    self.pending.pop().backward()
                    self.is_scaled = True
            if all(p.grad is None for p in self.parameters):
                continue
            if action in ("clip", "decay", "left out"):
                self.unscale()
            if action == "clip":
                torch.nn.utils.clip_grad_norm_(self.parameters, 0.125)
            if action == "decay":
                for p in self.parameters:
                    p.grad = None if p.grad is None else p.grad.mul(0.5)
            self.is_scaled = False
            if action != "left out" and self.scaler is not None:
                self.scaler.step(self.inner)
            elif action != "left out":
                self.optimizer.step()
            if self.scaler is not None:
                self.scaler.update()
            if clear == "optimizer":
                self.optimizer.zero_grad()
            elif clear != "none":
                self.model.zero_grad(set_to_none=clear == "model")
        return [(p.detach(), p.grad) for p in self.parameters]


def same(mine, theirs):
    for (weight, _), (wanted, _) in zip(mine, theirs, strict=True):
        if not torch.equal(weight, wanted):
            return False
    return True


def check(name, way, program, decide="host"):
    with warnings.catch_warnings():
        # A step after plain backward passes alone says that no loss was scaled.
        warnings.simplefilter("ignore")
        found = Program(name, way, decide)
        assert same(found.run(program), Program(name, None).run(program))
    if way == "wrapper":
        assert int(found.optimizer.steps_skipped) == 0


tries = hypothesis.settings(
    max_examples=PROGRAMS, deadline=None, derandomize="LOSSSCALE_SOAK_PROGRAMS" not in os.environ
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@tries
@hypothesis.given(program=steps(of_wrapper))
def test_the_wrapper(name, program):
    check(name, "wrapper", program)


@pytest.mark.parametrize("name", ["SGD fused", "AdamW"])
@tries
@hypothesis.given(program=steps(of_wrapper))
def test_the_wrapper_where_the_device_decides(name, program):
    check(name, "wrapper", program, "device")


@pytest.mark.parametrize("name", OPTIMIZERS)
@tries
@hypothesis.given(program=steps(of_scaler))
def test_the_scaler(name, program):
    check(name, "scaler", program)
