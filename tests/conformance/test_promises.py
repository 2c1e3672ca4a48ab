"""The promises that every wrapper keeps, case by case (docs/guarantees.md lists them)."""

import contextlib
import importlib
import itertools
import pathlib
import re
import warnings

import numpy as np
import pytest

import lossscale
from conformance.inner_optimizers import MULTIPLYING, RECORDED
from conformance.recordings import GRADIENTS, VALUES, recorded, same_bits, same_training, spoiled
from conformance.wrappers import BACKEND, KERAS, WRAPPERS
from core import oracle
from lossscale import DynamicScale, FixedScale

NON_FINITE = (np.inf, -np.inf, np.nan)
ZEROS = [np.zeros_like(value) for value in VALUES]


def test_the_backend_that_was_asked_for_is_the_one_that_runs():
    if KERAS == "none":
        assert {row.backend for row in WRAPPERS if row.is_native} == {BACKEND}
    else:
        assert importlib.import_module(KERAS).backend.backend() == BACKEND


# 1. A step with a non-finite gradient changes nothing but the scale and the counts.


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("inner", RECORDED)
def test_a_non_finite_step_changes_no_parameter_and_no_optimizer_state(wrapper, inner):
    skipped = 0
    for step in recorded(wrapper, inner):
        if step.finite:
            assert step.scaled.counters[1:3] == (skipped, False)
            continue
        skipped += 1
        same_bits(step.scaled.parameters, step.before.parameters)
        same_bits(step.scaled.state, step.before.state)
        assert step.scaled.scale == step.before.scale / 2
        assert step.scaled.counters[:3] == (0, skipped, True)


def test_every_kind_of_non_finite_value_is_found_in_every_tensor(wrapper):
    harness = wrapper.make(VALUES, "momentum", DynamicScale(2.0**8, growth_interval=2))
    harness.step(GRADIENTS)
    first = harness.traces
    for skipped, (value, tensor) in enumerate(itertools.product(NON_FINITE, (0, 1)), start=1):
        parameters = harness.parameters()
        harness.step(spoiled(value, tensor))
        same_bits(harness.parameters(), parameters)
        assert harness.scale() == 2.0 ** (8 - skipped), (value, tensor)
        assert harness.counters() == (0, skipped, True, 2 * skipped), (value, tensor)
        harness.step(GRADIENTS)
        assert harness.counters() == (1, skipped, False, 2 * skipped + 1), (value, tensor)
    # 7. The second step neither traces again nor compiles again. Keras' variables are made on the
    # first trace of a tf.function, which then runs once more.
    assert first <= 2 or not wrapper.compiles
    assert harness.traces == first or not wrapper.compiles


def test_a_non_finite_value_is_found_in_a_gradient_of_another_dtype(wrapper):
    harness = wrapper.make(VALUES, "momentum", DynamicScale(8.0, growth_interval=2))
    harness.take_for_scaled()
    before = harness.parameters()
    harness.step([GRADIENTS[0], spoiled(np.inf, 1)[1].astype(np.float16)])
    same_bits(harness.parameters(), before)
    assert harness.scale() == 4.0
    assert harness.counters() == (0, 1, True, 1)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("inner", RECORDED)
def test_training_with_skipped_steps_is_training_without_them(wrapper, inner):
    for step in recorded(wrapper, inner):
        if step.finite:
            same_training(wrapper, step.scaled.parameters, step.plain.parameters)
            same_training(wrapper, step.scaled.state, step.plain.state)


# 2. The scale stays a normal number, and no sequence of steps spoils a parameter.


@pytest.mark.parametrize("min_scale", [1.0, 2.0**-126])
def test_no_number_of_overflows_or_growths_takes_the_scale_out_of_its_bounds(wrapper, min_scale):
    rule = DynamicScale(min_scale * 2.0**8, growth_interval=1, min_scale=min_scale)
    harness = wrapper.make(VALUES, "momentum", rule)
    for _ in range(8 + 9):
        harness.step(spoiled(np.inf))
    assert harness.scale() == np.float32(min_scale)
    for _ in range(2):
        harness.step(GRADIENTS)
    harness.set_scale(2.0**118)
    tiny = [gradient * np.float32(2.0**-20) for gradient in GRADIENTS]
    for _ in range(8 + 9):
        harness.step(tiny)
    assert harness.scale() == np.float32(2.0**126)
    assert harness.counters()[1] == 8 + 9
    harness.step(spoiled(np.inf))
    assert harness.scale() == np.float32(2.0**125)
    assert all(np.isfinite(value).all() for value in harness.parameters())


