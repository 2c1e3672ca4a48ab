"""What somebody new to the wrapper gets wrong, and what the wrapper answers."""

import copy
import functools
import pickle
import weakref

import pytest
import torch

import lossscale
from frameworks.torch.support import (
    bits,
    derive,
    ends_as_without_scaling,
    parameters,
    scaler,
    sgd,
    snapshot,
    train_step,
    wrapped,
    wrapper,
)
from lossscale import LossScaleWarning, errors
from lossscale.torch import scaling
from lossscale.torch.grad_scaler import GradScaler

INNER = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.5),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.5, momentum=0.9, foreach=True),
    "fused": lambda given: torch.optim.AdamW(given, lr=0.5, fused=True),
}


each_inner = pytest.mark.parametrize("inner", INNER)


def made(inner="sgd", **settings):
    given = parameters((3,))
    return given, wrapped(INNER[inner](given), **settings)


def loss_of(given):
    return given[0].square().sum()


# What would be divided too often, or not at all.


def test_a_loss_that_is_scaled_already_is_known_to_copies_too_and_not_kept_alive():
    given, optimizer = made()
    for scale in (optimizer.scale_loss, optimizer.get_scaled_loss):
        scaled = scale(loss_of(given).detach())
        for again in (optimizer.scale_loss, optimizer.get_scaled_loss):
            with pytest.raises(errors.GradientsError, match=r"already scaled.*once"):
                again(scaled)
        # Another tensor with the same numbers is another loss.
        assert float(optimizer.scale_loss(scaled.clone())) == float(scaled) * 2**15
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            with pytest.raises(errors.GradientsError, match="already scaled"):
                copied.scale_loss(scaled)
        kept = weakref.ref(scaled)
        del scaled
        assert kept() is None


SCALING = {
    "wrapper": wrapper,
    "wrapper, clipping": functools.partial(wrapper, clip_norm=100.0),
    "wrapper, fixed": functools.partial(wrapper, rule=lossscale.FixedScale(8)),
    "scaler": scaler,
    "scaler, fixed": functools.partial(scaler, rule=lossscale.FixedScale(8)),
}


@each_inner
@pytest.mark.parametrize("by", SCALING)
@pytest.mark.parametrize("is_factor", [False, True], ids=["loss", "factor"])
def test_unscaling_before_there_are_gradients_divides_nothing(inner, by, is_factor):
    """Gradients that come later are still those of the scaled loss."""

    def run(early):
        given = parameters((3,))
        run = SCALING[by](INNER[inner](given))
        # The `backward` of a loss that is multiplied by a scaled number cannot be seen.
        scaled = run.scale_loss(torch.ones(()) if is_factor else loss_of(given))
        loss = scaled * loss_of(given) if is_factor else scaled
        # The wrapper returns the decision: nothing has overflowed.
        assert not early or run.unscale() in (True, None)
        loss.backward()
        run.step()
        return snapshot(given, run.optimizer), bits(run.saved())

    assert run(early=True) == run(early=False)


def test_a_scaler_of_pytorch_that_is_given_the_wrapper():
    given, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(given)).backward()
    with pytest.warns(LossScaleWarning, match="unless a GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(errors.AlreadyWrappedError, match="Use it without a GradScaler"):
        GradScaler("cpu").step(optimizer)


@each_inner
@pytest.mark.parametrize("cleared_by", ["optimizer", "module", "nobody", "step"])
@pytest.mark.parametrize(("way", "times"), [("scale_loss", 1), ("scale_loss", 2), ("verb", 2)])
def test_a_step_left_out_on_an_overflow_is_a_skipped_step(inner, cleared_by, way, times):
    """It counts once, and a finite one that is left out is no step."""
    given, optimizer = made(inner)
    weights, scale = [p.clone() for p in given], float(optimizer.loss_scale)
    for _ in range(times):
        derive(optimizer, loss_of(given) * torch.inf, way)
        assert not optimizer.unscale_()
        if cleared_by == "optimizer":
            optimizer.zero_grad()
        elif cleared_by == "module":
            for parameter in given:
                parameter.grad = None
        elif cleared_by == "step":
            optimizer.zero_grad()
            optimizer.step()
    derive(optimizer, loss_of(given), way)
    if cleared_by == "nobody":
        # The overflow is in the sum still: its step is to come.
        assert optimizer.steps_skipped == 0
        optimizer.step()
        assert optimizer.steps_skipped == 1
        return
    assert optimizer.steps_skipped == optimizer.iterations == times
    assert float(optimizer.loss_scale) == scale * 0.5**times
    assert all(map(torch.equal, given, weights))
    assert optimizer.unscale_()
    optimizer.zero_grad()
    assert optimizer.iterations == times


# Sparse gradients with several values at one index.

SPARSE = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.5),
    "SparseAdam": lambda given: torch.optim.SparseAdam(given, lr=0.5),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.5),
}


