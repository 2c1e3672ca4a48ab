"""What this release of Keras 3 has of what it does not document."""

from __future__ import annotations

import tempfile
import weakref

import keras
import pytest

from lossscale.frameworks.keras import private_names


@pytest.fixture(scope="module")
def holders():
    """An object of each kind, by the table of its attributes."""
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    layer = model.layers[0]
    compiled = keras.Model(model.inputs, model.outputs)
    compiled.compile(optimizer, "mse")
    return {
        "OF_OPTIMIZERS": optimizer,
        "OF_MODELS": compiled,
        "OF_SEQUENTIALS": model,
        "OF_LAYERS": layer,
        "OF_COMPILED_LOSSES": model._compile_loss,
        "OF_TENSORS": model.outputs[0],
        "OF_VARIABLES": layer.kernel,
    }


TABLES = [name for name in vars(private_names) if name.startswith("OF_") and name != "OF_SOME"]


@pytest.mark.parametrize("table", TABLES)
def test_every_attribute_is_there(holders, table):
    for name, purpose in getattr(private_names, table).items():
        assert hasattr(holders[table], name), f"{keras.__version__} has no {name}: {purpose}"


def test_attributes_mean_what_is_assumed(holders):
    optimizer, layer = holders["OF_OPTIMIZERS"], holders["OF_LAYERS"]
    assert optimizer._iterations is optimizer.iterations
    assert list(optimizer._trainable_variables) == list(layer.trainable_variables)
    assert len({optimizer._var_key(variable) for variable in layer.trainable_variables}) == 2
    with pytest.raises(ValueError, match="variable"):
        optimizer._check_variables_are_known([keras.Variable(1.0)])
    assert holders["OF_COMPILED_LOSSES"]._user_loss == "mse"
    assert holders["OF_TENSORS"]._keras_history[0] is layer
    assert isinstance(holders["OF_SEQUENTIALS"]._functional, keras.Function)
    assert not isinstance(holders["OF_SEQUENTIALS"], keras.Function)
    assert isinstance(holders["OF_MODELS"], keras.Function)


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


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of JAX")
def test_tracers_have_what_is_assumed():
    import jax

    from lossscale.frameworks.jax.private_names import OF_TRACERS

    def traced(x):
        assert all(hasattr(x, name) for name in OF_TRACERS)
        # The trace is remembered as long as it lives.
        assert weakref.ref(x._trace)() is x._trace
        return x

    jax.jit(traced)(1.0)
