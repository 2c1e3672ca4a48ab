"""What multiplies each `.grad`, after each call of random programs of two wrappers.

The oracle is the same program without loss scaling. Each scaled gradient is in exactly one set, and
is the gradient of the oracle times the number of that set.
"""

import copy
import itertools
import os
import pickle
import warnings

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import lossscale
from frameworks.torch.support import bits
from lossscale.torch.ranks import ParameterInfo
from lossscale.torch.scaled_gradients import holding

PROGRAMS = int(os.environ.get("LOSSSCALE_SOAK_PROGRAMS", "1")) * 100
SCALES = 2.0**10, 2.0**4
# Fused, so that the device may decide.
INNER = {
    "SGD": lambda given: torch.optim.SGD(given, lr=2.0**-6, fused=True),
    "momentum": lambda given: torch.optim.SGD(given, lr=2.0**-6, momentum=0.5, fused=True),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=2.0**-6, fused=True),
}


class Run:
    """Two optimizers that share a tensor, or all; a loss may reach what only the other has."""

    def __init__(self, wraps, decide="host", moves=True, inner="SGD", same=False):
        self.how = {"decide": decide, "moves": moves, "inner": inner, "same": same}
        self.shared, self.first, self.second = (
            torch.tensor([value, -2.0 * value], requires_grad=True) for value in (0.5, 0.25, 0.75)
        )
        self.wraps = wraps
        given = [[self.shared, self.first], [self.second, self.shared]]
        optimizers = [INNER[inner](list(self.tensors) if same else each) for each in given]
        self.optimizers, self.seed, self.saved = optimizers, 0, None
        if wraps:
            self.optimizers = [
                lossscale.torch.LossScaleOptimizer(
                    each,
                    rule=lossscale.DynamicScale(scale, growth_interval=1 if moves else 1000),
                    decide=decide,
                )
                for each, scale in zip(optimizers, SCALES, strict=True)
            ]

    @property
    def tensors(self):
        return self.shared, self.first, self.second

    def loss(self, which, overflows=None):
        self.seed += 1
        weights = torch.randn(3, 2, generator=torch.Generator().manual_seed(self.seed))
        parts = {
            "shared": [0],
            "alone": [1],
            "first": [0, 1],
            "second": [0, 2],
            "all": [0, 1, 2],
        }[which]
        terms = {i: (self.tensors[i] * weights[i]).tanh().sum() for i in parts}
        if overflows in terms:
            terms[overflows] = terms[overflows] * torch.inf
        return sum(terms.values())

    def verb(self, number, which, overflows=None):
        loss = self.loss(which, overflows)
        self.optimizers[number].backward(loss) if self.wraps else loss.backward()

    def scale(self, number, which, overflows=None):
        loss = self.loss(which, overflows)
        (self.optimizers[number].scale_loss(loss) if self.wraps else loss).backward()

    def step(self, number):
        self.optimizers[number].step()

    def unscale(self, number):
        if self.wraps:
            self.optimizers[number].unscale_()

    def clear(self, number):
        self.optimizers[number].zero_grad()

    def clear_all(self):
        for each in self.tensors:
            each.grad = None

    def clear_in_place(self):
        for each in self.tensors:
            if each.grad is not None:
                each.grad.zero_()

    def replace(self):
        """What code that clips by hand does."""
        for each in self.tensors:
            if each.grad is not None:
                each.grad = each.grad.clone()

    def halve(self, in_place):
        for each in self.tensors:
            if each.grad is not None:
                each.grad = each.grad.mul_(0.5) if in_place else each.grad * 0.5

    def copy(self):
        self.shared, self.first, self.second, self.optimizers = copy.deepcopy(
            (self.shared, self.first, self.second, self.optimizers)
        )

    def file(self, how):
        """New objects, and the gradients as they were."""
        kept = [None if t.grad is None else t.grad.clone() for t in self.tensors]
        if how == "pickle":
            loaded = pickle.loads(pickle.dumps((*self.tensors, self.optimizers)))
            self.shared, self.first, self.second, self.optimizers = loaded
        else:
            states = [copy.deepcopy(each.state_dict()) for each in self.optimizers]
            values = [t.detach().clone() for t in self.tensors]
            made = Run(self.wraps, **self.how)
            for tensor, value in zip(made.tensors, values, strict=True):
                tensor.data.copy_(value)
            if how == "restored before":
                made.restore(kept)
            for each, state in zip(made.optimizers, states, strict=True):
                each.load_state_dict(state)
            self.shared, self.first, self.second = made.tensors
            self.optimizers = made.optimizers
        self.restore(kept)

    def restore(self, kept):
        for tensor, gradient in zip(self.tensors, kept, strict=True):
            tensor.grad = None if gradient is None else gradient.clone()

    def check(self, plain, call):
        """Compares each gradient with that of the oracle, times what multiplies it."""
        engines = [each._engine for each in self.optimizers]
        for mine, theirs in zip(self.tensors, plain.tensors, strict=True):
            sets = holding(ParameterInfo([mine], []))
            assert len(sets) <= 1, call
            number = float(sets[0].by.scale_on(torch.device("cpu"))) if sets else 1.0
            expected = None if theirs.grad is None else theirs.grad * number
            assert bits(mine.grad) == bits(expected), (call, number, mine.grad, theirs.grad)
        for engine in engines:
            for each in engine.record.sets:
                assert each.by is None or each in holding(each.info), call
        assert bits(self.tensors) == bits(plain.tensors), call


