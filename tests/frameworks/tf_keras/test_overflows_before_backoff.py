"""A rule that waits for several overflows in a row, and its count in tf_keras' files."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import lossscale

FAMILIES = {"new": tf_keras.optimizers.SGD, "legacy": tf_keras.optimizers.legacy.SGD}
# Of the legacy optimizers tf_keras writes no state into .weights.h5.
FORMS = [("new", "checkpoint"), ("new", ".weights.h5"), ("legacy", "checkpoint")]
BAD = np.full((1, 2), np.inf, "float32"), np.ones((1, 1), "float32")
CASES = [(1, 2, (4.0, 4.0)), (2, 1, (8.0, 4.0)), (2, 2, (8.0, 4.0))]


def compiled(family, waits):
    model = tf_keras.Sequential([tf_keras.layers.Input((2,)), tf_keras.layers.Dense(1)])
    rule = lossscale.DynamicScale(initial_scale=8.0, overflows_before_backoff=waits)
    inner = FAMILIES[family](0.1)
    model.compile(lossscale.LossScaleOptimizer(inner, rule=rule), "mse")
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "form"), FORMS)
@pytest.mark.parametrize(("saves", "loads", "scales"), CASES)
def test_the_count_goes_through_files_both_ways(family, form, saves, loads, scales, tmp_path):
    model, other = compiled(family, saves), compiled(family, loads)
    model.fit(*BAD, verbose=0)
    path = str(tmp_path / "model.weights.h5")
    if form == "checkpoint":
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
        restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path)
        # TensorFlow logs what one of the two does not have.
        restored.expect_partial()
    else:
        model.save_weights(path)
        # So that what the file does not have cannot be a value from before.
        other.fit(*BAD, verbose=0)
        other.load_weights(path)
    assert float(other.optimizer.loss_scale) == scales[0]
    other.fit(*BAD, verbose=0)
    assert float(other.optimizer.loss_scale) == scales[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_the_count_keeps_it_and_says_so(family, tmp_path):
    model, other = compiled(family, 1), compiled(family, 2)
    for each in (model, other):
        each.fit(*BAD, verbose=0)
    path = tf.train.Checkpoint(optimizer=model.optimizer).write(str(tmp_path / "saved"))
    status = tf.train.Checkpoint(optimizer=other.optimizer).read(path)
    with pytest.raises(AssertionError, match="overflows"):
        status.assert_existing_objects_matched()
    assert float(other.optimizer.loss_scale) == 4.0
    # The first overflow was counted before.
    other.fit(*BAD, verbose=0)
    assert float(other.optimizer.loss_scale) == 2.0
