"""An HDF5 model of Keras 3 brings back all the state of any of its optimizers in ours."""

import pytest

from conformance import test_keras_files as in_keras
from kerases import INF, assert_same, status
from lossscale_migration import load_model


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("name", in_keras.MAKERS)
def test_a_model_trains_on_from_an_hdf5_file(name, tmp_path):
    ours = in_keras.ours(in_keras.MAKERS[name](), rule=in_keras.RULE)
    saved = in_keras.trained(in_keras.model_with(ours), (INF, INF, 0.5, INF))
    path = tmp_path / "saved.h5"
    try:
        saved.save(path)
    except ValueError as error:
        if "name already exists" not in str(error):
            raise
        pytest.skip("Keras gives two of its variables one name, and cannot write this file")
    loaded = in_keras.built(load_model(path))
    in_keras.assert_arrived(loaded.optimizer, saved.optimizer)
    assert_same(saved.get_weights(), loaded.get_weights())
    assert status(loaded.optimizer)[:4] == (2.0**9, 0, 3, True)
    for model in (saved, loaded):
        in_keras.trained(model, (INF, 0.25))
    assert_same(saved.get_weights(), loaded.get_weights())
