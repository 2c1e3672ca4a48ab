"""The experiment of the demo: that it shows underflow and nothing else, and stays cheap.

PyTorch's and Optax' runs without Keras are those of the experiment too.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("keras")

from lossscale.cli.main import build_parser
from lossscale.demo import experiment, optax_training, torch_training, training

FLOAT32, UNSCALED, FIXED, DYNAMIC = experiment.RECIPES
NATIVE = {"torch": torch_training, "optax": optax_training}
WAYS = {"keras": training, **NATIVE}


@pytest.fixture(scope="module")
def data():
    return experiment.load_digits(seed=0)


@pytest.fixture(scope="module")
def weights():
    return training.first_weights(seed=0)


def test_all_digits_are_there_once(data):
    assert data.images.shape == (1437, 8, 8)
    assert data.test_images.shape == (360, 8, 8)
    assert data.images.dtype == np.float32
    assert (data.images.min(), data.images.max()) == (0, 1)
    assert set(data.test_labels.tolist()) == set(range(10))
    assert len(data.labels) + len(data.test_labels) == 1797


def test_the_seed_chooses_the_test_images(data):
    assert np.array_equal(experiment.load_digits(0).test_images, data.test_images)
    assert not np.array_equal(experiment.load_digits(1).test_images, data.test_images)


def test_both_precisions_start_from_the_same_weights(weights):
    for one, other in zip(
        weights, training.build_model("mixed_float16", seed=0).get_weights(), strict=True
    ):
        assert one.dtype == other.dtype == np.float32
        assert np.array_equal(one, other)
    changed = training.build_model("float32", seed=1).get_weights()
    assert not np.array_equal(weights[0], changed[0])


def test_float32_gradients_lie_below_the_range_of_float16(data, weights):
    gradients = training.make_probe(data, 0).gradients(weights)
    smallest = float(np.finfo(np.float16).smallest_subnormal)
    assert gradients.size == sum(weight.size for weight in weights)
    assert np.isfinite(gradients).all()
    # Those that all others are computed from, by the logits, are shares of one image of a batch.
    assert smallest / 2 > 1 / experiment.BATCH / experiment.OUTPUTS
    # Sums of them are a little larger.
    gradients = np.abs(gradients[gradients != 0])
    assert (gradients < smallest / 2).mean() > 0.9
    assert (gradients * experiment.OUTPUTS < smallest / 2).mean() < 0.01
    assert gradients.max() * experiment.OUTPUTS < float(np.finfo(np.float16).max)


def test_without_keras_the_gradients_are_the_same(data):
    found = [way.make_probe(data, 0).gradients(way.first_weights(0)) for way in NATIVE.values()]
    # PyTorch's matrices have outputs first.
    assert np.sort(found[0]) == pytest.approx(np.sort(found[1]), rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_measured_in_float16_they_are_zero_without_a_scale_and_right_with_one(way, data):
    probe, weights = way.make_probe(data, 0), way.first_weights(0)
    reference = probe.gradients(weights)
    assert not probe.gradients(weights, half=True).any()
    assert probe.share_flushed(weights, 1.0) == 1.0
    scaled = probe.gradients(weights, experiment.OUTPUTS, half=True)
    difference = np.linalg.norm(scaled / experiment.OUTPUTS - reference)
    assert difference < 0.1 * np.linalg.norm(reference)
    if way is training:
        assert probe.share_flushed(weights, experiment.OUTPUTS) < 0.01
    report = probe.report(weights)
    assert report.verdict == "needed"
    assert report.rule.min_scale < experiment.OUTPUTS < 2.0**40


def test_the_recorded_gradient_is_the_slope_of_the_loss(data, weights):
    probe = training.make_probe(data, seed=0, outputs=1)
    bias = probe.gradients(weights)[-10:]
    # The gradient of the last bias: mean of softmax minus the share of the label.
    model = training.build_model("float32", seed=0)
    images, labels = data.images[: experiment.BATCH], data.labels[: experiment.BATCH]
    expected = (model.predict(images, verbose=0) - np.eye(10)[labels]).mean(axis=0)
    assert bias == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_float16_stays_cheap_without_hardware_for_it(weights):
    # Without a fast kernel a product takes some 10 ns, at worst some more. All float16 runs
    # together: forward, and twice backward, on the training images and those of the probe; and
    # forward on the test images.
    model = training.build_model("mixed_float16", seed=0)
    assert {type(layer).__name__ for layer in model.layers} == {"Flatten", "Dense", "Activation"}
    products = sum(weight.size for weight in weights if weight.ndim == 2)
    epochs = build_parser().parse_args(["demo"]).epochs
    images_seen = epochs * (3 * (1437 + experiment.BATCH) + experiment.TEST_IMAGES)
    runs = sum(recipe.policy == "mixed_float16" for recipe in experiment.RECIPES)
    assert runs * images_seen * products * 20e-9 < 15


def test_dividing_the_loss_changes_nothing_in_float32(data):
    divided = training.train(FLOAT32, data, epochs=1, seed=0)
    plain = training.train(FLOAT32, data, epochs=1, seed=0, outputs=1)
    assert divided.accuracy == plain.accuracy


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_float16_without_scaling_learns_where_the_loss_is_not_divided(way, data):
    # The control: what stops the demo's second run is the size of the gradients and not float16.
    plain = way.train(UNSCALED, data, epochs=3 if way is training else 2, seed=0, outputs=1)
    assert plain.accuracy[-1] > 0.8


def assert_backs_off(scales, skipped):
    """Every skip halves the scale, and nothing else moves it; returns the scale after the last."""
    scale = scales[0]
    for used, skip in zip(scales, skipped, strict=True):
        assert used == scale
        scale = scale / 2 if skip else scale
    return scale


@pytest.mark.parametrize("recipe", [FIXED, DYNAMIC], ids=lambda recipe: recipe.name)
def test_runs_are_repeatable_and_record_every_step(data, recipe):
    calls = []
    # What could differ from run to run, both do alike.
    times = 2 if recipe is DYNAMIC else 1
    first, *again = (
        training.train(recipe, data, epochs=1, seed=0, after_epoch=calls.append)
        for _ in range(times)
    )
    for second in again:
        assert first.accuracy == second.accuracy
        assert first.scales == second.scales
    assert len(first.scales) == len(first.skipped) == 22
    assert calls == [first, *again]
    assert first.final_scale == assert_backs_off(first.scales, first.skipped)
    assert any(first.skipped) == (recipe is DYNAMIC)


@pytest.mark.parametrize("way", NATIVE.values(), ids=NATIVE)
def test_without_keras_float16_learns_only_with_scaling(way, data):
    float32, unscaled, fixed, dynamic = (
        way.train(recipe, data, epochs=2, seed=0) for recipe in experiment.RECIPES
    )
    assert float32.accuracy[-1] > 0.85
    assert unscaled.accuracy[-1] < 0.3
    assert fixed.accuracy[-1] == pytest.approx(float32.accuracy[-1], abs=0.05)
    assert dynamic.accuracy[-1] > 0.7
    assert any(dynamic.skipped)
    assert not any(fixed.skipped)
    assert_backs_off(dynamic.scales[:30], dynamic.skipped[:30])


@pytest.mark.parametrize("way", NATIVE.values(), ids=NATIVE)
def test_the_share_that_is_flushed_is_measured_after_each_epoch(way, data):
    found = way.train(UNSCALED, data, epochs=2, seed=0, probe=way.make_probe(data, 0))
    assert found.flushed == [1.0, 1.0]
