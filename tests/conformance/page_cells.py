"""What wrappers keep of TensorFlow's pages: a function for each entry of page_cells.toml.

`at` is a `Program`: a wrapper, and the functions of its framework.
"""

import inspect
import json

import numpy as np
import pytest

from conformance.page_matrix import CURRENT, EXPERIMENTAL, entries
from conformance.recordings import same_bits

INF = float("inf")


def _by_hand(at, optimizer, var, loss, **arguments):
    gradients = at.gradients(lambda: optimizer.get_scaled_loss(loss()), [var])
    gradients = optimizer.get_unscaled_gradients(gradients)
    return optimizer.apply_gradients(zip(gradients, [var], strict=True), **arguments)


def _is_refused(at, error, call, *state, match=None):
    before = at.state(*state)
    with pytest.raises(error, match=match):
        at.step(call)()
    same_bits(before, at.state(*state))


def _train(optimizer, first, second):
    optimizer.minimize(lambda: first[0] ** 2 + first[1] ** 2 + second**2, [first, second])


def _trained(at, inner, steps=1):
    optimizer, first, second = at.new(inner), at.variable([1.0, 2.0]), at.variable(3.0)
    for _ in range(steps):
        _train(optimizer, first, second)
    return optimizer, first, second


def _halves(at, optimizer, var, call):
    """Two steps by `call`, which halves the variable of a case and returns how many there were."""
    step = at.step(call)
    for expected in (1, 2):
        assert at.number(step()) == at.number(optimizer.iterations) == expected
        assert at.number(var) == 0.5**expected


def does_as_the_pseudocode(at):
    optimizer, var, loss = at.case()
    scale = at.loss_scale(optimizer)
    (by_hand,) = at.gradients(lambda: loss() * scale, [var])
    (ours,) = optimizer.get_gradients(loss, [var])
    assert at.number(by_hand / scale) == at.number(ours) == 2.0


def scales_what_is_between(at):
    optimizer, var = at.new(scale=2.0**15), at.variable()

    def loss():
        # The gradient of the scaled loss is 4 * 2**15, which float16 does not have.
        return at.ops.cast(var, "float16") * 4

    (gradient,) = at.step(lambda: optimizer.get_gradients(loss, [var]))()
    assert at.number(gradient) == INF
    at.step(lambda: optimizer.minimize(loss, [var]))()
    assert (at.number(var), at.number(optimizer.steps_skipped)) == (1.0, 1)


def is_fixed_or_moves(at):
    for fixed, expected in ((True, (8.0, -INF)), (False, (4.0, 1.0))):
        optimizer, var = at.new(fixed=fixed), at.variable()
        before = at.loss_scale(optimizer)
        at.step(lambda o=optimizer, v=var: o.minimize(lambda: v * INF, [v]))()
        # A tensor, which does not move with the optimizer.
        assert (at.array(before).dtype, at.array(before).shape) == (np.float32, ())
        assert at.number(before) == 8.0
        assert (at.number(at.loss_scale(optimizer)), at.number(var)) == expected


def loss_scale_is_an_object(at):
    loss_scale = at.experimental.DynamicLossScale(8)
    assert at.wrapper(at.inner(), loss_scale).loss_scale is loss_scale


def updates_by_the_loss_scale(at):
    class Counting(at.experimental.LossScale):
        updates = 0

        def __call__(self):
            return at.tensor(8.0)

        def update(self, grads):
            self.updates += 1
            return None, True

        def get_config(self):
            return {}

    loss_scale, var = Counting(), at.variable()
    optimizer = at.wrapper(at.inner(), loss_scale)
    optimizer.minimize(lambda: var**2, [var])
    _by_hand(at, optimizer, var, lambda: var**2)
    assert (loss_scale.updates, at.number(var)) == (2, 0.25)


def minimizes_without_variables(at):
    optimizer, var, loss = at.case()
    _halves(at, optimizer, var, lambda: optimizer.minimize(loss))


