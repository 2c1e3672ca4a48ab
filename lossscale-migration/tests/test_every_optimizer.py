"""An HDF5 model of Keras 3 brings back all the state of any of its optimizers in ours."""

import pytest

from conformance import test_every_optimizer as in_keras
from conformance.recordings import same_bits
from lossscale_migration import load_model


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("name", in_keras.MAKERS)
def test_a_model_trains_on_from_an_hdf5_file(name, tmp_path):
    saved = in_keras.model_with(in_keras.wrapped(in_keras.MAKERS[name]()))
    for gradients in (in_keras.STEPS[0], in_keras.BAD, in_keras.STEPS[1]):
        in_keras.step(saved, gradients)
    path = tmp_path / "saved.h5"
    if not in_keras.can_be_written(saved, path):
        pytest.skip("Keras gives two of its variables one name, and cannot write this file")
    loaded = in_keras.built(load_model(path))
    in_keras.same(in_keras.state(saved.optimizer), in_keras.state(loaded.optimizer))
    same_bits(saved.get_weights(), loaded.get_weights())
    assert float(loaded.optimizer.loss_scale) == in_keras.SCALE / 2
    assert int(loaded.optimizer.steps_skipped) == 1
    for model in (saved, loaded):
        in_keras.step(model, in_keras.STEPS[2])
    same_bits(saved.get_weights(), loaded.get_weights())