AT_THE_FLOOR = {
    "warns": (
        DynamicScale(4.0, min_scale=2.0),
        r"minimum loss scale, 2:.*leave such batches out, or.*overflows_before_backoff=2\)\. "
        r"If gradients .*rule=DynamicScale\(min_scale=2\.0\*\*-24\)",
    ),
    "as low as it may be": (
        DynamicScale(2.0**-23, min_scale=2.0**-24),
        r"minimum loss scale, 5\.96046e-08: [^*]*$",
    ),
    "above it": (DynamicScale(2.0**15), None),
    "fixed": (FixedScale(4.0, skip_nonfinite=True), None),
}


@pytest.mark.parametrize("case", AT_THE_FLOOR)
def test_a_step_that_is_skipped_at_the_floor_is_said_once_where_the_host_knows(wrapper, case):
    rule, said = AT_THE_FLOOR[case]
    if wrapper.compiles and case != "warns":
        pytest.skip("what is compiled says nothing of it in any case")
    harness = wrapper.make(VALUES, "sgd", rule)
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = []
        for _ in range(5):
            harness.step(spoiled(np.nan))
            found.append(sum("minimum loss scale" in str(each.message) for each in caught))
    assert harness.counters()[1] == 5
    knows = wrapper.is_an_object and not wrapper.compiles and not wrapper.name.endswith("device")
    # The first step only takes the scale down to its floor.
    assert found == ([0, 1, 1, 1, 1] if said and knows else [0] * 5)
    if said and knows:
        (one,) = (each for each in caught if "minimum loss scale" in str(each.message))
        assert re.search(said, str(one.message))
        package = pathlib.Path(lossscale.__file__).parent
        assert not pathlib.Path(one.filename).is_relative_to(package)


def test_a_gradient_that_unscaling_makes_infinite_is_skipped(wrapper):
    # With a scale below 1 unscaling multiplies, and a large finite gradient can overflow.
    rule = DynamicScale(2.0**-8, min_scale=2.0**-10)
    harness = wrapper.make(VALUES, "sgd", rule)
    huge = [gradient * np.float32(5e37) for gradient in GRADIENTS]
    parameters = harness.parameters()
    harness.take_for_scaled()
    harness.step(huge)
    same_bits(harness.parameters(), parameters)
    assert harness.counters()[1] == 1


# 3. The same sequence of steps gives the same scales everywhere, bit for bit.

RULES = {
    "reference": DynamicScale(1.0, growth_interval=2),
    "factors": DynamicScale(
        100.0, growth_interval=3, growth_factor=1.7, backoff_factor=0.3, min_scale=0.01
    ),
    "multiplier": DynamicScale(100.0, growth_interval=3, growth_factor=1.7, backoff_factor=1 / 1.7),
    "capped": DynamicScale(4.0, growth_interval=1, max_scale=20.0, overflows_before_backoff=2),
}
SEQUENCE = [True, True, True, False, True, True, False, False, False, *[True] * 7, False, True]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_scale_follows_the_rule_bit_for_bit(wrapper, rule):
    if wrapper.like and rule is not RULES["multiplier"]:
        pytest.skip(f"its rules are computed as in {wrapper.like}")
    harness = wrapper.make(VALUES, "sgd", rule)
    seen = []
    for finite in SEQUENCE:
        harness.step(GRADIENTS if finite else spoiled(np.nan))
        assert harness.counters()[2] == (not finite)
        seen.append((float(harness.scale()), harness.counters()[0]))
    assert seen == oracle.trace(rule, SEQUENCE)


# 4. Gradients are unscaled in float32 or wider, by the scale that multiplied the loss.


# Powers of two leave the bits of the weights: test_random_programs.py, at every scale.