def minimize_is_a_step(at):
    optimizer, var, loss = at.case(period=1)
    other = at.variable(2.0)
    # Without a warning, which would be an error.
    _halves(
        at,
        optimizer,
        var,
        lambda: optimizer.minimize(lambda: loss() + other**2, [var], name="a_step"),
    )
    assert at.number(at.loss_scale(optimizer)) == 8.0 * 2**2
    assert at.number(other) == 2.0


def trains_by_hand(at):
    optimizer, var, loss = at.case()
    _halves(at, optimizer, var, lambda: _by_hand(at, optimizer, var, loss))


def has_its_aliases_under_install(at):
    tf, made = at.tensorflow(), at.new()
    with at.lossscale.install():
        for root in (tf, tf.compat.v1, tf.compat.v2):
            assert isinstance(made, root.keras.mixed_precision.experimental.LossScaleOptimizer)


def takes_an_optimizer(at):
    inner = at.inner()
    optimizer = at.new(inner)
    assert isinstance(optimizer, at.optimizers.Optimizer)
    assert optimizer.inner_optimizer is inner
    for wrong in ("sgd", type(inner), 8, object()):
        with pytest.raises(TypeError, match="must be an optimizer to wrap"):
            at.new(wrong)


def takes_what_stands_for_a_loss_scale(at):
    for given, expected in (
        ("dynamic", at.experimental.DynamicLossScale()),
        (8, at.experimental.FixedLossScale(8)),
        (8.0, at.experimental.FixedLossScale(8)),
    ):
        for loss_scale in (given, expected):
            found = at.wrapper(at.inner(), loss_scale).loss_scale
            assert type(found) is type(expected)
            assert found.get_config() == expected.get_config()


def dynamic_is_a_bool(at):
    assert at.wrapper(at.inner()).dynamic is True
    assert at.new(fixed=True).dynamic is False
    for wrong in ("dynamic", 8, None, np.bool_(True)):
        with pytest.raises(TypeError, match="`dynamic` must be True or False"):
            at.wrapper(at.inner(), wrong)


def a_fixed_scale_is_given(at):
    optimizer = at.wrapper(at.inner(), dynamic=False, initial_scale=8)
    assert at.number(optimizer.loss_scale) == optimizer.initial_scale == 8.0
    assert (optimizer.dynamic_growth_steps, optimizer.dynamic_counter) == (None, None)
    for wrong in ({}, {"initial_scale": 8, "dynamic_growth_steps": 2}):
        with pytest.raises(ValueError, match=r"initial_scale|dynamic_growth_steps"):
            at.wrapper(at.inner(), dynamic=False, **wrong)


def starts_at_the_initial_scale(at):
    optimizer = at.wrapper(at.inner(), initial_scale=4)
    assert (optimizer.initial_scale, type(optimizer.initial_scale)) == (4.0, float)
    assert at.number(optimizer.loss_scale) == 4.0
    by_default = at.wrapper(at.inner())
    assert (by_default.initial_scale, by_default.dynamic_growth_steps) == (2.0**15, 2000)
    assert (at.number(by_default.dynamic_counter), by_default.dynamic) == (0, True)


def iterations_count_all_steps(at):
    optimizer, var = at.new(at.inner("Adam", epsilon=0.0)), at.variable()
    step = at.step(lambda factor: optimizer.minimize(lambda: factor * var, [var]))

    def counts():
        counters = (optimizer.iterations, optimizer.inner_optimizer.iterations)
        return [*map(at.number, counters), optimizer.get_weights()[0]]

    for factor in (1.0, INF, INF):
        step(at.tensor(factor))
    assert counts() == [3, 1, 1]
    optimizer.iterations.assign(10)
    assert counts() == [10, 8, 8]
    step(at.tensor(1.0))
    assert counts() == [11, 9, 9]
    # Below the number of skips.
    optimizer.iterations = 1
    assert counts() == [1, 0, 0]
    optimizer.iterations.assign(0)
    step(at.tensor(1.0))
    assert counts() == [1, 1, 1]
    assert np.isfinite(at.number(var))