def raised_by(call, *arguments):
    try:
        call(*arguments)
    except (lossscale.errors.LossScaleError, TypeError) as error:
        return error
    return None


def check(program, **how):
    ours, plain = Run(True, **how), Run(False, **how)
    with warnings.catch_warnings():
        # The wrapper of some steps has scaled no loss.
        warnings.simplefilter("ignore", lossscale.LossScaleWarning)
        for name, *arguments in program:
            error = raised_by(getattr(ours, name), *arguments)
            if error is not None and name == "step":
                # PyTorch's fused SGD cannot start one momentum after another.
                assert "got NoneType" in str(error), error
                assert str(raised_by(plain.step, *arguments)) == str(error)
                return
            if error is not None:
                assert name in ("copy", "file"), error
                assert "multiplied by different loss scales" in str(error), error
                return
            getattr(plain, name)(*arguments)
            ours.check(plain, (name, *arguments))


CALLS = [
    ("scale", 0, "all"),
    ("scale", 1, "second"),
    ("verb", 0, "first"),
    ("step", 0),
    ("step", 1),
    ("clear", 0),
    ("clear_all",),
]


# Who decides changes what a step does, not which calls it follows.
@pytest.mark.parametrize(("decide", "length"), [("host", 5), ("device", 4)])
def test_all_sequences_of_calls(decide, length):
    for program in itertools.product([CALLS[0], CALLS[2]], *[CALLS] * (length - 2)):
        check([*program, ("step", 0)], decide=decide)
        check([*program, ("step", 1)], decide=decide)


def of(name, *choices):
    return st.tuples(st.just(name), *map(st.sampled_from, choices))


LOSSES = ["shared", "alone", "first", "second", "all"]
calls = st.one_of(
    of("scale", [0, 1], LOSSES),
    of("scale", [0, 1], ["all"]),
    of("verb", [0, 1], LOSSES),
    of("step", [0, 1]),
    of("step", [0, 1]),
    of("unscale", [0, 1]),
    of("clear", [0, 1]),
    of("clear_all"),
    of("clear_in_place"),
    of("replace"),
    of("halve", [True, False]),
    of("copy"),
    of("file", ["pickle", "restored before", "restored after"]),
)


@pytest.mark.parametrize("decide", ["host", "device"])
@hypothesis.settings(max_examples=PROGRAMS, deadline=None)
@hypothesis.given(
    st.lists(calls, min_size=3, max_size=30),
    st.booleans(),
    st.sampled_from(list(INNER)),
    st.booleans(),
)
@hypothesis.example([("verb", 0, "first"), ("verb", 1, "second"), ("step", 0)], True, "SGD", True)
@hypothesis.example([("scale", 0, "first"), ("step", 1), ("step", 0)], True, "SGD", False)
@hypothesis.example(
    [("scale", 0, "first"), ("unscale", 0), ("scale", 1, "second"), ("step", 0)], True, "SGD", False
)
@hypothesis.example(
    [("scale", 0, "first"), ("step", 0), ("scale", 1, "second"), ("step", 1)], True, "SGD", True
)
# What the second has decided on is multiplied again, though the first's loss does not reach it.
@hypothesis.example(
    [("scale", 1, "second"), ("unscale", 1), ("scale", 0, "alone"), ("step", 1)], True, "SGD", False
)
def test_random_programs(decide, program, moves, inner, same):
    check(program, decide=decide, moves=moves, inner=inner, same=same)


losses_that_overflow = st.tuples(
    st.sampled_from(["scale", "verb"]),
    st.sampled_from([0, 1]),
    st.sampled_from(LOSSES),
    st.sampled_from([None, 0, 1, 2]),
)


@pytest.mark.parametrize("decide", ["host", "device"])
@hypothesis.settings(max_examples=PROGRAMS, deadline=None)
@hypothesis.given(
    st.lists(
        st.one_of(
            losses_that_overflow,
            of("step", [0, 1]),
            of("step", [0, 1]),
            of("unscale", [0, 1]),
            of("clear", [0, 1]),
            of("clear_all"),
        ),
        min_size=3,
        max_size=14,
    )
)
# What one wrapper's loss left in the shared tensor, the other's step must not apply.
@hypothesis.example(
    [("scale", 1, "all", 0), ("step", 1), ("step", 0), ("verb", 1, "all", None), ("step", 0)]
)
@hypothesis.example(
    [
        ("scale", 0, "first", 0),
        ("step", 0),
        ("scale", 1, "first", None),
        ("step", 1),
        ("step", 0),
        ("verb", 0, "all", 1),
        ("step", 0),
    ]
)
def test_programs_with_overflows_train_as_float32_without_the_skipped_steps(decide, program):
    ours, plain = Run(True, decide, moves=False), Run(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lossscale.LossScaleWarning)
        for name, *arguments in program:
            skips = [int(each.steps_skipped) for each in ours.optimizers]
            getattr(ours, name)(*arguments)
            changed = skips != [int(each.steps_skipped) for each in ours.optimizers]
            if name != "step" or not changed:
                getattr(plain, name)(*arguments)
            assert all(t.isfinite().all() for t in plain.tensors), (name, *arguments)
            assert bits(ours.tensors) == bits(plain.tensors), (name, *arguments)
