"""What this release of Keras 3 has of what it does not document."""

import tempfile

import keras
import numpy as np
import pytest

import lossscale
from lossscale.errors import UnsupportedError
from lossscale.keras import private_names


@pytest.fixture(scope="module")
def holders():
    """An object of each kind."""
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    layer = model.layers[0]
    compiled = keras.Model(model.inputs, model.outputs)
    compiled.compile(optimizer, "mse")
    return {
        "optimizers": optimizer,
        "models": compiled,
        "sequentials": model,
        "layers": layer,
        "compiled_losses": model._compile_loss,
        "tensors": model.outputs[0],
    }


ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


def test_attributes_mean_what_is_assumed(holders):
    optimizer, layer = holders["optimizers"], holders["layers"]
    assert optimizer._iterations is optimizer.iterations
    assert list(optimizer._trainable_variables) == list(layer.trainable_variables)
    assert len({optimizer._var_key(variable) for variable in layer.trainable_variables}) == 2
    with pytest.raises(ValueError, match="variable"):
        optimizer._check_variables_are_known([keras.Variable(1.0)])
    assert holders["compiled_losses"]._user_loss == "mse"
    assert holders["tensors"]._keras_history[0] is layer
    assert isinstance(holders["sequentials"]._functional, keras.Function)
    assert not isinstance(holders["sequentials"], keras.Function)
    assert isinstance(holders["models"], keras.Function)


def test_modules_and_functions_are_those_that_are_meant():
    assert private_names.trainer().LossScaleOptimizer is keras.optimizers.LossScaleOptimizer
    assert not private_names.in_stateless_scope()
    with keras.StatelessScope():
        assert private_names.in_stateless_scope()


def test_what_is_saved_may_be_a_loss():
    class Counted(keras.losses.Loss):
        asked = 0

        def save_own_variables(self, store):
            self.asked += 1

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.counted = Counted(name="counted")
    path = tempfile.mkdtemp() + "/a.weights.h5"
    model.save_weights(path)
    assert model.counted.asked == 1


def test_what_lists_a_variable_is_called_for_those_that_are_added():
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    listed = []
    optimizer.__dict__["_track_variable"] = listed.append
    optimizer.build([keras.Variable(np.ones(2, "float32"))])
    assert any(variable is optimizer.momentums[0] for variable in listed)


@pytest.mark.skipif(not ON_TENSORFLOW, reason="of TensorFlow")
def test_the_sum_over_replicas_is_one_method():
    optimizer = keras.optimizers.SGD(0.5)
    summed = []
    optimizer.__dict__["_all_reduce_sum_gradients"] = lambda pairs: summed.append(1) or list(pairs)
    weight = keras.Variable(np.ones(2, "float32"))
    optimizer.apply_gradients([(keras.ops.ones(2), weight)])
    assert summed == [1]
    assert weight.numpy().tolist() == [0.5, 0.5]


@pytest.mark.skipif(not ON_TENSORFLOW, reason="of TensorFlow")
@pytest.mark.filterwarnings("ignore::lossscale.LossScaleWarning")
def test_without_it_gradients_are_not_summed_twice_in_silence(monkeypatch):
    weight = keras.Variable(np.ones(2, "float32"))
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    base = next(c for c in keras.optimizers.SGD.__mro__ if "_all_reduce_sum_gradients" in vars(c))
    monkeypatch.delattr(base, "_all_reduce_sum_gradients")
    with pytest.raises(
        UnsupportedError, match=r"SGD\._all_reduce_sum_gradients.* to apply gradients that"
    ):
        optimizer.apply_gradients([(keras.ops.ones(2), weight)], skip_gradients_aggregation=True)
    assert weight.numpy().tolist() == [1.0, 1.0]
