"""The drop-in beside PyTorch's class: the same calls leave the same bits and raise alike.

What may differ are rows of the tables "What differs, and why" and "Differences from
torch.amp.GradScaler": here a step without gradients, a scale that is set before anything was
scaled, a scale outside 2**-126 and 2**126, gradients that a scale below 1 makes infinite,
optimizers that were unscaled together, and a parameter's first fused step that overflows.
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
from torch.amp.grad_scaler import OptState
from torch.utils.checkpoint import checkpoint

from frameworks.torch.support import OPTIMIZERS, bits, raised_by
from lossscale.errors import ScalerArgumentError
from lossscale.torch import GradScaler

PROGRAMS = int(os.environ.get("LOSSSCALE_SOAK_PROGRAMS", "1")) * 60

WRITES = {
    "fill_": lambda scale, number: scale.fill_(number),
    "data =": lambda scale, number: setattr(scale, "data", number),
    "numpy": lambda scale, number: scale.numpy().fill(number),
    "dlpack": lambda scale, number: torch.from_dlpack(scale.detach()).fill_(number),
}


# --- Subclasses, of either class ---------------------------------------------------------------


def plain(base):
    return base


def adds(base):
    """Adds an overflow of its own to what was found, as scalers that all-reduce do."""

    class Adds(base):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            state = self._per_optimizer_states[id(optimizer)]
            given = [p.grad.to_dense() for p in parameters_of(optimizer) if p.grad is not None]
            if given and max(gradient.max() for gradient in given) > 8.0:
                state["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(2.0)}

    return Adds


def halves(base):
    """Unscales by a number of its own."""

    class Halves(base):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            return super()._unscale_grads_(optimizer, inv_scale * 2.0, found_inf, True)

    return Halves


def pretends(base):
    """Says another scale than it multiplies by."""

    class Pretends(base):
        def _get_scale_async(self):
            scale = super()._get_scale_async()
            return None if scale is None else scale * 2.0

    return Pretends


HOOKS = [
    *("scale", "unscale_", "step", "update", "get_scale", "_get_scale_async", "_unscale_grads_"),
    *("_maybe_opt_step", "_check_inf_per_device", "_check_scale_growth_tracker"),
    "_lazy_init_scale_growth_tracker",
]


def logging(base):
    """Logs the calls of what a subclass may override, in `calls`."""

    def logged(name):
        def method(self, *args, **kwargs):
            self.__dict__.setdefault("calls", []).append((name, *filter(is_plain, args)))
            return getattr(super(made, self), name)(*args, **kwargs)

        return method

    def is_plain(argument):
        return isinstance(argument, (str, bool, float, torch.device))

    made = type("Logging", (base,), {name: logged(name) for name in HOOKS})
    return made


SUBCLASSES = [plain, adds, halves, pretends, logging]


# --- Programs ----------------------------------------------------------------------------------


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class Run:
    """Calls of one class; a method for each, by its name."""

    def __init__(self, make, kinds, settings, scalers=1):
        self.make_model(len(kinds))
        self.optimizers = [OPTIMIZERS[k](p) for k, p in zip(kinds, self.owned, strict=True)]
        self.scalers = [make("cpu", **settings) for _ in range(scalers)]
        self.kept_gradients = self.kept_state = None

    def make_model(self, optimizers):
        """Two layers and an embedding. Two optimizers share a weight."""
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
        self.rows = torch.nn.Embedding(3, 2, sparse=True)
        ones, others = [[*each.parameters()] for each in (self.first, self.second)]
        self.parameters = [*ones, *others, *self.rows.parameters()]
        self.owned = [self.parameters[:4]] if optimizers == 1 else [ones, [*others, ones[0]]]

    def loss(self, which):
        x = torch.tensor([[1.0, -0.5], [0.25, 2.0]], requires_grad=True)
        if which == "sparse":
            x = x + self.rows(torch.tensor([0, 0]))
        if which in ("reentrant", "checkpoint"):
            hidden = checkpoint(self.first, x, use_reentrant=which == "reentrant")
        else:
            hidden = self.first(x)
        if which == "first":
            return hidden.square().mean()
        loss = self.second(hidden.detach() if which == "second" else hidden.tanh()).square().mean()
        # The gradients of the second layer are infinite, and those of the first are not.
        return loss + (self.second.bias * torch.inf).sum() if which == "overflows" else loss

    def backward(self, scaler, which):
        self.scalers[scaler].scale(self.loss(which)).backward()

    def unscale(self, scaler, optimizer):
        self.scalers[scaler].unscale_(self.optimizers[optimizer])

    def step(self, scaler, optimizer):
        scaler, inner = self.scalers[scaler], self.optimizers[optimizer]
        before = set(inner.state)
        scaler.step(inner)
        overflowed = any(scaler._found_inf_per_device(inner).values())
        for parameter in set(inner.state) - before if overflowed else ():
            # A row: PyTorch's class lets the kernel make a state in a step that it skips.
            assert not isinstance(scaler, GradScaler)
            del inner.state[parameter]

    def update(self, scaler, *number):
        self.scalers[scaler].update(*number)

    def write(self, scaler, number, way):
        if self.scalers[scaler]._scale is not None:
            WRITES[way](self.scalers[scaler]._scale, torch.tensor(number))

    def replace(self, scaler, number):
        if self.scalers[scaler]._scale is not None:
            self.scalers[scaler]._scale = torch.tensor(number)

    def set_factors(self, scaler, growth, backoff):
        self.scalers[scaler].set_growth_factor(growth)
        self.scalers[scaler].set_backoff_factor(backoff)

    def clear(self, optimizer, to_none):
        self.optimizers[optimizer].zero_grad(set_to_none=to_none)

    def add_group(self, optimizer):
        """Of the embedding, which may have gradients, and sparse ones."""
        added = self.optimizers[optimizer]
        if not any(p is self.rows.weight for p in parameters_of(added)):
            added.add_param_group({"params": [self.rows.weight]})

    def keep(self):
        self.kept_gradients = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self.kept_state = self.scalers[0].state_dict()

    def restore(self, what):
        if self.kept_state is None:
            return
        if what == "scaler":
            self.scalers[0].load_state_dict(self.kept_state)
            return
        for parameter, gradient in zip(self.parameters, self.kept_gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def assign(self, factor):
        for parameter in self.second.parameters():
            parameter.grad = torch.full_like(parameter, factor)

    def copy(self, scaler, how):
        self.scalers[scaler] = how(self.scalers[scaler])

    def shown(self):
        return bits(
            [
                self.parameters,
                [p.grad for p in self.parameters],
                self.states(),
                [(s.get_scale(), s._get_growth_tracker()) for s in self.scalers],
                self.forget_calls(),
            ]
        )

    def forget_calls(self):
        return [s.__dict__.pop("calls", None) for s in self.scalers]

    def states(self):
        return [o.state.get(p, {}) for o in self.optimizers for p in parameters_of(o)]

    # Rows of the tables.

    def is_out_of_range(self):
        numbers = [1.0 if s._scale is None else float(s._scale) for s in self.scalers]
        return not all(2.0**-126 <= number <= 2.0**126 for number in numbers)

    def is_without_gradients(self):
        """Whether an optimizer is unscaled or would be, and has no gradient."""
        grads = [[p.grad for p in parameters_of(each)] for each in self.optimizers]
        nothing = any(all(g is None for g in own) for own in grads)
        return nothing or self.are_unscaled_for_nothing()

    def are_unscaled_for_nothing(self):
        """Whether an optimizer was unscaled when it had no gradient."""
        states = [s for scaler in self.scalers for s in scaler._per_optimizer_states.values()]
        unscaled = [s for s in states if s["stage"] is not OptState.READY]
        return not all(state["found_inf_per_device"] for state in unscaled)

    def overflow_below_one(self):
        """Whether a finite gradient is infinite once it is divided by a scale below 1."""
        scales = [s._scale for s in self.scalers if s._scale is not None and s._scale < 1]
        grads = [p.grad.to_dense() for p in self.parameters if p.grad is not None]
        return any((g.isfinite() & (g / s).isinf()).any() for g in grads for s in scales)

    def are_joined(self):
        """Whether optimizers are unscaled, and only some of them have found an overflow."""
        for scaler in self.scalers:
            found = {
                any(map(bool, state["found_inf_per_device"].values()))
                for state in scaler._per_optimizer_states.values()
                if state["stage"] is OptState.UNSCALED
            }
            if len(found) > 1:
                return True
        return False


class SmallRun(Run):
    """Two parameters, for many short programs."""

    def make_model(self, optimizers):
        self.parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        self.owned = [self.parameters] if optimizers == 1 else [[p] for p in self.parameters]

    def loss(self, which):
        return sum((p * p).sum() for p in self.parameters) + (
            (self.parameters[0] * torch.inf).sum() if which == "overflows" else 0.0
        )

    def shown(self):
        tensors = [*self.parameters, *(p.grad for p in self.parameters)]
        tensors += [t for state in self.states() for t in (len(state), *state.values())]
        tensors += [t for s in self.scalers for t in (s._scale, s._growth_tracker)]
        shown = [t.tolist() if torch.is_tensor(t) else t for t in tensors]
        return repr((shown, self.forget_calls()))


def check(program, kinds, settings, subclass=plain, scalers=1, run=Run):
    """Runs a program with both classes, and compares them after each call."""
    with warnings.catch_warnings(action="ignore"):
        theirs, ours = (
            run(subclass(base), kinds, settings, scalers)
            for base in (torch.amp.GradScaler, GradScaler)
        )
        for name, *arguments in program:
            may_raise = theirs.is_without_gradients() or (name == "update" and len(arguments) == 2)
            if name == "step" and (theirs.are_joined() or theirs.are_unscaled_for_nothing()):
                return
            if name in ("step", "unscale") and theirs.overflow_below_one():
                return
            error, own = (raised_by(getattr(each, name), *arguments) for each in (theirs, ours))
            # A fused optimizer that is called on a skip; ours is not, if it would make its state.
            may_raise |= name == "step" and "sparse" in str(error)
            if error is not None and own is None and may_raise:
                return
            if theirs.is_out_of_range():
                given = len(arguments) == 2
                assert isinstance(own, ScalerArgumentError) if given else own is None
                assert not ours.is_out_of_range()
                return
            assert (error is None) == (own is None), (name, arguments, error, own)
            assert error is None or isinstance(own, type(error)), (name, arguments, error, own)
            if name == "step" and "sparse" in str(error):
                # D25, a row: PyTorch's class leaves numbers on an optimizer that has raised.
                return
            if error is not None and may_raise:
                # Ours leaves out calls that PyTorch's class makes there, and would not raise.
                theirs.forget_calls(), ours.forget_calls()
            assert ours.shown() == theirs.shown(), (name, arguments)


CALLS = [
    ("backward", 0, "both"),
    ("backward", 0, "overflows"),
    ("unscale", 0, 0),
    ("step", 0, 0),
    ("update", 0),
    ("clear", 0, True),
]
OF_THE_SECOND = [("unscale", 0, 1), ("step", 0, 1), ("clear", 1, True)]
SETTINGS = {"init_scale": 8.0, "growth_interval": 2}


@pytest.mark.parametrize(
    ("kinds", "subclass"),
    [
        (["sgd-momentum"], logging),
        (["sgd-fused"], logging),
        (["adamw-fused"], plain),
        (["sgd-momentum", "sgd-fused"], plain),
    ],
)
def test_all_orders_of_four_calls(kinds, subclass):
    are_two = len(kinds) == 2
    for program in itertools.product([*CALLS, *OF_THE_SECOND * are_two], repeat=4):
        # What comes before the first backward pass raises the same as with one optimizer.
        if program[0][0] == "backward" or not are_two:
            check(program, kinds, SETTINGS, subclass, run=SmallRun)


def of(name, *choices):
    return st.tuples(st.just(name), *map(st.sampled_from, choices))


LOSSES = ["both", "first", "second", "overflows", "sparse", "reentrant", "checkpoint"]
TWO, NUMBERS = [0, 1], [0.5, 7.0, 1000.0]
calls = st.one_of(
    of("backward", TWO, LOSSES),
    of("backward", [0], ["both"]),
    of("step", TWO, TWO),
    of("step", [0], [0]),
    of("unscale", TWO, TWO),
    of("update", TWO),
    of("update", TWO, [*NUMBERS, 0.0, torch.inf, torch.nan, 2.0**-130, 2.0**127]),
    of("write", TWO, NUMBERS, list(WRITES)),
    of("replace", TWO, NUMBERS),
    of("set_factors", TWO, [4.0, 1.25], [0.25, 0.9]),
    of("clear", TWO, [True, False]),
    of("add_group", TWO),
    of("keep"),
    of("restore", ["scaler", "gradients"]),
    of("assign", [0.0, 3.0, torch.nan]),
    of("copy", TWO, [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))]),
)


@hypothesis.settings(max_examples=PROGRAMS, deadline=None)
@hypothesis.given(
    st.lists(calls, min_size=4, max_size=30),
    st.sampled_from(
        [*([kind] for kind in OPTIMIZERS), ["sgd", "adamw-fused"], ["adam", "sgd-fused"]]
    ),
    st.fixed_dictionaries(
        {
            "init_scale": st.sampled_from([8.0, 1000.0, 0.75, 2.0**16, 2.0**125]),
            "growth_factor": st.sampled_from([2.0, 1.5]),
            "backoff_factor": st.sampled_from([0.5, 0.7]),
            "growth_interval": st.integers(1, 3),
        }
    ),
    st.sampled_from(SUBCLASSES),
)
@hypothesis.example(
    [("backward", 0, "both"), ("keep",), ("restore", "scaler")], ["sgd"], SETTINGS, logging
)
@hypothesis.example([("backward", 0, "both"), ("update", 0, 0.5)], ["sgd"], SETTINGS, logging)
@hypothesis.example(
    [("add_group", 0), ("backward", 0, "sparse"), ("step", 0, 0), ("step", 0, 0)],
    ["sgd-fused"],
    SETTINGS,
    plain,
)
@hypothesis.example(
    [("backward", 0, "both"), ("clear", 0, False), ("step", 0, 0), ("update", 0)] * 2,
    ["sgd"],
    {"init_scale": 2.0**125, "growth_interval": 1},
    plain,
)
def test_random_programs(program, kinds, settings, subclass):
    if len(kinds) == 1:
        program = [
            (*call[:2], 0) if call[0] in ("unscale", "step") else call
            for call in program
            if call[:2] not in (("clear", 1), ("add_group", 1))
        ]
    if any(call[0] == "copy" for call in program):
        # A class that is made in a function has no pickle.
        subclass = plain
    check(program, kinds, settings, subclass, scalers=2)
