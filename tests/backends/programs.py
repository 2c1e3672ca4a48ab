"""Programs that scale a loss and apply its gradients in some order, and what each must do.

A program is a line of calls on one optimizer and two variables, `a` and `b`:

- `scale`: `scale_loss` on the loss; what is applied next are gradients of its result;
- `hand`: the same with `get_scaled_loss`;
- `unscale:ab`: `get_unscaled_gradients` on the gradients of these variables;
- `apply:ab`, `keras:ab`: `apply_gradients` and `apply` on the scaled gradients;
- `unscaled:ab`: `apply_gradients` on those that `unscale` returned;
- `plain:ab`: `apply_gradients` on gradients of the loss itself, which nobody scaled;
- `minimize:ab`.

Whatever the order, each call that applies must move each of its variables by the gradient of the
loss, once. With a learning rate of 1 this is counted here from the line alone.
"""

import keras

import lossscale

GRADIENTS = {"a": 1.0, "b": -0.25}

# What warns, and what it says. Nothing stands for a program that must not warn.
PROGRAMS = {
    "scale apply:ab": None,
    "scale apply:a apply:b": None,
    "scale apply:b apply:a scale apply:a apply:b": None,
    "scale keras:ab": None,
    "scale keras:a keras:b": None,
    "scale keras:a apply:b": None,
    "scale apply:a keras:b": None,
    "hand unscale:ab unscaled:ab": None,
    "hand unscale:ab unscaled:a unscaled:b": None,
    "hand unscale:a unscale:b unscaled:a unscaled:b": None,
    "hand unscale:a unscaled:a unscale:b unscaled:b": None,
    # The two families in one step.
    "scale unscale:ab unscaled:ab": None,
    "scale unscale:ab unscaled:a unscaled:b": None,
    "scale unscale:ab keras:ab": None,
    "scale unscale:a unscaled:a apply:b": None,
    "scale unscale:a unscaled:a unscale:b unscaled:b": None,
    "scale apply:a unscale:b unscaled:b": None,
    "scale apply:ab hand unscale:ab unscaled:ab": None,
    "hand unscale:ab unscaled:ab scale apply:a apply:b": None,
    # A scale_loss that no apply followed.
    "scale hand unscale:ab unscaled:ab": None,
    "scale hand unscale:ab unscaled:b unscaled:a": None,
    "scale hand unscale:a unscaled:a unscale:b unscaled:b": None,
    "scale scale scale apply:ab": None,
    # Two losses before their gradients are applied.
    "scale scale apply:a apply:b": None,
    "scale scale apply:ab apply:ab": "divided by the loss scale",
    # A second time for one of the variables: the other one tells whose gradients these are.
    "scale apply:a apply:ab": "divided by the loss scale",
    "scale apply:ab plain:a": "applied as they are",
    "scale apply:a apply:b plain:b plain:ab": "applied as they are",
    "scale keras:ab plain:ab": "applied as they are",
    "plain:ab plain:ab": "the loss was never scaled",
    "plain:a scale apply:a apply:b": "the loss was never scaled",
}

WITH_MINIMIZE = {
    "minimize:ab": None,
    "scale minimize:ab": None,
    "scale minimize:a apply:ab": None,
    "scale apply:a minimize:ab apply:b": None,
    "hand unscale:ab minimize:ab unscaled:ab": None,
    "minimize:ab plain:ab": "the loss was never scaled",
}


def expected(program, times=1):
    """How far each variable has gone after a program: minus its gradient for each call."""
    gone = dict.fromkeys(GRADIENTS, 0.0)
    for call in program.split() * times:
        verb, _, names = call.partition(":")
        for name in names if verb != "unscale" else ():
            gone[name] -= GRADIENTS[name]
    return gone


def made(variables=None, **arguments):
    """Returns a run on an optimizer that was never used, around the plainest SGD."""
    variables = variables or {name: keras.Variable([0.0], name=name) for name in "ab"}
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1.0), **arguments)
    optimizer.build(list(variables.values()))
    return Run(optimizer, variables)


class Run:
    """Runs programs on one optimizer with a learning rate of 1."""

    def __init__(self, optimizer, variables):
        self.optimizer, self.variables = optimizer, variables
        self.of_scaled, self.divided = {}, {}

    def calls(self, program):
        """Makes the calls of a program."""
        for call in program.split():
            verb, _, names = call.partition(":")
            getattr(self, verb)(*names)

    def gone(self):
        """How far each variable has gone."""
        tensors = {n: keras.ops.convert_to_tensor(v) for n, v in self.variables.items()}
        return {name: keras.ops.convert_to_numpy(t).item() for name, t in tensors.items()}

    def loss(self):
        # A vector stands for the loss and its gradients at once: scaling is a multiplication.
        return keras.ops.convert_to_tensor([[GRADIENTS[name]] for name in "ab"])

    def scale(self):
        self.take(self.optimizer.scale_loss(self.loss()))

    def hand(self):
        self.take(self.optimizer.get_scaled_loss(self.loss()))

    def take(self, scaled):
        self.of_scaled = {"a": scaled[0], "b": scaled[1]}

    def unscale(self, *names):
        found = self.optimizer.get_unscaled_gradients([self.of_scaled[name] for name in names])
        self.divided.update(zip(names, found, strict=True))

    def apply(self, *names):
        self._apply(names, self.of_scaled)

    def unscaled(self, *names):
        self._apply(names, self.divided)

    def plain(self, *names):
        loss = self.loss()
        self._apply(names, {"a": loss[0], "b": loss[1]})

    def _apply(self, names, gradients):
        self.optimizer.apply_gradients([(gradients[name], self.variables[name]) for name in names])

    def keras(self, *names):
        self.optimizer.apply(
            [self.of_scaled[name] for name in names], [self.variables[name] for name in names]
        )

    def minimize(self, *names):
        self.optimizer.minimize(
            lambda: sum(
                keras.ops.sum(self.variables[name].value * GRADIENTS[name]) for name in names
            ),
            [self.variables[name] for name in names],
        )