def of_the_same_index(scale, *values):
    given = torch.tensor(values).unsqueeze(1) * scale
    places = torch.zeros(1, len(values), dtype=torch.int64)
    return torch.sparse_coo_tensor(places, given, (3, 1), check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", SPARSE)
def test_values_of_one_index_are_summed_before_they_are_checked_and_clipped(name):
    given = parameters((3, 1))
    optimizer = wrapped(SPARSE[name](given), rule=lossscale.DynamicScale(1.0))
    before = snapshot(given, optimizer)
    optimizer.scale_loss(torch.zeros(()))
    # Half of the largest number, three times.
    given[0].grad = of_the_same_index(1.0, *[1.7e38] * 3)
    optimizer.step()
    assert (float(optimizer.loss_scale), optimizer.last_step_skipped) == (1.0, True)
    assert snapshot(given, optimizer) == before
    optimizer.clip_norm = 0.5
    for by_hand in (False, True):
        scale = optimizer.scale_loss(torch.ones(()))
        given[0].grad = of_the_same_index(scale, 1.0, 2.0, 3.0)
        if by_hand:
            optimizer.unscale_()
        optimizer.step()
        assert given[0].grad.to_dense().flatten().tolist() == pytest.approx([0.5, 0.0, 0.0])


# Names, rules and files.


@each_inner
def test_clipping_that_is_set_later(inner):
    runs = []
    for first in (None, 0.5):
        given, optimizer = made(inner, clip_norm=first)
        assert optimizer.clip_norm == first
        optimizer.clip_norm = 0.5
        for _ in range(2):
            train_step(optimizer, loss_of(given))
        runs.append(snapshot(given, optimizer))
    assert runs[0] == runs[1]
    assert float(given[0].grad.norm()) == pytest.approx(0.5)
    optimizer.clip_norm = None
    train_step(optimizer, 100 * loss_of(given))
    assert float(given[0].grad.norm()) > 1


NO_STATE = r"'state' and 'param_groups', as state_dict\(\) returns it\. Received: .*load the optim"
STATES = {
    "nothing": None,
    "empty": {},
    "list": [],
    "whole checkpoint": {"model": {}, "optimizer": {}},
    "no groups": {"state": {}, "param_groups": []},
    "scaler": GradScaler("cpu").state_dict(),
}


def apply(gradient, variable=None):
    def call(o):
        o.apply_gradients(
            [(gradient, o.param_groups[0]["params"][0] if variable is None else variable)]
        )

    return call


LOSS = torch.ones(())
MISTAKES = {
    "no pair": (lambda o: o.apply_gradients([3]), TypeError, r"\(gradient, variable\) pairs"),
    "a stranger": (apply(torch.ones(3), torch.ones(3)), ValueError, "in no parameter group"),
    "another shape": (apply(torch.ones(2)), ValueError, "must have the shape"),
    "several losses": (lambda o: o.scale_loss([LOSS]), TypeError, "a number, or a callable"),
    "a loss": (lambda o: o.minimize(LOSS), TypeError, "must be a callable"),
    "a constant": (lambda o: o.minimize(lambda: LOSS), ValueError, "does not depend"),
    "a tape": (lambda o: o.minimize(lambda: 0, tape=1), ValueError, "for TensorFlow"),
    "no list": (lambda o: o.get_unscaled_gradients(3), TypeError, "list of gradients"),
    "get_config": (lambda o: o.get_config(), AttributeError, "LossScaleOptimizer has no"),
    "from_config": (lambda o: o.from_config({}), AttributeError, "LossScaleOptimizer has no"),
    "no closure": (lambda o: o.step(LOSS), TypeError, r"Received: Tensor.*optimizer.backward\("),
    "decide later": (lambda o: setattr(o, "decide", "device"), AttributeError, "no setter"),
    "a group later": (lambda o: setattr(o, "process_group", 1), AttributeError, "no setter"),
    "no clipping": (lambda o: setattr(o, "clip_norm", 0), ValueError, "`clip_norm` .* above 0"),
    **{
        f"a state, {kind}": (lambda o, found=found: o.load_state_dict(found), KeyError, NO_STATE)
        for kind, found in STATES.items()
    },
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_answered_before_anything_changes(case):
    call, error, words = MISTAKES[case]
    given, optimizer = made("momentum")
    before = snapshot(given, optimizer), bits(optimizer.state_dict())
    with pytest.raises(error, match=words):
        call(optimizer)
    assert (snapshot(given, optimizer), bits(optimizer.state_dict())) == before
    assert (optimizer.decide, optimizer.process_group, optimizer.clip_norm) == ("host", None, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": "1"}, "clip_norm"),
        ({"decide": "gpu"}, "'host' or 'device'"),
        ({"decide": "device"}, "without parameters"),
        ({"dynamic": False}, "initial_scale"),
        ({"initial_scale": -1}, "initial_scale"),
        ({"process_group": "world"}, "process_group"),
        ({"rule": lossscale.FixedScale}, "a class: create an instance first"),
    ],
)
def test_arguments_are_checked(settings, words):
    inner = torch.optim.SGD([{"params": []}], lr=0.1)
    error = TypeError if settings.keys() & {"process_group", "rule"} else ValueError
    with pytest.raises(error, match=words):
        wrapped(inner, **settings)
    wrapped(inner)
    if "rule" in settings:
        with pytest.raises(error, match=words):
            GradScaler("cpu", **settings)


# Mistakes that PyTorch allows end as they do there.


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@each_inner
@ends_as_without_scaling
def test_a_model_that_is_cast_after_it_was_wrapped(wrap, inner, dtype):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = wrap(INNER[inner](model.parameters()))
    model.to(dtype)
    for _ in range(3):
        # bfloat16 divides as exactly, for the scale is a power of two.
        train_step(optimizer, model(torch.ones(2, 3, dtype=dtype)).square().sum())
    return snapshot(model.parameters(), optimizer)


def test_half_after_wrapping():
    model = torch.nn.Linear(2, 1)
    o = wrapped(sgd(*model.parameters(), fused=True), initial_scale=8.0)
    model.half()
    before = model.bias.detach().clone()
    o.scale_loss(model(torch.ones(1, 2).half()).sum()).backward()
    o.step()
    assert torch.equal(model.bias, before - 1.0)


def test_a_cuda_graph_that_would_wait_for_the_host_is_refused_in_words(monkeypatch):
    class OnGpu:
        is_cuda = True

        def item(self):
            return 1.0

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(errors.UnsupportedError, match=r"CUDA graph is captured.*decide='device'"):
        scaling.read(OnGpu())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert scaling.read(OnGpu()) == 1.0
