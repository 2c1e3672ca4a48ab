"""What drives one optimizer with gradients that are given as NumPy arrays.

`Harness` says what each can do; those of Keras 3 and tf_keras follow it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.inner_optimizers import INNER

IS_TF_KERAS = os.environ.get("LOSSSCALE_TEST_KERAS") == "tf_keras"


def array(value: Any) -> Any:
    """Returns a copy of a tensor or variable of this process' Keras."""
    if IS_TF_KERAS:
        import tensorflow as tf

        return np.array(tf.convert_to_tensor(value))
    import keras

    return np.array(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def native(variable: Any) -> Any:
    """Returns what the framework itself has behind a variable of Keras 3."""
    value = getattr(variable, "value", variable)
    # That of a variable of TensorFlow is a method.
    return variable if callable(value) else value


def kind_of_device(tensor: Any) -> str:
    """Returns "cpu" or "gpu" for a tensor of PyTorch, JAX or TensorFlow."""
    # TensorFlow's is a path, such as "/job:localhost/replica:0/task:0/device:GPU:0".
    name = str(tensor.device).lower()
    return "gpu" if "gpu" in name or "cuda" in name else "cpu"


class Harness:
    """Drives one optimizer. Each kind is made of

    - `values`: the first values of the variables, float32 arrays;
    - `inner`: the name of the optimizer to wrap;
    - `rule`: the scaling rule; None for the optimizer alone, without loss scaling.

    All arrays that go in and come out are NumPy's. Besides what is declared here, each has

    - `scale_loss(loss)`: the scaled loss;
    - `take_for_scaled()`: makes the next gradients count as those of the scaled loss;
    - `step(gradients)`: a step whose loss has these gradients; None stands for no gradient;
    - `apply_nothing()`: a step without variables or gradients, which is no step;
    - `parameters()`, `inner_state()`: the values of the variables, and of all that the wrapped
      optimizer keeps;
    - `scale()`: the loss scale, a NumPy float32;
    - `counters()`: finite steps since the scale changed, steps skipped, whether the last one was,
      and all iterations;
    - `rule_state()`: what the rule remembers;
    - `save(path)`, `load(path)`: parameters and optimizer into a file and out of it;
    - `set_scale(value)`: sets the loss scale;
    - `become_a_copy()`: goes on with copies of what it has, and leaves the originals behind;
    - `device()`: what its parameters are on, "cpu" or "gpu";
    - `optimizers()`: the module of the optimizers to wrap;
    - `framework_wrapper()`: an optimizer with the framework's own loss scaling, or with ours where
      it has none.

    Attributes:
        optimizer: What a training loop calls.
        inner_optimizer: What is wrapped.
        traces: How often the step was traced, or run where it is not compiled.
        saves_last_step_skipped: Whether a file has that.
    """

    optimizer: Any
    inner_optimizer: Any
    traces: int = 0
    saves_last_step_skipped: bool = True
    _scaled_already = False

    def take_for_scaled(self) -> None:
        self._scaled_already = True


class KerasHarness(Harness):
    """Optimizers of Keras 3, on every backend, stepped eagerly by `apply`."""

    calls_documented_verbs = False

    def __init__(
        self, values: Sequence[Any], inner: str | Callable[[], Any], rule: Any = None
    ) -> None:
        self.variables = self.new_variables(values)
        self.optimizer = self.inner_optimizer = self.new_inner(inner)
        self.scales_loss = rule is not None
        if self.scales_loss:
            self.optimizer = self.wrapped(self.inner_optimizer, rule)
        self.build()
        self._compiled: Any = None

    @property
    def ops(self) -> Any:
        """What has `cast` and `convert_to_tensor`."""
        import keras

        return keras.ops

    @staticmethod
    def optimizers() -> Any:
        import keras

        return keras.optimizers

    @classmethod
    def new_inner(cls, inner: str | Callable[[], Any]) -> Any:
        return inner() if callable(inner) else INNER[inner](cls.optimizers())

    @classmethod
    def framework_wrapper(cls) -> Any:
        return cls.optimizers().LossScaleOptimizer(cls.new_inner("sgd"))

    def new_variables(self, values: Sequence[Any]) -> list[Any]:
        import keras

        class Values(keras.layers.Layer):
            def build(self, input_shape: Any) -> None:
                for index, value in enumerate(values):
                    self.add_weight(name=f"value_{index}", shape=value.shape, dtype="float32")

            def call(self, inputs: Any) -> Any:
                return inputs

        self.model = keras.Sequential([keras.Input((1,)), Values()])
        self.model.set_weights(values)
        return self.model.trainable_variables

    def wrapped(self, inner: Any, rule: Any) -> Any:
        import lossscale

        return lossscale.LossScaleOptimizer(inner, rule=rule)

    def build(self) -> None:
        self.model.compile(self.optimizer, loss=None)
        self.optimizer.build(self.variables)

    def scaled(self, loss: Any) -> Any:
        optimizer = self.optimizer
        verb = optimizer.get_scaled_loss if self.calls_documented_verbs else optimizer.scale_loss
        return verb(loss)

    def scale_loss(self, loss: Any) -> Any:
        return array(self.scaled(self.ops.convert_to_tensor(loss)))

    def take_for_scaled(self) -> None:
        super().take_for_scaled()
        if not self.calls_documented_verbs:
            self.optimizer.scale_loss(1.0)
        elif self.scales_loss:
            self.optimizer.get_scaled_loss(1.0)

    def apply_nothing(self) -> None:
        self.optimizer.apply([], self.variables)

    def step(self, gradients: Sequence[Any]) -> None:
        given = [None if g is None else self.ops.convert_to_tensor(g) for g in gradients]
        if self._compiled is None:
            self._compiled = self.compiled(self._step)
        self._compiled(given)

    def compiled(self, step: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """Returns the step as it is run here."""
        return step

    def _step(self, gradients: list[Any]) -> None:
        self.traces += 1
        gradients = self._of_scaled_loss(gradients)
        if not self.calls_documented_verbs:
            self.optimizer.apply(gradients, self.variables)
            return
        if self.scales_loss:
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def _of_scaled_loss(self, gradients: list[Any]) -> list[Any]:
        if self._scaled_already or not self.scales_loss:
            return gradients
        # A loss that is linear in the variables, so that the scale arrives in the gradients.
        factor = self.scaled(np.float32(1))
        return [None if g is None else g * self.ops.cast(factor, g.dtype) for g in gradients]

    def parameters(self) -> list[Any]:
        return [array(variable) for variable in self.variables]

    def device(self) -> str:
        return kind_of_device(native(self.variables[0]))

    def inner_state(self) -> list[Any]:
        found = self.inner_optimizer.variables
        return [array(variable) for variable in (found() if callable(found) else found)]

    def scale(self) -> Any:
        return array(self.optimizer.loss_scale)[()]

    def counters(self) -> tuple[int, int, bool, int]:
        optimizer, counter = self.optimizer, self.optimizer.dynamic_counter
        return (
            0 if counter is None else int(array(counter)),
            int(array(optimizer.steps_skipped)),
            bool(array(optimizer.last_step_skipped)),
            int(array(optimizer.iterations)),
        )

    def rule_state(self) -> Any:
        return self.optimizer._state.read()

    def set_scale(self, value: float) -> None:
        self.optimizer._state.variables["scale"].assign(value)

    def become_a_copy(self) -> None:
        old = self.optimizer
        self.optimizer = type(old).from_config(old.get_config())
        self.inner_optimizer = self.optimizer.inner_optimizer
        self.build()
        self.optimizer.set_weights([array(variable) for variable in old.variables])
        self._compiled = None

    def save(self, path: Any) -> None:
        self.model.save_weights(path)

    def load(self, path: Any) -> None:
        self.model.load_weights(path)


class JaxJit(KerasHarness):
    """`stateless_apply` inside `jax.jit`, with the state donated, as Keras' trainer does it."""

    def compiled(self, step: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        import jax

        pure = jax.jit(self._pure_step, donate_argnums=(0, 1))

        def run(gradients: list[Any]) -> None:
            state = [variable.value for variable in self.optimizer.variables]
            values = [variable.value for variable in self.variables]
            with jax.transfer_guard("disallow"):
                values, state = pure(state, values, gradients)
            for variable, value in zip(
                [*self.variables, *self.optimizer.variables], [*values, *state], strict=True
            ):
                variable.assign(value)

        return run

    def _pure_step(self, state: list[Any], values: list[Any], gradients: list[Any]) -> Any:
        import keras

        self.traces += 1
        mapping = list(zip(self.optimizer.variables, state, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            gradients = self._of_scaled_loss(gradients)
        return self.optimizer.stateless_apply(state, gradients, values)


class TFKerasHarness(KerasHarness):
    """Optimizers of tf_keras, stepped eagerly by the documented verbs."""

    calls_documented_verbs = True

    @property
    def ops(self) -> Any:
        import tensorflow as tf

        return tf

    @staticmethod
    def optimizers() -> Any:
        import tf_keras

        return tf_keras.optimizers

    @classmethod
    def framework_wrapper(cls) -> Any:
        import tf_keras

        return tf_keras.mixed_precision.LossScaleOptimizer(cls.new_inner("sgd"))

    def new_variables(self, values: Sequence[Any]) -> list[Any]:
        return [self.ops.Variable(value) for value in values]

    def build(self) -> None:
        # What the legacy optimizers call it.
        build = getattr(self.optimizer, "build", None) or self.optimizer._create_all_weights
        build(self.variables)

    def apply_nothing(self) -> None:
        self.optimizer.minimize(lambda: self.ops.constant(1.0), [])

    def save(self, path: Any) -> None:
        self._checkpoint().write(str(path))

    def load(self, path: Any) -> None:
        self._checkpoint().read(str(path)).assert_existing_objects_matched()

    def _checkpoint(self) -> Any:
        variables = {f"v{i}": variable for i, variable in enumerate(self.variables)}
        return self.ops.train.Checkpoint(optimizer=self.optimizer, **variables)


class TFKerasLegacyHarness(TFKerasHarness):
    """Legacy optimizers of tf_keras."""

    @staticmethod
    def optimizers() -> Any:
        import tf_keras

        module = tf_keras.optimizers.legacy
        module.schedules = tf_keras.optimizers.schedules
        return module


def in_a_function(base: type[KerasHarness], jit_compile: bool = False) -> type[KerasHarness]:
    """Returns a harness whose step is in a `tf.function`, which XLA compiles if it is asked to."""

    class InAFunction(base):  # type: ignore[misc, valid-type]
        def compiled(self, step: Callable[[list[Any]], None]) -> Any:
            import tensorflow as tf

            return tf.function(step, jit_compile=jit_compile)

    return InAFunction


def experimental(base: type[KerasHarness]) -> type[KerasHarness]:
    """Returns a harness of the optimizer of TensorFlow 2.0 to 2.3, where a rule has a LossScale."""

    class Experimental(base):  # type: ignore[misc, valid-type]
        def wrapped(self, inner: Any, rule: Any) -> Any:
            from conformance.wrappers import loss_scale_of
            from lossscale import experimental

            return experimental.LossScaleOptimizer(inner, loss_scale_of(rule))

        def scale(self) -> Any:
            return array(self.optimizer.loss_scale())[()]

    return Experimental


KerasFunction = in_a_function(KerasHarness)
KerasXLA = in_a_function(KerasHarness, jit_compile=True)


class KerasApplyGradients(KerasFunction):  # type: ignore[misc, valid-type]
    """The verbs that TensorFlow documents."""

    calls_documented_verbs = True


KerasExperimental = experimental(KerasApplyGradients)
TFKerasFunction = in_a_function(TFKerasHarness)
TFKerasXLA = in_a_function(TFKerasHarness, jit_compile=True)
TFKerasExperimental = experimental(TFKerasFunction)
TFKerasLegacyFunction = in_a_function(TFKerasLegacyHarness)
TFKerasLegacyXLA = in_a_function(TFKerasLegacyHarness, jit_compile=True)
TFKerasLegacyExperimental = experimental(TFKerasLegacyFunction)