def has_a_learning_rate(at):
    for name in ("learning_rate", "lr"):
        optimizer, var, loss = at.case()
        assert at.number(getattr(optimizer, name)) == 0.25
        setattr(optimizer, name, 0.5)
        assert at.number(optimizer.inner_optimizer.learning_rate) == 0.5
        assert at.number(optimizer.learning_rate) == at.number(optimizer.lr) == 0.5
        optimizer.minimize(loss, [var])
        assert at.number(var) == 0.0


def weights_are_in_order(at):
    optimizer, *_ = _trained(at, at.inner(momentum=0.5), steps=3)
    for weights in (optimizer.weights, optimizer.get_weights()):
        count, *momenta = map(at.array, weights)
        assert (count, [each.shape for each in momenta]) == (3, [(2,), ()])
    arrays = optimizer.get_weights()
    assert isinstance(arrays, list)
    assert all(isinstance(each, (np.ndarray, np.generic)) for each in arrays)
    arrays[1][:] = 0.0
    assert (optimizer.get_weights()[1] != 0.0).all()


def variables_are_a_list_and_a_method(at):
    optimizer, *_ = _trained(at, at.inner(momentum=0.5))
    ids = [id(each) for each in optimizer.variables()]
    assert ids == [id(each) for each in optimizer.variables]
    assert len(set(ids)) == len(ids)
    # Those of the loss scale too, which `weights` leaves out.
    assert set(ids) > {id(each) for each in optimizer.weights}
    assert id(optimizer.dynamic_counter) in ids
    assert id(optimizer.dynamic_counter) not in [id(each) for each in optimizer.weights]


def has_the_signature(at):
    for member, (signature,) in entries()["has_the_signature"].members.items():
        inside = signature.partition("(")[2].rstrip(")").removeprefix("cls, ")
        documented = [each.split("=") for each in inside.split(", ") if each]
        found = list(inspect.signature(getattr(at.new(), member)).parameters.values())
        for ours, (name, *default) in zip(found, documented, strict=False):
            assert (ours.name, ours.kind) == (name, ours.POSITIONAL_OR_KEYWORD)
            if default:
                # By the last name: Keras 3 has no enumerations, but names for their values.
                expected = default[0].strip("'").rpartition(".")[2]
                given = getattr(ours.default, "name", ours.default)
                assert (
                    given == {"AUTO": None, "NONE": "none"}.get(expected) or str(given) == expected
                )
        # More may follow; the documented ones come first, so that they can be given by position.
        assert len(found) >= len(documented)
        for ours in found[len(documented) :]:
            assert ours.default is not ours.empty or ours.kind is not ours.POSITIONAL_OR_KEYWORD


def slots_are_added(at):
    optimizer, var, loss = at.case(at.inner(momentum=0.5))
    slot = optimizer.add_slot(var, "average")
    optimizer.minimize(loss, [var])
    assert at.number(slot) == 0.0
    assert optimizer.get_slot(var, "average") is optimizer.add_slot(var, "average") is slot
    ones = optimizer.add_slot(at.variable([1.0, 2.0]), "average", initializer="ones")
    assert at.array(ones).tolist() == [1.0, 1.0]
    peak = optimizer.add_slot(var, "peak", at.keras.initializers.Constant(5.0))
    assert at.number(peak) == 5.0
    assert set(optimizer.get_slot_names()) == {"momentum", "average", "peak"}
    for listed in (optimizer.variables, optimizer.weights):
        assert any(each is slot for each in listed)


def weights_are_added(at):
    optimizer = at.new()
    weight = optimizer.add_weight("extra", (2, 3))
    assert at.array(weight).tolist() == [[0.0] * 3] * 2
    assert at.array(weight).dtype == np.float32
    counter = optimizer.add_weight("counter", [], dtype="int32", initializer="ones")
    assert at.number(counter) == 1
    assert optimizer.add_weight("w", (), trainable=True).trainable


