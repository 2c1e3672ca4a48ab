"""The demo without Keras: PyTorch's and Optax' runs are those of the experiment."""

from __future__ import annotations

import numpy as np
import pytest

from lossscale.demo import experiment, images, optax_training, torch_training

FLOAT32, UNSCALED, FIXED, DYNAMIC = experiment.RECIPES
WAYS = [pytest.param(torch_training, id="torch"), pytest.param(optax_training, id="optax")]


@pytest.fixture(scope="module")
def data():
    return images.load_digits(seed=0)


def run(way, recipe, data, **arguments):
    return way.train(recipe, data, epochs=2, seed=0, **arguments)


def test_both_compute_the_same_gradients(data):
    found = [
        way.make_probe(data, 0).gradients("float32", way.first_weights(0))
        for way in (torch_training, optax_training)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_measured_in_float16_they_are_zero_without_a_scale_and_right_with_one(way, data):
    probe, weights = way.make_probe(data, 0), way.first_weights(0)
    assert not probe.gradients("mixed_float16", weights).any()
    assert probe.share_flushed("mixed_float16", weights, 1.0) == 1.0
    scaled = probe.gradients("mixed_float16", weights, experiment.OUTPUTS)
    reference = probe.gradients("float32", weights) * experiment.OUTPUTS
    assert np.linalg.norm(scaled - reference) < 0.1 * np.linalg.norm(reference)


@pytest.mark.parametrize("way", WAYS)
def test_float16_learns_only_with_scaling(way, data):
    float32, unscaled, fixed, dynamic = (run(way, recipe, data) for recipe in experiment.RECIPES)
    assert float32.accuracy[-1] > 0.85
    assert unscaled.accuracy[-1] < 0.3
    assert fixed.accuracy[-1] == pytest.approx(float32.accuracy[-1], abs=0.05)
    assert dynamic.accuracy[-1] > 0.7
    assert any(dynamic.skipped)
    assert not any(fixed.skipped)
    scale = dynamic.scales[0]
    for used, skip in zip(dynamic.scales[:30], dynamic.skipped, strict=False):
        assert used == scale
        scale = scale / 2 if skip else scale


@pytest.mark.parametrize("way", WAYS)
def test_the_control_learns_without_scaling(way, data):
    assert run(way, UNSCALED, data, outputs=1).accuracy[-1] > 0.8


@pytest.mark.parametrize("way", WAYS)
def test_the_share_that_is_flushed_is_measured_after_each_epoch(way, data):
    found = run(way, UNSCALED, data, probe=way.make_probe(data, 0))
    assert found.flushed == [1.0, 1.0]