def moved_by(inner, given):
    """Where parameters that begin at 0 are after these steps, in float64."""
    rate = {"large-rate": 8.0, "global_clipnorm": 0.5}.get(inner, 2.0**-13)
    norms = [np.sqrt(sum(np.square(g, dtype=float).sum() for g in step)) for step in given]
    moved = []
    for each in zip(*given, strict=True):
        place = momentum = np.zeros(each[0].shape)
        for gradient, norm in zip(each, norms, strict=True):
            if inner == "lion":
                update, momentum = np.sign(momentum + gradient), 0.75 * momentum + 0.25 * gradient
            elif inner == "small-momentum":
                update = momentum = 0.5 * momentum + gradient
            else:
                update = gradient / max(norm, 1.0) if inner == "global_clipnorm" else gradient
            place = place - rate * update
        moved.append(place)
    return moved


GROWING = DynamicScale(2.0**-120, growth_interval=1, growth_factor=2.0**24, min_scale=2.0**-120)


# What a fixed scale is taken together with is the same, whatever else the optimizer does.
RECIPROCALS = [
    *((GROWING, inner) for inner in MULTIPLYING),
    *((FixedScale(2.0**125), inner) for inner in ("small-rate", "global_clipnorm")),
    (FixedScale(2.0**-120), "large-rate"),
]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("rule", "inner"), RECIPROCALS, ids=str)
def test_no_compiler_moves_the_reciprocal_of_the_scale(wrapper, rule, inner):
    # Together with a small learning rate it would be 0 for a large scale, and with a large one
    # infinite for a small scale.
    # Of one variable: TensorFlow does so only with what is used once.
    harness = wrapper.make(ZEROS[:1], inner, rule)
    factors = (1.0, -0.5, 0.5, 1.0, 1.0, 0.25, -1.0, 0.5, 0.5, 1.0, 0.5)
    given = [[GRADIENTS[0] * np.float32(factor)] for factor in factors]
    for gradients in given:
        scale = harness.scale()
        harness.take_for_scaled()
        harness.step([gradient * scale for gradient in gradients])
    assert harness.counters()[1] == 0
    assert scale == (rule.scale if isinstance(rule, FixedScale) else 2.0**120)
    for found, expected in zip(harness.parameters(), moved_by(inner, given), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_small_float16_gradients_survive_a_large_scale(wrapper):
    harness = wrapper.make(ZEROS, "plain", FixedScale(2.0**30))
    harness.take_for_scaled()
    harness.step([np.full(value.shape, 1.5, np.float16) for value in VALUES])
    for value in harness.parameters():
        np.testing.assert_array_equal(value, np.float32(-1.5 * 2.0**-30))


@pytest.mark.usefixtures("optimized")
def test_other_scales_divide_to_within_a_rounding(wrapper):
    harness = wrapper.make(ZEROS, "plain", FixedScale(3.0))
    harness.take_for_scaled()
    harness.step([np.full(value.shape, 10.0, np.float32) for value in VALUES])
    # Compilers may turn a division by a scalar into a multiplication by its reciprocal.
    is_exact = not wrapper.compiles and wrapper.backend != "jax"
    for value in harness.parameters():
        exact = np.full(value.shape, -(np.float32(10) / np.float32(3)), np.float32)
        np.testing.assert_array_max_ulp(value, exact, maxulp=1)
        assert (value == exact).all() or not is_exact


def test_a_scaled_float16_loss_does_not_overflow(wrapper):
    harness = wrapper.make(VALUES, "sgd", FixedScale(2.0**20))
    assert harness.scale_loss(np.float16(1000.0)) == np.float32(1000 * 2.0**20)


# 5. What the inner optimizer does to gradients, it does to unscaled ones, on applied steps only:
#    the clipping, decaying, averaging and accumulating rows of promise 1.


# 6. State survives save and load exactly: test_random_programs.py, test_keras_files.py.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("saves", "loads", "scales"),
    [(1, 1, (4.0, 2.0)), (1, 2, (4.0, 4.0)), (2, 1, (8.0, 4.0)), (2, 2, (8.0, 4.0))],
)
def test_a_count_of_overflows_goes_through_files_both_ways(wrapper, saves, loads, scales, tmp_path):
    if wrapper.like or (wrapper.compiles and not wrapper.is_native):
        pytest.skip("it is saved as where it runs eagerly, or as another one is")
    saved, loaded = (
        wrapper.make(VALUES, "sgd", DynamicScale(8.0, overflows_before_backoff=waits))
        for waits in (saves, loads)
    )
    # So that what the file does not have cannot be a value from before.
    for harness in (saved, loaded):
        harness.step(spoiled(np.inf))
    saved.save(tmp_path / "state.weights.h5")
    keeps = wrapper.keras == "tf_keras" and saves < loads
    # TensorFlow keeps what a checkpoint lacks, and says so.
    with pytest.raises(AssertionError, match="overflows") if keeps else contextlib.nullcontext():
        loaded.load(tmp_path / "state.weights.h5")
    assert loaded.scale() == scales[0]
    loaded.step(spoiled(np.inf))
    assert loaded.scale() == (2.0 if keeps else scales[1])


