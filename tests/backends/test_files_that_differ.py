"""Weights of optimizers with attributes of their own, and weights that do not fit."""

import keras
import numpy as np
import pytest

from backends.support import arrays, assert_same, model_with, status, wrapped
from held_optimizers import holding, other


def plain(inner):
    return inner


def filled(optimizer):
    """Gives each variable of an optimizer another number; returns their arrays."""
    for number, variable in enumerate(optimizer.variables):
        variable.assign(np.full(variable.shape, number + 2.0).astype(variable.dtype))
    return arrays(optimizer.variables)


class Holding(type(wrapped(other(keras)))):
    """A wrapper with an attribute of its own that Keras saves."""

    def __init__(self, inner):
        super().__init__(inner)
        self.extra = other(keras)


@pytest.mark.parametrize("reads", [Holding, plain])
def test_attributes_of_one_name_of_both_optimizers_are_saved(tmp_path, reads):
    path, found = str(tmp_path / "a.weights.h5"), []
    for wrap in (Holding, reads):
        inner = holding(keras, "extra")
        model = model_with(wrap(inner))
        model.optimizer.build(model.trainable_variables)
        parts = [inner.extra, model.optimizer.extra]
        parts[1].build([])
        if not found:
            found += [filled(part) for part in parts]
            model.save_weights(path)
        else:
            model.load_weights(path)
            found += [arrays(part.variables) for part in parts]
    assert_same(found[0], found[2])
    if reads is Holding:
        assert_same(found[1], found[3])


@pytest.mark.parametrize("built", [False, True], ids=["before build", "after build"])
def test_weights_of_other_shapes_are_refused_as_a_whole(built):
    def variables(count):
        shapes = (2, 3), (count,)
        return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]

    first = wrapped(keras.optimizers.Adam(0.01))
    first.build(variables(2))
    filled(first.inner_optimizer)
    values, own = {}, {}
    first.save_own_variables(values)
    first.loss_scale_state.save_own_variables(own)
    own["dynamic_scale"] = np.float32(4.0)
    targets = variables(5)
    second = wrapped(keras.optimizers.Adam(0.01))
    before = status(second)
    if built:
        second.build(targets)
    if built:
        with pytest.raises(ValueError, match="Nothing was changed"):
            second.load_own_variables(values)
    else:
        second.load_own_variables(values)
    # `skip_mismatch` goes on here.
    second.loss_scale_state.load_own_variables(own)
    if not built:
        with pytest.warns(UserWarning, match="state of the optimizer is not used"):
            second.build(targets)
    assert status(second) == before
    assert not any(array.any() for array in arrays(second.inner_optimizer._momentums))


def test_variables_of_one_name_are_saved_beside_one_another():
    def made():
        optimizer = wrapped(keras.optimizers.SGD(0.1))
        for number, name in enumerate(("steps_skipped", "iteration", "mine", "mine")):
            own = keras.Variable(0.0, name=name, trainable=False)
            setattr(optimizer, f"own_{number}", own)
        return optimizer

    written, read = made(), made()
    for number in range(4):
        getattr(written, f"own_{number}").assign(number + 1.0)
    values = {}
    written.loss_scale_state.save_own_variables(values)
    read.loss_scale_state.load_own_variables(values)
    assert [float(getattr(read, f"own_{number}")) for number in range(4)] == [1, 2, 3, 4]
    assert status(read) == status(written)
