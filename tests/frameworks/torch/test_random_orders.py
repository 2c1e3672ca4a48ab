"""Random orders of all verbs train as PyTorch alone does, to the last bit.

A step that overflows is one that PyTorch alone does not take.
"""

import os
import warnings

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from frameworks.torch.support import bits
from lossscale import DynamicScale, FixedScale
from lossscale.torch import LossScaleOptimizer

PROGRAMS = int(os.environ.get("LOSSSCALE_SOAK_PROGRAMS", "1")) * 30
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.125),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.125, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}
# Behind one wrapper.
SEVERAL = {
    "several": lambda p: [torch.optim.SGD(p[:2], lr=0.125), torch.optim.AdamW(p[2:], lr=0.01)]
}
RULES = {
    # It moves at each step, so that gradients of many scales meet.
    "moving": DynamicScale(2.0**10, growth_interval=1),
    "fixed": FixedScale(2.0**10, skip_nonfinite=True),
    "unchecked": FixedScale(2.0**10),
}
ACTIONS = ["step", "step", "clip", "clip values", "decay", "left out"]
CLEARS = ["optimizer", "inner", "first part", "model", "in place", "none"]

losses = st.sampled_from(["both", "first", "second", "derived later", "overflows"])
of_wrapper = st.tuples(st.sampled_from(["verb", "scale_loss", "plain"]), losses)


def steps(of):
    """Steps: some backward passes, each perhaps unscaled after it; what is done then; a clear."""
    backward = st.tuples(of, st.booleans())
    return st.lists(
        st.tuples(
            st.lists(backward, min_size=1, max_size=3),
            st.sampled_from(ACTIONS),
            st.sampled_from(CLEARS),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )


class Program:
    """Two layers and one optimizer; `way` is None for PyTorch alone."""

    def __init__(self, make, way, rule, decide="host"):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        )
        self.parameters = list(self.model.parameters())
        self.inner = self.optimizer = make(self.parameters)
        self.parts = self.inner if isinstance(self.inner, list) else [self.inner]
        self.way, self.pending, self.seed = way, [], 0
        self.is_scaled, self.has_left_out, self.skipped = False, False, 0
        # An infinity that nobody looks for would end the comparison.
        self.may_overflow = rule.checks_gradients
        if way == "wrapper":
            self.optimizer = LossScaleOptimizer(self.inner, rule=rule, decide=decide)

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
        if part == "overflows" and self.may_overflow:
            out = out * torch.inf
        return hidden.square().mean() if part == "first" else out.square().mean()

    def derive(self, verb, part):
        if verb == "plain" and part == "overflows":
            # What comes after the decision reaches the parameters, as with PyTorch's scaler.
            part = "both"
        if verb == "plain" and self.has_left_out:
            # Nothing tells the wrapper that these gradients are not those that overflowed.
            verb = "verb"
        self.has_left_out = self.has_left_out and part == "derived later"
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
        if part == "derived later" and verb != "plain":
            self.pending.append(loss)
        else:
            loss.backward()
            self.is_scaled = verb == "scale_loss"

    def unscale(self):
        self.is_scaled = False
        if self.way == "wrapper":
            self.optimizer.unscale_()

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
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            if not gradients:
                continue
            overflows = not all(bool(gradient.isfinite().all()) for gradient in gradients)
            self.skipped += overflows
            if action != "step":
                self.unscale()
            if action == "clip":
                torch.nn.utils.clip_grad_norm_(self.parameters, 0.125)
            if action == "clip values":
                torch.nn.utils.clip_grad_value_(self.parameters, 0.125)
            if action == "decay":
                for p in self.parameters:
                    p.grad = None if p.grad is None else p.grad.mul(0.5)
            self.is_scaled = False
            if action != "left out":
                self.step(overflows)
            self.has_left_out = overflows and action == "left out"
            # An overflow that stays would be of each step that follows.
            self.clear("model" if overflows else clear)
        return bits(self.parameters)

    def step(self, overflows):
        if self.way is not None:
            self.optimizer.step()
        elif not overflows:
            for part in self.parts:
                part.step()

    def clear(self, how):
        if how == "optimizer" and self.way == "wrapper":
            self.optimizer.zero_grad()
        elif how in ("optimizer", "inner"):
            for part in self.parts:
                part.zero_grad()
        elif how == "first part":
            self.parts[0].zero_grad()
        elif how != "none":
            self.model.zero_grad(set_to_none=how == "model")


def check(make, way, program, rule, decide="host"):
    with warnings.catch_warnings():
        # A step after plain backward passes alone says that no loss was scaled.
        warnings.simplefilter("ignore")
        found, plain = Program(make, way, rule, decide), Program(make, None, rule)
        assert found.run(program) == plain.run(program)
        if way == "wrapper":
            # An overflow that was left out last is counted when the next step begins.
            found.optimizer.backward(found.loss("both"))
            assert int(found.optimizer.steps_skipped) == plain.skipped


tries = hypothesis.settings(
    max_examples=PROGRAMS, deadline=None, derandomize="LOSSSCALE_SOAK_PROGRAMS" not in os.environ
)
rules = st.sampled_from(list(RULES.values()))


@pytest.mark.parametrize("name", [*OPTIMIZERS, *SEVERAL])
@tries
@hypothesis.given(program=steps(of_wrapper), rule=rules)
def test_the_wrapper(name, program, rule):
    check({**OPTIMIZERS, **SEVERAL}[name], "wrapper", program, rule)


@pytest.mark.parametrize("name", ["SGD fused", "AdamW"])
@tries
@hypothesis.given(program=steps(of_wrapper), rule=rules)
def test_the_wrapper_where_the_device_decides(name, program, rule):
    check(OPTIMIZERS[name], "wrapper", program, rule, "device")