def slots_are_found(at):
    optimizer, first, second = _trained(at, at.inner(momentum=0.5))
    assert optimizer.get_slot_names() == ["momentum"]
    for var, expected in ((first, [-0.5, -1.0]), (second, -1.5)):
        assert at.array(optimizer.get_slot(var, "momentum")).tolist() == expected
    said = r"^SGD has no slot '\w+' for the variable .* Its slots are \['momentum'\]"
    for wrong in ((first, "nothing"), (at.variable(), "momentum")):
        with pytest.raises(KeyError, match=said):
            optimizer.get_slot(*wrong)
    # By the names of that time; after one step with the gradients 2 and 4.
    means, squares = [1.0, 2.0], [2.0, 8.0]
    of_rmsprop = {"rho": 0.5, "momentum": 0.5, "centered": True}
    for name, settings, slots in (
        ("Adam", {"beta_1": 0.5, "beta_2": 0.5}, {"m": means, "v": squares}),
        ("RMSprop", of_rmsprop, {"rms": squares, "mg": means, "momentum": None}),
        ("Adagrad", {"initial_accumulator_value": 1.0}, {"accumulator": [5.0, 17.0]}),
        ("Adadelta", {}, {"accum_grad": None, "accum_var": None}),
        ("Adamax", {"beta_1": 0.5}, {"m": means, "v": [2.0, 4.0]}),
        ("Nadam", {}, {"m": None, "v": None}),
        ("Ftrl", {}, {"accumulator": None, "linear": None}),
    ):
        optimizer, first, _ = _trained(at, at.inner(name, **settings))
        if at.keras.__name__ == "tf_keras":
            assert set(optimizer.get_slot_names()) == set(slots)
        for slot, values in slots.items():
            found = at.array(optimizer.get_slot(first, slot))
            assert found.shape == (2,)
            if values is not None:
                np.testing.assert_allclose(found, values, rtol=1e-6)


def gradients_are_applied(at):
    for form, arguments in (
        (list, {}),
        (tuple, {"name": None}),
        (iter, {"name": "a_step"}),
        (lambda pairs: [list(pair) for pair in pairs], {"experimental_aggregate_gradients": False}),
    ):
        optimizer, var, loss = at.case()

        def step(form=form, arguments=arguments, optimizer=optimizer, var=var, loss=loss):
            (gradient,) = optimizer.get_gradients(loss, [var])
            return optimizer.apply_gradients(form([(gradient, var)]), **arguments)

        _halves(at, optimizer, var, step)


def returns_an_operation(at):
    optimizer, var, loss = at.case()
    assert type(optimizer.minimize(loss, [var])).__name__ == "Operation"


def wrong_pairs_are_refused(at):
    optimizer, var, loss = at.case(period=1)
    optimizer.minimize(loss, [var])
    one = at.tensor(1.0)
    malformed = (None, 1.0, [one], [(one,)], [(one, var, var)], [(var, one)])
    for error, pairs in ((TypeError, malformed), (ValueError, ([], iter([]), [(None, var)]))):
        for wrong in pairs:
            _is_refused(at, error, lambda w=wrong: optimizer.apply_gradients(w), optimizer, var)


def configurations_are_read(at):
    cls = type("Doubled", (at.optimizers.SGD,), {})
    for fixed in (False, True):
        inner = cls(0.25, momentum=0.5, clipnorm=1.0)
        optimizer = at.new(inner, period=None if fixed else 3, fixed=fixed)
        config = optimizer.get_config()
        described = json.loads(json.dumps(at.keras.optimizers.serialize(optimizer)))
        for again in (
            at.wrapper.from_config(config, custom_objects={"Doubled": cls}),
            at.keras.optimizers.deserialize(described, custom_objects={"Doubled": cls}),
        ):
            assert type(again) is type(optimizer)
            assert type(again.inner_optimizer) is cls
            assert again.get_config() == config == optimizer.get_config()
            assert again.inner_optimizer.get_config() == inner.get_config()
            assert again.inner_optimizer is not inner
            for name in ("dynamic", "initial_scale", "dynamic_growth_steps"):
                assert getattr(again, name) == getattr(optimizer, name)
    for wrong in ({}, {"name": "sgd", "learning_rate": 0.1}):
        with pytest.raises(ValueError, match="optimizer needs the key"):
            at.wrapper.from_config(wrong)


