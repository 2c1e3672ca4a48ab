"""A rule that waits for several overflows in a row, and its count in Keras' files."""

import keras
import numpy as np
import pytest

import lossscale


def compiled(waits):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    rule = lossscale.DynamicScale(initial_scale=8.0, overflows_before_backoff=waits)
    model.compile(lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1), rule=rule), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("saves", "loads", "scale", "next_scale"),
    [(1, 1, 4.0, 2.0), (1, 2, 4.0, 4.0), (2, 1, 8.0, 4.0), (2, 2, 8.0, 4.0)],
)
def test_the_count_goes_through_files_both_ways(saves, loads, scale, next_scale, tmp_path):
    bad = np.full((1, 2), np.inf, "float32"), np.ones((1, 1), "float32")
    model = compiled(saves)
    model.fit(*bad, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    other = compiled(loads)
    # So that what the file does not have cannot be a value from before.
    other.fit(*bad, verbose=0)
    other.load_weights(tmp_path / "model.weights.h5")
    assert float(other.optimizer.loss_scale) == scale
    other.fit(*bad, verbose=0)
    assert float(other.optimizer.loss_scale) == next_scale
