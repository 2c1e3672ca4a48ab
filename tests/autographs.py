"""What AutoGraph translates while a step is traced, on both generations of Keras."""

import traceback

import tensorflow as tf

import lossscale

# The parts of `minimize` on the way to what a user has written.
MINIMIZE = {
    "minimize",
    "_computed",
    "compute_gradients",
    "_compute_gradients",
    "_differentiated",
    "scaled_value",
    "_apply_unscaled",
}


@tf.autograph.experimental.do_not_convert
def translated_functions():
    """Names of the functions on the stack that AutoGraph has translated."""
    names = [frame.name for frame in traceback.extract_stack()]
    return [name.removeprefix("tf__") for name in names if name.startswith("tf__")]


def step_of(verbs, optimizer, weight, loss):
    """A function to be traced, written in one of two ways."""

    def step():
        if verbs == "minimize":
            optimizer.minimize(loss, [weight])
            return
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(loss())
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
        optimizer.apply_gradients(zip(gradients, [weight], strict=True))

    return tf.function(step)


def assert_only_the_users_functions_are_translated(optimizers):
    """The user's loss and update are; of ours `minimize` alone, which calls what users override."""
    stacks = []

    class Own(optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **kwargs):
            stacks.append(translated_functions())
            [(gradient, variable)] = grads_and_vars
            factor = 1.0
            if gradient > 100.0:
                factor = 2.0
            return super().apply_gradients([(gradient * factor, variable)], **kwargs)

    def loss():
        stacks.append(translated_functions())
        result = weight * 5.0
        if weight > 0.0:
            result = weight * 3.0
        return result

    for verbs in ("minimize", "verbs"):
        weight = tf.Variable(1.0)
        optimizer = lossscale.LossScaleOptimizer(Own(1.0), initial_scale=8.0)
        optimizer.build([weight])
        step = step_of(verbs, optimizer, weight, loss)
        stacks.clear()
        for expected in (-2.0, -7.0):
            step()
            assert weight.numpy() == expected
        assert {stack[-1] for stack in stacks} == {"loss", "apply_gradients"}
        for first, *between, _ in stacks:
            assert first == "step"
            assert MINIMIZE.issuperset(between) if verbs == "minimize" else not between