def configurations_are_written(at):
    optimizer, var = at.new(period=3), at.variable()
    optimizer.minimize(lambda: var * INF, [var])
    config = optimizer.get_config()
    assert json.loads(json.dumps(config)) == config
    if at.form == CURRENT:
        settings = {"dynamic": True, "initial_scale": 8.0, "dynamic_growth_steps": 3}
        assert settings.items() <= config.items()
        assert {*config, "name"} == {"name", "inner_optimizer", *settings}
    else:
        settings = {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 2.0}
        assert {*config, "name"} == {"name", "optimizer", "loss_scale"}
        assert config["loss_scale"] == {"class_name": "DynamicLossScale", "config": settings}
    again = at.wrapper.from_config(config)
    assert at.number(at.loss_scale(again)) == 8.0
    assert at.number(again.iterations) == 0


def gradients_are_returned(at):
    optimizer, var, loss = at.case()
    other = at.variable(3.0)

    def narrow():
        return at.ops.cast(loss() * other, "float16")

    gradients = at.step(lambda: optimizer.get_gradients(narrow, [var, other]))()
    assert isinstance(gradients, list)
    assert [at.array(each).dtype for each in gradients] == [np.float32] * 2
    assert [at.number(each) for each in gradients] == [6.0, 1.0]
    assert (at.number(var), at.number(optimizer.iterations)) == (1.0, 0)
    _halves(at, optimizer, var, lambda: optimizer.get_updates(loss, [var])[0])


def gradients_of_a_tensor_are_returned(at):
    optimizer, var, loss = at.case()
    (gradient,) = at.step(lambda: optimizer.get_gradients(loss(), [var]))()
    assert at.number(gradient) == 2.0
    at.step(lambda: optimizer.get_updates(loss(), [var]))()
    assert at.number(var) == 0.5


def a_missing_gradient_is_a_value_error(at):
    optimizer, var, loss = at.case()
    optimizer.minimize(loss, [var])
    other = at.variable(1.0)
    for verb in (optimizer.get_gradients, optimizer.get_updates):
        _is_refused(at, ValueError, lambda v=verb: v(loss, [var, other]), optimizer, var, other)


def losses_are_scaled(at):
    optimizer = at.new(scale=2.0**15)
    half = at.tensor(3.0, "float16")
    losses = (at.tensor(3.0), half, 3, 3.0, np.float16(3), np.array(3), [3.0, 3.0])
    found = at.step(lambda: [optimizer.get_scaled_loss(loss) for loss in losses])()
    for loss, scaled in zip(losses, map(at.array, found), strict=True):
        assert (scaled.dtype, scaled.shape) == (np.float32, np.shape(loss))
        assert (scaled == 3 * 2.0**15).all()
    optimizer, var, _ = at.case()
    # It reads the scale when it is called.
    scaled = optimizer.get_scaled_loss(lambda: at.tensor(1.0))
    assert at.number(scaled()) == 8.0
    at.step(lambda: optimizer.minimize(lambda: var * INF, [var]))()
    assert at.number(scaled()) == 4.0


def each_verb_alone_is_warned_of(at):
    optimizer, var, loss = at.case()
    gradients = at.gradients(lambda: optimizer.get_scaled_loss(loss()), [var])
    with pytest.warns(UserWarning, match=r"get_unscaled_gradients\(\) was not"):
        optimizer.apply_gradients(zip(gradients, [var], strict=True))
    optimizer, var, loss = at.case()
    gradients = optimizer.get_unscaled_gradients(at.gradients(loss, [var]))
    with pytest.warns(UserWarning, match="the loss was never scaled"):
        optimizer.apply_gradients(zip(gradients, [var], strict=True))


def gradients_are_unscaled(at):
    optimizer = at.new(scale=2.0**25)
    for form in (list, tuple, iter):
        # The second number is the smallest of float16, which would become zero in it.
        given = [None, at.tensor([4.0, 2.0**-24], "float16"), at.tensor(INF)]
        result = at.step(lambda g=given, f=form: optimizer.get_unscaled_gradients(f(g)))()
        assert isinstance(result, list)
        assert result[0] is None
        assert at.array(result[1]).dtype == np.float32
        assert at.array(result[1]).tolist() == [2.0**-23, 2.0**-49]
        assert at.number(result[2]) == INF
        assert at.array(given[1]).tolist() == [4.0, 2.0**-24]


