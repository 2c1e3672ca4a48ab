"""The experiment of the demo: that it shows underflow, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("keras")

from lossscale.cli import digits
from lossscale.diagnostics import FLOAT16, share_flushed

FLOAT32, UNSCALED, FIXED, DYNAMIC = digits.RECIPES


@pytest.fixture(scope="module")
def data():
    return digits.load_digits(seed=0)


@pytest.fixture(scope="module")
def probe(data):
    return digits.make_probe(data, seed=0)


@pytest.fixture(scope="module")
def weights():
    return digits.build_model("float32", seed=0).get_weights()


def test_all_digits_are_there_once(data):
    assert data.images.shape == (1437, 8, 8, 1)
    assert data.test_images.shape == (360, 8, 8, 1)
    assert data.images.dtype == np.float32
    assert (data.images.min(), data.images.max()) == (0, 1)
    assert set(data.test_labels.tolist()) == set(range(10))
    assert len(data.labels) + len(data.test_labels) == 1797


def test_the_seed_chooses_the_test_images(data):
    assert np.array_equal(digits.load_digits(0).test_images, data.test_images)
    assert not np.array_equal(digits.load_digits(1).test_images, data.test_images)


def test_both_precisions_start_from_the_same_weights(weights):
    for one, other in zip(
        weights, digits.build_model("mixed_float16", seed=0).get_weights(), strict=True
    ):
        assert one.dtype == other.dtype == np.float32
        assert np.array_equal(one, other)
    changed = digits.build_model("float32", seed=1).get_weights()
    assert not np.array_equal(weights[0], changed[0])


def test_float32_gradients_lie_below_the_range_of_float16(probe, weights):
    gradients = probe.gradients("float32", weights)
    assert gradients.size == sum(weight.size for weight in weights)
    assert np.isfinite(gradients).all()
    assert share_flushed(gradients) > 0.99
    assert share_flushed(gradients, digits.OUTPUTS) < 0.01
    assert np.abs(gradients).max() * digits.OUTPUTS < FLOAT16.overflow_edge


def test_measured_in_float16_they_are_zero_without_a_scale_and_right_with_one(probe, weights):
    reference = probe.gradients("float32", weights)
    assert not probe.gradients("mixed_float16", weights).any()
    assert probe.share_flushed("mixed_float16", weights, 1.0) == 1.0
    scaled = probe.gradients("mixed_float16", weights, digits.OUTPUTS)
    difference = np.linalg.norm(scaled / digits.OUTPUTS - reference)
    assert difference < 0.1 * np.linalg.norm(reference)
    assert probe.share_flushed("mixed_float16", weights, digits.OUTPUTS) < 0.01


def test_the_recorded_gradient_is_the_slope_of_the_loss(data, weights):
    probe = digits.make_probe(data, seed=0, outputs=1)
    bias = probe.gradients("float32", weights)[-10:]
    # The gradient of the last bias: mean of softmax minus the share of the label.
    model = digits.build_model("float32", seed=0)
    images, labels = data.images[: digits.BATCH], data.labels[: digits.BATCH]
    expected = (model.predict(images, verbose=0) - np.eye(10)[labels]).mean(axis=0)
    assert bias == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_dividing_the_loss_changes_nothing_in_float32(data):
    divided = digits.train(FLOAT32, data, epochs=1, seed=0)
    plain = digits.train(FLOAT32, data, epochs=1, seed=0, outputs=1)
    assert divided.accuracy == plain.accuracy


def test_float16_without_scaling_learns_where_the_loss_is_not_divided(data):
    # The control: what stops the demo's second run is the size of the gradients and not float16.
    plain = digits.train(UNSCALED, data, epochs=3, seed=0, outputs=1)
    divided = digits.train(UNSCALED, data, epochs=1, seed=0)
    assert plain.accuracy[-1] > 0.8
    assert divided.accuracy[-1] < 0.3


@pytest.mark.parametrize("recipe", [FIXED, DYNAMIC], ids=lambda recipe: recipe.name)
def test_runs_are_repeatable_and_record_every_step(data, recipe):
    calls = []
    first, second = (
        digits.train(recipe, data, epochs=1, seed=0, after_epoch=calls.append) for _ in range(2)
    )
    assert first.accuracy == second.accuracy
    assert first.scales == second.scales
    assert len(first.scales) == len(first.skipped) == 22
    assert calls == [first, second]
    scale = first.scales[0]
    for used, skip in zip(first.scales, first.skipped, strict=True):
        assert used == scale
        scale = scale / 2 if skip else scale
    assert first.final_scale == scale
    assert any(first.skipped) == (recipe is DYNAMIC)