# 8. None passes, and a step without any gradient is no step.


def test_variables_without_a_gradient_are_left_alone(wrapper):
    harness = wrapper.make(VALUES, "sgd", DynamicScale(8.0, growth_interval=2))
    before = harness.parameters()
    with wrapper.missing_gradient():
        harness.step([GRADIENTS[0], None])
    after = harness.parameters()
    np.testing.assert_array_equal(after[0], before[0] - np.float32(0.5) * GRADIENTS[0])
    same_bits(after[1:], before[1:])
    assert harness.counters() == (1, 0, False, 1)


def no_step(wrapper, harness):
    """Whether nothing was counted. A transformation of Optax runs with nothing to do, too."""
    counters = harness.counters()
    return counters == (0, 0, False, 0 if wrapper.is_an_object else counters[3])


def test_no_gradients_at_all_change_nothing(wrapper):
    harness = wrapper.make(VALUES, "sgd", DynamicScale(8.0, growth_interval=1))
    before = harness.parameters()
    harness.apply_nothing()
    assert no_step(wrapper, harness)
    # PyTorch's optimizers take such a step, and so must a process that has none of the gradients.
    error = pytest.raises(ValueError, match="No gradients")
    with contextlib.nullcontext() if wrapper.is_native else error:
        harness.step([None, None])
    same_bits(harness.parameters(), before)
    assert harness.scale() == 8.0
    assert no_step(wrapper, harness)
    if wrapper.is_an_object and not wrapper.is_native:
        with pytest.raises(ValueError, match="empty list"):
            harness.optimizer.apply_gradients([])


# 9. Loss scaling is not applied twice, nor to something that is no optimizer.


def test_wrapping_a_wrapped_optimizer_is_a_type_error(wrapper):
    harness = wrapper.make(VALUES, "sgd", DynamicScale())
    for wrapped in (harness.optimizer, harness.framework_wrapper()):
        with pytest.raises(TypeError, match=r"Wrap its inner optimizer|already has loss scaling"):
            wrapper.wrap(wrapped)
    # A transformation of Optax keeps nothing, and may be inside of several.
    if wrapper.is_an_object:
        with pytest.raises(TypeError, match="already wraps this"):
            wrapper.wrap(harness.inner_optimizer)


def test_a_framework_does_not_put_its_own_class_around_ours(wrapper):
    harness = wrapper.make(VALUES, "sgd", DynamicScale())
    if not wrapper.is_an_object:
        pytest.skip("a transformation of Optax may be inside of several")
    with pytest.raises(TypeError, match=r"LossScaleOptimizer"):
        type(harness.framework_wrapper())(harness.optimizer)


@pytest.mark.parametrize("wrong", ["adam", None, 3, "a class", lambda: None])
def test_wrapping_no_optimizer_is_a_type_error(wrapper, wrong):
    wrong = wrapper.harness.optimizers().SGD if wrong == "a class" else wrong
    with pytest.raises(TypeError, match=r"must be an (optimizer|Optax transformation)"):
        wrapper.wrap(wrong)


# A fixed scale checks nothing unless it is asked to.


@pytest.mark.parametrize("skips", [False, True])
def test_a_fixed_scale_applies_what_it_gets_or_skips_when_it_is_asked_to(wrapper, skips):
    harness = wrapper.make(VALUES, "sgd", FixedScale(8.0, skip_nonfinite=skips))
    before = harness.parameters()
    harness.step(spoiled(np.inf))
    if skips:
        same_bits(harness.parameters(), before)
    assert bool(np.isfinite(harness.parameters()[0]).all()) is skips
    assert harness.scale() == 8.0
    assert harness.counters()[1:] == (int(skips), skips, 1)