def weights_go_into_another(at):
    optimizer, first, second = _trained(at, at.inner(momentum=0.5), steps=3)
    other, first2, second2 = _trained(at, at.inner(momentum=0.5))
    scale = at.number(at.loss_scale(other))
    assert other.set_weights(optimizer.get_weights()) is None
    assert at.number(at.loss_scale(other)) == scale
    first2.assign(at.array(first))
    second2.assign(at.array(second))
    _train(optimizer, first, second)
    _train(other, first2, second2)
    same_bits(optimizer.get_weights(), other.get_weights())
    same_bits([at.array(first), at.array(second)], [at.array(first2), at.array(second2)])
    count, *momenta = optimizer.get_weights()
    # A count that is set stays, whatever was skipped.
    optimizer.minimize(lambda: first[0] * INF, [first])
    optimizer.set_weights([np.array(10), *momenta])
    assert optimizer.get_weights()[0] == 10
    for wrong in ([], [count], [count, *momenta, count], [count, np.ones(5), momenta[1]]):
        _is_refused(
            at, ValueError, lambda w=wrong: optimizer.set_weights(w), optimizer, match="weight"
        )


def rmsprop_has_three_weights(at):
    optimizer = at.new(at.inner("RMSprop"))
    kernel, bias = at.variable(np.ones((20, 10), "f4")), at.variable(np.ones(10, "f4"))
    optimizer.build([kernel, bias])
    assert [np.shape(each) for each in optimizer.get_weights()] == [(), (20, 10), (10,)]
    optimizer.set_weights([np.array(10), np.ones([20, 10]), np.zeros([10])])
    assert at.number(optimizer.iterations) == 10
    assert at.number(optimizer.inner_optimizer.iterations) == 10
    assert (at.array(optimizer.get_slot(kernel, "rms")) == 1.0).all()


def calls_apply_gradients(at):
    called = []

    class RecordingOptimizer(type(at.new())):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            called.extend(pairs := list(grads_and_vars))
            return super().apply_gradients(pairs, *args, **kwargs)

    arguments, var = {"loss_scale": 8} if at.form == EXPERIMENTAL else {}, at.variable()
    RecordingOptimizer(at.inner(), **arguments).minimize(lambda: var**2, [var])
    assert [at.number(gradient) for gradient, _ in called] == [2.0]


def takes_variables_in_every_form(at):
    for form in (lambda v: [v], lambda v: (v,), lambda v: v):
        optimizer, var, loss = at.case()
        given = form(var)
        for var_list in (given, lambda given=given: given):
            at.step(lambda o=optimizer, loss=loss, v=var_list: o.minimize(loss, v))()
        assert at.number(var) == 0.25


def takes_variables_that_the_loss_makes(at):
    layer = at.keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    at.new().minimize(lambda: layer(at.tensor([[1.0]])), lambda: layer.trainable_variables)
    assert at.number(layer.kernel) == 0.75


def grad_loss_multiplies(at):
    for dtype in ("float32", "float16"):
        optimizer, var = at.new(), at.variable([1.0, 1.0])

        def step(optimizer=optimizer, var=var, dtype=dtype):
            grad_loss = at.tensor([1.0, 3.0], dtype)
            optimizer.minimize(lambda: at.ops.cast(var**2, dtype), [var], grad_loss)

        at.step(step)()
        assert at.array(var).tolist() == [0.5, -0.5]


def other_objects_are_a_value_error(at):
    optimizer, var, loss = at.case()
    optimizer.minimize(loss, [var])
    for wrong in (1.0, at.tensor(1.0), "var", [None], [var, 1.0]):
        _is_refused(at, ValueError, lambda w=wrong: optimizer.minimize(loss, w), optimizer, var)
