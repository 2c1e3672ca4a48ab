"""Training with the optimizer gives what training without loss scaling gives, bit for bit."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from frameworks.keras.support import (
    INF,
    NAN,
    STEPS,
    assert_same,
    data,
    gradients_for,
    loss_scale_warnings,
    loss_with_gradients,
    native,
    plain_step,
    small_model,
    spoiled,
    status,
    step_by_apply,
    step_by_documented_calls,
    step_by_scale_loss,
    values,
    variables,
    wrapped,
)

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam

# With a state, with what must see unscaled gradients, with branches of their own. The promises
# (tests/conformance) run ten, and every optimizer that there is.
INNERS = {
    "adam": lambda: Adam(0.01),
    "adamw_clipnorm": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05, clipnorm=0.7),
    "ema": lambda: SGD(0.1, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=3),
    "accumulation": lambda: Adam(0.01, gradient_accumulation_steps=3, clipnorm=0.5),
}
START = (np.linspace(-1, 1, 6).reshape(2, 3), np.array([0.5, -0.25]))


@pytest.fixture(params=INNERS)
def make_inner(request):
    return INNERS[request.param]


def train_plain(inner, batches, in_function=False):
    targets = variables(*START)
    inner.build(targets)

    def step(*gradients):
        plain_step(inner, targets, gradients)

    run(step, batches, in_function)
    return values(targets), values(inner.variables)


def train_ours(inner, batches, how, in_function=False, **arguments):
    targets = variables(*START)
    optimizer = wrapped(inner, **arguments)
    optimizer.build(targets)

    def step(*gradients):
        STEPS[how](optimizer, targets, gradients)

    run(step, batches, in_function)
    return optimizer, values(targets), values(inner.variables)


def run(step, batches, in_function):
    step = tf.function(step) if in_function else step
    for gradients in batches:
        step(*map(tf.constant, gradients))


# --- Nothing else changes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_function", "how"),
    # In a function both ways of stepping stand below, wherever they run.
    [(False, "scale_loss"), (False, "documented"), (True, "scale_loss")],
    ids=["eager-scale_loss", "eager-documented", "function-scale_loss"],
)
def test_training_equals_plain_training_bit_for_bit_and_skips_leave_no_trace(
    make_inner, in_function, how
):
    good = gradients_for(START, 7)
    bad = [spoiled(good[0], value) for value in (INF, -INF, NAN)]
    batches = [bad[0], *good[:4], bad[1], bad[2], *good[4:], bad[0]]
    expected = train_plain(make_inner(), good, in_function)
    optimizer, *found = train_ours(make_inner(), batches, how, in_function, dynamic_growth_steps=2)
    for ours, plain in zip(found, expected, strict=True):
        assert_same(ours, plain)
    # Three doublings: the equality is not one of a scale that stood still.
    assert status(optimizer)["scale"] == 2.0**14
    assert status(optimizer)["skipped"] == 4
    assert status(optimizer)["last"] is True


@pytest.mark.parametrize("how", STEPS)
def test_a_skip_changes_no_variable_but_the_scale_and_the_counts(make_inner, how):
    targets = variables(*START)
    inner = make_inner()
    optimizer = wrapped(inner)
    optimizer.build(targets)
    good = gradients_for(targets, 4)
    for gradients in good:
        STEPS[how](optimizer, targets, gradients)
    before = values(targets), values(inner.variables)
    STEPS[how](optimizer, targets, spoiled(good[0], NAN))
    for now, then in zip((values(targets), values(inner.variables)), before, strict=True):
        assert_same(now, then)
    assert status(optimizer)["scale"] == 2.0**14
    assert status(optimizer)["counter"] == 0
    assert status(optimizer)["skipped"] == 1
    assert status(optimizer)["last"] is True


def test_a_constraint_is_not_applied_on_a_skip():
    (target,) = variables([-1.0, 1.0])
    target.constraint = keras.constraints.NonNeg()
    optimizer = wrapped(SGD(0.5))
    step_by_scale_loss(optimizer, [target], [np.array([INF, 0.0], "f")])
    assert target.numpy().tolist() == [-1.0, 1.0]
    step_by_scale_loss(optimizer, [target], [np.array([0.0, 0.5], "f")])
    assert target.numpy().tolist() == [0.0, 0.75]


@pytest.mark.parametrize("skips", [1, 5, 10, 15])
def test_first_adam_update_after_initial_skips_is_of_the_size_of_the_learning_rate(skips):
    rate, targets = 0.5, variables([1.0, 1.0])
    optimizer = wrapped(Adam(rate, epsilon=0.0))
    for _ in range(skips):
        step_by_scale_loss(optimizer, targets, [np.array([NAN, 1.0], "f")])
    step_by_scale_loss(optimizer, targets, [np.array([0.25, -3.0], "f")])
    ratio = (1.0 - targets[0].numpy()) / rate
    # The counting of TensorFlow 2.4 gives 0.744, 0.522, 0.482 and 0.489 here.
    np.testing.assert_allclose(ratio, [1.0, -1.0], rtol=1e-5)
    assert int(optimizer.iterations) == skips + 1
    assert int(optimizer.inner_optimizer.iterations) == 1


def test_accumulation_counts_whole_windows_and_a_skipped_batch_extends_one():
    targets = variables([0.0])
    optimizer = wrapped(SGD(1.0, gradient_accumulation_steps=2))
    seen = []
    for gradient in (1.0, INF, 3.0, 5.0, 7.0):
        step_by_scale_loss(optimizer, targets, [np.array([gradient], "f")])
        seen.append(targets[0].numpy().item())
    assert seen == [0.0, 0.0, -2.0, -2.0, -8.0]
    assert int(optimizer.inner_optimizer.iterations) == 2


# --- The two ways of stepping, in every mixture of eager and traced ------------------------------


def all_eager(optimizer, targets, scale, unscale):
    def step(*gradients):
        with tf.GradientTape() as tape:
            loss = scale(loss_with_gradients(targets, gradients))
        found = unscale(tape.gradient(loss, native(targets)))
        optimizer.apply_gradients(zip(found, targets, strict=True))

    return step


def all_in_one_function(*arguments):
    return tf.function(all_eager(*arguments))


def apply_outside(optimizer, targets, scale, unscale):
    @tf.function
    def differentiate(*gradients):
        with tf.GradientTape() as tape:
            loss = scale(loss_with_gradients(targets, gradients))
        return unscale(tape.gradient(loss, native(targets)))

    def step(*gradients):
        optimizer.apply_gradients(zip(differentiate(*gradients), targets, strict=True))

    return step


def apply_inside(optimizer, targets, scale, unscale):
    @tf.function
    def apply(*found):
        optimizer.apply_gradients(zip(found, targets, strict=True))

    def step(*gradients):
        with tf.GradientTape() as tape:
            loss = scale(loss_with_gradients(targets, gradients))
        apply(*unscale(tape.gradient(loss, native(targets))))

    return step


def two_functions(optimizer, targets, scale, unscale):
    @tf.function
    def differentiate(*gradients):
        with tf.GradientTape() as tape:
            loss = scale(loss_with_gradients(targets, gradients))
        return unscale(tape.gradient(loss, native(targets)))

    @tf.function
    def apply(*found):
        optimizer.apply_gradients(zip(found, targets, strict=True))

    return lambda *gradients: apply(*differentiate(*gradients))


def nested_functions(optimizer, targets, scale, unscale):
    return tf.function(two_functions(optimizer, targets, scale, unscale))


def scaled_in_a_nested_function(optimizer, targets, scale, unscale):
    return tf.function(apply_outside(optimizer, targets, scale, unscale))


def applied_in_a_nested_function(optimizer, targets, scale, unscale):
    return tf.function(apply_inside(optimizer, targets, scale, unscale))


def loop_in_a_function(optimizer, targets, scale, unscale):
    once = all_eager(optimizer, targets, scale, unscale)

    @tf.function
    def step(*gradients):
        for _ in tf.range(1):
            once(*gradients)

    return step


PLACES = [
    all_eager,
    all_in_one_function,
    apply_outside,
    apply_inside,
    two_functions,
    nested_functions,
    scaled_in_a_nested_function,
    applied_in_a_nested_function,
    loop_in_a_function,
]


def ways_of_stepping(optimizer):
    return {
        "scale_loss": (optimizer.scale_loss, list),
        "documented": (optimizer.get_scaled_loss, optimizer.get_unscaled_gradients),
    }


@functools.cache
def plain_path():
    """The gradients of 12 steps, and the weights after each step of a plain optimizer."""
    batches, optimizer, targets = (
        gradients_for(START, 12),
        SGD(0.5, momentum=0.9),
        variables(*START),
    )
    weights = []
    for gradients in batches:
        plain_step(optimizer, targets, gradients)
        weights.append(values(targets))
    return batches, weights


# Where a traced half is followed by an eager apply, nothing tells which of two traced halves ran.
KNOWABLE = [place for place in PLACES if place is not apply_outside]


@pytest.mark.parametrize("way_of_stepping", ["scale_loss", "documented"])
@pytest.mark.parametrize("place", PLACES)
def test_both_ways_of_stepping_give_the_plain_weights_wherever_they_run(place, way_of_stepping):
    batches, expected = plain_path()
    targets = variables(*START)
    optimizer = wrapped(SGD(0.5, momentum=0.9), dynamic_growth_steps=2)
    optimizer.build(targets)
    ways = ways_of_stepping(optimizer)
    step = place(optimizer, targets, *ways.pop(way_of_stepping))
    (other,) = ways.values()
    with loss_scale_warnings() as messages:
        for gradients in (batches[0], spoiled(batches[0]), *batches[1:4]):
            step(*map(tf.constant, gradients))
        assert_same(values(targets), expected[3])
        assert status(optimizer)["scale"] == 2.0**15
        assert status(optimizer)["iterations"] == 5
        if place in KNOWABLE:
            others = [all_eager(optimizer, targets, *other)]
            if way_of_stepping == "scale_loss":
                others.append(place(optimizer, targets, *other))
            for i, gradients in enumerate(batches[4 : 4 + 4 * len(others)]):
                (others[i // 4] if i % 2 else step)(*map(tf.constant, gradients))
                assert_same(values(targets), expected[4 + i])
    assert messages == []


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_ways_of_stepping_can_alternate_in_one_program_and_none_is_traced_twice(in_function):
    pairs = list(itertools.combinations(STEPS, 2))
    order = [way for pair in pairs for way in pair * 2]
    batches = gradients_for(START, len(order))
    expected, _ = train_plain(Adam(0.01), batches, in_function)
    targets = variables(*START)
    optimizer = wrapped(Adam(0.01), dynamic_growth_steps=2)
    optimizer.build(targets)
    steps = {
        how: lambda *gradients, step=step: step(optimizer, targets, gradients)
        for how, step in STEPS.items()
    }
    if in_function:
        steps = {how: tf.function(step, autograph=False) for how, step in steps.items()}
    with loss_scale_warnings() as messages:
        for i, (how, gradients) in enumerate(zip(order, batches, strict=True)):
            if i % 4 == 2:
                steps[how](*map(tf.constant, spoiled(gradients)))
            steps[how](*map(tf.constant, gradients))
    assert_same(values(targets), expected)
    # Between two skips are four good steps.
    assert status(optimizer) == {
        "scale": 2.0**21,
        "counter": 0,
        "skipped": 6,
        "last": False,
        "iterations": 30,
        "applied": 24,
    }
    assert messages == []
    if in_function:
        assert [step.experimental_get_tracing_count() for step in steps.values()] == [1] * 4


# --- Functions ------------------------------------------------------------------------------------


def test_second_step_of_a_function_in_xla_does_not_retrace():
    batches = gradients_for(START, 5)
    targets = variables(*START)
    optimizer = wrapped(Adam(0.01), dynamic_growth_steps=2)
    optimizer.build(targets)

    @tf.function(jit_compile=True)
    def step(*gradients):
        step_by_scale_loss(optimizer, targets, gradients)

    for gradients in (batches[0], spoiled(batches[0]), *batches[1:]):
        step(*map(tf.constant, gradients))
    assert step.experimental_get_tracing_count() == 1
    assert status(optimizer) == {
        "scale": 2.0**16,
        "counter": 0,
        "skipped": 1,
        "last": False,
        "iterations": 6,
        "applied": 5,
    }


# Adam itself is in the fit below.
XLA_INNERS = {
    "ema": INNERS["ema"],
    "accumulation_clipnorm_decay": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.05, clipnorm=0.7, gradient_accumulation_steps=3
    ),
}


@pytest.mark.parametrize("make_inner", XLA_INNERS.values(), ids=XLA_INNERS)
def test_xla_function_gives_the_weights_of_the_plain_optimizer_in_xla(make_inner):
    batches = gradients_for(START, 5)

    def train(optimizer, step_of):
        targets = variables(*START)
        optimizer.build(targets)
        step = tf.function(lambda *g: step_of(optimizer, targets, g), jit_compile=True)
        for gradients in batches:
            step(*map(tf.constant, gradients))
        return values(targets)

    assert_same(train(wrapped(make_inner()), step_by_apply), train(make_inner(), plain_step))


def test_an_optimizer_that_is_first_built_inside_a_function_trains():
    targets = variables([1.0])
    optimizer = wrapped(Adam(0.5, epsilon=0.0))

    @tf.function
    def step(gradient):
        step_by_scale_loss(optimizer, targets, [gradient])

    for gradient in (INF, 0.25):
        step(tf.constant([gradient]))
    np.testing.assert_allclose(targets[0].numpy(), [0.5], rtol=1e-5)
    assert status(optimizer)["iterations"] == 2


def test_what_a_function_reads_moves_with_the_steps():
    targets = variables([1.0])
    optimizer = wrapped(dynamic_growth_steps=1)
    optimizer.build(targets)

    @tf.function
    def step(gradient):
        step_by_scale_loss(optimizer, targets, [gradient])
        return optimizer.loss_scale, optimizer.steps_skipped, optimizer.last_step_skipped

    seen = [[x.numpy().item() for x in step(tf.constant([g]))] for g in (INF, 1.0, 1.0)]
    assert seen == [[2.0**14, 1, True], [2.0**15, 1, False], [2.0**16, 1, False]]


# --- fit ------------------------------------------------------------------------------------------


FIT = {
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    # The graph of one step, in a loop; the weights must be those of that graph alone.
    "two_steps_per_execution": {"jit_compile": False, "steps_per_execution": 2},
}


@pytest.mark.usefixtures("mixed_float16")
def test_fit_in_float16_keeps_the_optimizer_moves_the_scale_and_learns():
    model, optimizer = small_model(), wrapped(Adam(0.02), dynamic_growth_steps=5)
    model.compile(optimizer, "mse", jit_compile=False)
    assert model.optimizer is optimizer
    x, y = data()
    history = model.fit(x, y, batch_size=8, epochs=6, shuffle=False, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    now = status(optimizer)
    assert now["iterations"] == 48
    assert now["iterations"] == now["applied"] + now["skipped"]
    assert now["scale"] != 2.0**15


@pytest.mark.parametrize("mode", FIT)
def test_fit_skips_batches_with_nan_and_equals_training_without_them(mode):
    x, y = data()
    bad = x.copy()
    bad[8:16] = NAN
    bad[40:48] = INF
    kept = np.r_[0:8, 16:40, 48:64]
    results = []
    one_step = {**FIT[mode], "steps_per_execution": 1}
    for optimizer, inputs, targets, arguments in (
        (Adam(0.02), x[kept], y[kept], one_step),
        (wrapped(Adam(0.02), dynamic_growth_steps=3), bad, y, FIT[mode]),
    ):
        model = small_model()
        model.compile(optimizer, "mse", **arguments)
        model.fit(inputs, targets, batch_size=8, shuffle=False, verbose=0)
        results.append(values(model.trainable_variables))
    assert_same(*results)
    # It grew once between the two.
    assert status(optimizer) == {
        "scale": 2.0**14,
        "counter": 2,
        "skipped": 2,
        "last": False,
        "iterations": 8,
        "applied": 6,
    }


def test_fit_with_ema_ends_on_the_averages_of_the_plain_optimizer():
    results = []
    x, y = data(24)
    for make in (lambda inner: inner, wrapped):
        model = small_model()
        model.compile(make(SGD(0.1, use_ema=True, ema_momentum=0.5)), "mse", run_eagerly=True)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        results.append(values(model.trainable_variables))
    assert_same(*results)


@pytest.mark.usefixtures("mixed_float16")
def test_train_on_batch_moves_the_optimizer():
    model, optimizer = small_model(), wrapped(initial_scale=2.0, dynamic_growth_steps=2)
    model.compile(optimizer, "mse")
    for _ in range(2):
        model.train_on_batch(*data(8))
    assert status(optimizer)["scale"] == 4.0
    assert status(optimizer)["iterations"] == 2


def test_pure_float16_variables_train():
    keras.mixed_precision.set_global_policy("float16")
    (target,) = [keras.Variable(np.ones(2), dtype="float16")]
    optimizer = wrapped(SGD(0.5))
    # 2**15 times 2 is too large for float16: that step is skipped.
    for gradient in ([0.5, 2.0], [0.5, 1.0], [INF, 0.0]):
        step_by_documented_calls(optimizer, [target], [np.array(gradient, "float16")])
    assert target.dtype == "float16"
    assert target.numpy().tolist() == [0.75, 0.5]
    assert status(optimizer)["skipped"] == 2


def test_float64_gradients_stay_float64():
    (gradient,) = wrapped(rule=None).get_unscaled_gradients([tf.constant([1e-300], tf.float64)])
    assert gradient.dtype == tf.float64
    assert gradient.numpy().tolist() == [1e-300 / 2**15]


# --- Gradients of several kinds -------------------------------------------------------------------


def test_variables_without_a_gradient_stay_and_the_others_move():
    used, unused = variables([1.0], [2.0])
    optimizer = wrapped(SGD(0.5))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        step_by_minimize_one(optimizer, used, unused)
    assert (used.numpy().item(), unused.numpy().item()) == (0.5, 2.0)


def step_by_minimize_one(optimizer, used, unused):
    optimizer.minimize(lambda: tf.reduce_sum(used.value), [used, unused])


def test_a_variable_that_is_overwritten_with_its_gradient_is_not_unscaled():
    plain, statistic = variables([1.0], [2.0])
    statistic.overwrite_with_gradient = True
    optimizer = wrapped(SGD(0.5))
    optimizer.build([plain, statistic])
    scaled = optimizer.scale_loss(tf.constant([0.25]))
    optimizer.apply_gradients([(scaled, plain), (tf.constant([7.0]), statistic)])
    assert (plain.numpy().item(), statistic.numpy().item()) == (0.875, 7.0)
    scaled = optimizer.scale_loss(tf.constant([INF]))
    optimizer.apply_gradients([(scaled, plain), (tf.constant([9.0]), statistic)])
    assert (plain.numpy().item(), statistic.numpy().item()) == (0.875, 7.0)


# --- Warnings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", STEPS)
def test_correct_steps_do_not_warn(how):
    with loss_scale_warnings() as messages:
        train_ours(SGD(0.5), gradients_for(START, 3), how)
    assert messages == []


def test_a_loss_that_nobody_scaled_is_applied_as_it_is_with_one_warning():
    targets = variables([1.0])
    optimizer = wrapped()
    with loss_scale_warnings() as messages:
        for _ in range(3):
            plain_step(optimizer, targets, [np.array([0.25], "f")])
    assert targets[0].numpy().tolist() == [0.25]
    assert len(messages) == 1
    assert "the loss was never scaled" in messages[0]


def test_a_scaled_loss_without_unscaling_gives_one_warning():
    targets = variables([1.0])
    optimizer = wrapped(initial_scale=4.0)
    with loss_scale_warnings() as messages:
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = optimizer.get_scaled_loss(loss_with_gradients(targets, [np.ones(1, "f")]))
            found = tape.gradient(loss, native(targets))
            optimizer.apply_gradients(zip(found, targets, strict=True))
    assert targets[0].numpy().tolist() == [1.0 - 3 * 4.0]
    assert len(messages) == 1
    assert "get_unscaled_gradients() was not" in messages[0]


def test_apply_without_any_scaling_divides_and_warns_once():
    targets = variables([1.0])
    optimizer = wrapped(initial_scale=4.0)
    with loss_scale_warnings() as messages:
        for _ in range(2):
            optimizer.apply([tf.constant([1.0])], targets)
    assert targets[0].numpy().tolist() == [0.5]
    assert len(messages) == 1
    assert "scale_loss()" in messages[0]


def test_the_mark_of_scale_loss_is_taken_by_one_step_only():
    targets = variables([1.0])
    optimizer = wrapped(initial_scale=4.0)
    step_by_scale_loss(optimizer, targets, [np.array([0.25], "f")])
    with loss_scale_warnings() as messages:
        optimizer.apply_gradients([(tf.constant([0.25]), targets[0])])
    assert targets[0].numpy().tolist() == [0.5]
    assert len(messages) == 1


def test_where_nothing_tells_two_traced_halves_apart_there_is_one_warning():
    targets = variables(*START)
    optimizer = wrapped(SGD(0.5))
    optimizer.build(targets)
    steps = [
        apply_outside(optimizer, targets, *way) for way in ways_of_stepping(optimizer).values()
    ]
    batches = gradients_for(targets, 6)
    with loss_scale_warnings() as messages:
        for step, gradients in zip(itertools.cycle(steps), batches, strict=False):
            step(*map(tf.constant, gradients))
    assert len(messages) == 1
    assert "cannot tell" in messages[0]


def test_apply_after_unscaling_warns_once_that_it_divides_again():
    targets = variables([1.0])
    optimizer = wrapped(initial_scale=4.0)
    with loss_scale_warnings() as messages:
        for _ in range(2):
            scaled = optimizer.get_scaled_loss(tf.constant([0.5]))
            optimizer.apply(optimizer.get_unscaled_gradients([scaled]), targets)
    assert targets[0].numpy().tolist() == [0.75]
    assert len(messages) == 1
    assert "get_unscaled_gradients() already did" in messages[0]


def test_unscaled_gradients_can_be_looked_at_before_the_scaled_ones_go_to_apply():
    targets = variables([1.0])
    optimizer = wrapped(initial_scale=4.0)
    with loss_scale_warnings() as messages:
        scaled = optimizer.scale_loss(tf.constant([0.5]))
        assert optimizer.get_unscaled_gradients([scaled])[0].numpy().tolist() == [0.5]
        optimizer.apply([scaled], targets)
    assert targets[0].numpy().tolist() == [0.5]
    assert messages == []


# What a graph makes of an update is what it makes of it without loss scaling.


def third(gradient):
    # Two constants, which TensorFlow makes one of, and so rounds once.
    return gradient / 3.0 * 0.7


FOLDED = {
    "itself": third,
    "in a branch": lambda g: tf.cond(tf.reduce_sum(g) > -1e9, lambda: third(g), lambda: g),
    "in a function": lambda g: tf.function(third)(g),
}


@pytest.mark.parametrize("place", FOLDED)
def test_constants_of_an_update_are_folded_as_without_loss_scaling(place):
    class Third(SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, FOLDED[place](gradient))

    good = gradients_for(START, 5)
    expected = train_plain(Third(), good, in_function=True)
    _, *found = train_ours(Third(), good, "scale_loss", in_function=True)
    for ours, plain in zip(found, expected, strict=True):
        assert_same(ours, plain)


@pytest.mark.parametrize("second", ["CPU:0", "CPU:1"])
def test_a_step_is_skipped_wherever_its_variables_are(second):
    targets = []
    for device, value in zip(("CPU:0", second), START, strict=True):
        with tf.device(device):
            targets += variables(value)
    optimizer = wrapped(Adam(0.01))
    optimizer.build(targets)

    @tf.function
    def step(*gradients):
        STEPS["scale_loss"](optimizer, targets, gradients)

    [good] = gradients_for(targets, 1)
    step(*good)
    before = values(targets)
    step(*spoiled(good, INF))
    assert_same(values(targets), before)
    assert status(optimizer)["skipped"] == 1
