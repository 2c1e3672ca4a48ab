"""The shells that the conformance suite runs on: one row each.

A row is usable in the process whose `KERAS_BACKEND` it names, since Keras fixes its backend when
it is imported; those of tf_keras in one with `LOSSSCALE_TEST_KERAS=tf_keras`. `make test` starts
one process for each. A new shell is a new row, and a harness if it is driven in a new way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from conformance.inner_optimizers import FEW, INNER, MISSING
from conformance.optax_native import OptaxEager, OptaxJit, OptaxNNX, OptaxScan
from conformance.torch_native import TorchNative, TorchNativeDevice

BACKEND = os.environ["KERAS_BACKEND"]
KERAS = os.environ.get("LOSSSCALE_TEST_KERAS", "keras")


class KerasHarness:
    """Drives one optimizer with gradients that are given as NumPy arrays.

    Args:
        values: First values of the variables, float32 arrays.
        inner: Name of the optimizer to wrap.
        rule: The scaling rule; None for the optimizer alone, without loss scaling.
    """

    def __init__(self, values: Sequence[Any], inner: str, rule: Any = None) -> None:
        import keras

        import lossscale

        self.keras = keras
        self.model = _model_with(values)
        self.variables = self.model.trainable_variables
        made = self.new_inner(inner)
        self.optimizer = made if rule is None else lossscale.LossScaleOptimizer(made, rule=rule)
        self.scales_loss = rule is not None
        self.inner_optimizer = made
        self.model.compile(self.optimizer, loss=None)
        self.optimizer.build(self.variables)
        self.traces = 0
        self._compiled: Any = None

    @staticmethod
    def optimizers() -> Any:
        """The module of the optimizers to wrap."""
        import keras

        return keras.optimizers

    @classmethod
    def new_inner(cls, name: str) -> Any:
        """Returns a new optimizer to wrap."""
        return INNER[name](cls.optimizers())

    @classmethod
    def framework_wrapper(cls) -> Any:
        """Returns an optimizer with the framework's own loss scaling."""
        return cls.optimizers().LossScaleOptimizer(cls.new_inner("sgd"))

    def scale_loss(self, loss: Any) -> Any:
        """Scales a loss, given and returned as a NumPy array."""
        scaled = self.optimizer.scale_loss(self.keras.ops.convert_to_tensor(loss))
        return self.keras.ops.convert_to_numpy(scaled)

    def take_for_scaled(self) -> None:
        """Makes the next gradients count as those of the scaled loss, as they stand."""
        self._of_scaled_loss = lambda gradients: gradients  # type: ignore[method-assign]
        self.optimizer.scale_loss(1.0)

    def apply_nothing(self) -> None:
        """Runs a step without variables, which is no step."""
        self.optimizer.apply([], [])

    def step(self, gradients: Sequence[Any]) -> None:
        """Runs a step whose loss has these gradients; None stands for no gradient."""
        given = [None if g is None else self.keras.ops.convert_to_tensor(g) for g in gradients]
        if self._compiled is None:
            self._compiled = self.compiled(self._step)
        self._compiled(given)

    def compiled(self, step: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """Returns the step as this shell runs it."""
        return step

    def _step(self, gradients: list[Any]) -> None:
        self.traces += 1
        self.optimizer.apply(self._of_scaled_loss(gradients), self.variables)

    def _of_scaled_loss(self, gradients: list[Any]) -> list[Any]:
        # A loss that is linear in the variables, so that the scale arrives in the gradients.
        factor = self.optimizer.scale_loss(np.float32(1)) if self.scales_loss else 1
        return [None if g is None else g * self.keras.ops.cast(factor, g.dtype) for g in gradients]

    def parameters(self) -> list[Any]:
        """The values of the variables."""
        return [self._numpy(variable) for variable in self.variables]

    def inner_state(self) -> list[Any]:
        """The values of all variables of the wrapped optimizer."""
        return [self._numpy(variable) for variable in self.inner_optimizer.variables]

    def scale(self) -> Any:
        """The loss scale, a NumPy float32."""
        return self._numpy(self.optimizer.loss_scale)[()]

    def counters(self) -> tuple[int, int, bool, int]:
        """Finite steps since the scale changed, steps skipped, last one skipped, iterations."""
        optimizer = self.optimizer
        return (
            int(self._numpy(optimizer.step_counter)),
            int(self._numpy(optimizer.steps_skipped)),
            bool(self._numpy(optimizer.last_step_skipped)),
            int(self._numpy(optimizer.iterations)),
        )

    def rule_state(self) -> Any:
        """What the rule remembers."""
        return self.optimizer._state.read()

    def save(self, path: Any) -> None:
        """Saves parameters and optimizer into a file."""
        self.model.save_weights(path)

    def load(self, path: Any) -> None:
        """Loads what `save` wrote."""
        self.model.load_weights(path)

    def _numpy(self, value: Any) -> Any:
        tensor = value.value if isinstance(value, self.keras.Variable) else value
        return np.array(self.keras.ops.convert_to_numpy(tensor))


def _model_with(values: Sequence[Any]) -> Any:
    import keras

    class Values(keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            for index, value in enumerate(values):
                self.add_weight(
                    name=f"value_{index}",
                    shape=value.shape,
                    dtype="float32",
                    initializer=lambda shape, dtype, value=value: keras.ops.convert_to_tensor(
                        value, dtype=dtype
                    ),
                )

        def call(self, inputs: Any) -> Any:
            return inputs

    return keras.Sequential([keras.Input((1,)), Values()])


class TensorFlowFunction(KerasHarness):
    """The step inside a `tf.function`."""

    jit_compile = False

    def compiled(self, step: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        import tensorflow as tf

        compiled: Callable[[list[Any]], None] = tf.function(step, jit_compile=self.jit_compile)
        return compiled


class TensorFlowXLA(TensorFlowFunction):
    """The step inside a `tf.function` that XLA compiles."""

    jit_compile = True


class ApplyGradients(TensorFlowFunction):
    """The documented verbs: unscaled gradients to `apply_gradients`, in a `tf.function`."""

    def _step(self, gradients: list[Any]) -> None:
        self.traces += 1
        gradients = self._of_scaled_loss(gradients)
        if self.scales_loss:
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))


class Experimental(ApplyGradients):
    """The optimizer of TensorFlow 2.0 to 2.3, where a rule has a LossScale."""

    def __init__(self, values: Sequence[Any], inner: str, rule: Any = None) -> None:
        super().__init__(values, inner, rule)
        if rule is None:
            return
        from lossscale import experimental
        from lossscale.experimental.loss_scale import from_rule

        del self.optimizer
        self.model.optimizer = None
        self.inner_optimizer = self.new_inner(inner)
        self.optimizer = experimental.LossScaleOptimizer(self.inner_optimizer, from_rule(rule))
        self.model.compile(self.optimizer, loss=None)
        self.optimizer.build(self.variables)

    def scale(self) -> Any:
        return self._numpy(self.optimizer.loss_scale())[()]


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
        self.traces += 1
        mapping = list(zip(self.optimizer.variables, state, strict=True))
        with self.keras.StatelessScope(state_mapping=mapping):
            gradients = self._of_scaled_loss(gradients)
        return self.optimizer.stateless_apply(state, gradients, values)


class TFKeras:
    """Drives an optimizer of tf_keras by the documented verbs.

    Args:
        values: First values of the variables, float32 arrays.
        inner: Name of the optimizer to wrap.
        rule: The scaling rule; None for the optimizer alone, without loss scaling.
    """

    def __init__(self, values: Sequence[Any], inner: str, rule: Any = None) -> None:
        import tensorflow as tf

        import lossscale

        self.tf = tf
        self.variables = [tf.Variable(value) for value in values]
        made = self.new_inner(inner)
        self.optimizer = made if rule is None else lossscale.LossScaleOptimizer(made, rule=rule)
        self.scales_loss = rule is not None
        self.inner_optimizer = made
        if self.scales_loss:
            self.optimizer.build(self.variables)
        self.traces = 0
        self._compiled: Any = None

    @staticmethod
    def optimizers() -> Any:
        """The module of the optimizers to wrap."""
        import tf_keras

        return tf_keras.optimizers

    @classmethod
    def new_inner(cls, name: str) -> Any:
        """Returns a new optimizer to wrap."""
        return INNER[name](cls.optimizers())

    @classmethod
    def framework_wrapper(cls) -> Any:
        """Returns an optimizer with the framework's own loss scaling."""
        import tf_keras

        return tf_keras.mixed_precision.LossScaleOptimizer(cls.new_inner("sgd"))

    def step(self, gradients: Sequence[Any]) -> None:
        """Runs a step whose loss has these gradients; None stands for no gradient."""
        given = [None if g is None else self.tf.convert_to_tensor(g) for g in gradients]
        if self._compiled is None:
            self._compiled = self.compiled(self._step)
        self._compiled(given)

    def compiled(self, step: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """Returns the step as this shell runs it."""
        return step

    def _step(self, gradients: list[Any]) -> None:
        self.traces += 1
        if self.scales_loss:
            gradients = self._of_scaled_loss(gradients)
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def _of_scaled_loss(self, gradients: list[Any]) -> list[Any]:
        factor = self.optimizer.get_scaled_loss(self.tf.constant(1.0))
        return [None if g is None else g * self.tf.cast(factor, g.dtype) for g in gradients]

    def scale_loss(self, loss: Any) -> Any:
        """Scales a loss, given and returned as a NumPy array."""
        return self.optimizer.get_scaled_loss(self.tf.convert_to_tensor(loss)).numpy()

    def take_for_scaled(self) -> None:
        """Makes the next gradients count as those of the scaled loss, as they stand."""
        self._of_scaled_loss = lambda gradients: gradients  # type: ignore[method-assign]

    def apply_nothing(self) -> None:
        """Runs a step without variables, which is no step."""
        self.optimizer.minimize(lambda: self.tf.constant(1.0), [])

    def parameters(self) -> list[Any]:
        """The values of the variables."""
        return [np.array(variable.numpy()) for variable in self.variables]

    def inner_state(self) -> list[Any]:
        """The values of all variables of the wrapped optimizer."""
        found = self.inner_optimizer.variables
        return [np.array(v.numpy()) for v in (found() if callable(found) else found)]

    def scale(self) -> Any:
        """The loss scale, a NumPy float32."""
        return self.optimizer.loss_scale.numpy()

    def counters(self) -> tuple[int, int, bool, int]:
        """Finite steps since the scale changed, steps skipped, last one skipped, iterations."""
        optimizer = self.optimizer
        return (
            int(optimizer.dynamic_counter or 0),
            int(optimizer.steps_skipped),
            bool(optimizer.last_step_skipped),
            int(optimizer.iterations),
        )

    def rule_state(self) -> Any:
        """What the rule remembers."""
        return self.optimizer._state.read()

    def save(self, path: Any) -> None:
        """Saves parameters and optimizer into a checkpoint."""
        self._checkpoint().write(str(path))

    def load(self, path: Any) -> None:
        """Loads what `save` wrote."""
        self._checkpoint().read(str(path)).assert_existing_objects_matched()

    def _checkpoint(self) -> Any:
        variables = {f"v{i}": variable for i, variable in enumerate(self.variables)}
        return self.tf.train.Checkpoint(optimizer=self.optimizer, **variables)


class TFKerasFunction(TFKeras):
    """The step inside a `tf.function`."""

    jit_compile = False

    def compiled(self, step: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        compiled: Callable[[list[Any]], None] = self.tf.function(step, jit_compile=self.jit_compile)
        return compiled


class TFKerasXLA(TFKerasFunction):
    """The step inside a `tf.function` that XLA compiles."""

    jit_compile = True


class TFKerasExperimental(TFKerasFunction):
    """The optimizer of TensorFlow 2.0 to 2.3, where a rule has a LossScale."""

    def __init__(self, values: Sequence[Any], inner: str, rule: Any = None) -> None:
        super().__init__(values, inner, rule)
        if rule is None:
            return
        from lossscale import experimental
        from lossscale.experimental.loss_scale import from_rule

        self.inner_optimizer = self.new_inner(inner)
        self.optimizer = experimental.LossScaleOptimizer(self.inner_optimizer, from_rule(rule))
        self.optimizer.build(self.variables)

    def scale(self) -> Any:
        return self.optimizer.loss_scale().numpy()


def _legacy(harness: type[TFKeras]) -> type[TFKeras]:
    """Returns a harness for the legacy optimizers of tf_keras."""

    def optimizers() -> Any:
        import tf_keras

        module = tf_keras.optimizers.legacy
        module.schedules = tf_keras.optimizers.schedules
        return module

    return type(f"{harness.__name__}Legacy", (harness,), {"optimizers": staticmethod(optimizers)})


def _has_a_loss_scale(rule: Any) -> bool:
    from lossscale.experimental.loss_scale import from_rule

    try:
        from_rule(rule)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Shell:
    """A row of the table.

    Attributes:
        name: What it is called.
        backend: That of the processes that it is usable in.
        harness: What drives it.
        compiles: Whether it compiles steps.
        takes_loss_scales_only: Whether it has no rules, but only what TensorFlow 2.0 has.
        keras: The Keras of these processes.
        family: Which optimizers it wraps.
        like: The shell whose code it runs in another place, so that a part of the tests will do;
            none if it has its own.
        needs: What has to be installed besides, which the oldest releases are tested without.
    """

    name: str
    backend: str
    harness: type[Any]
    compiles: bool
    takes_loss_scales_only: bool = False
    keras: str = "keras"
    family: str = "keras"
    like: str = ""
    needs: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        """Whether it is of a framework itself, which says nothing of gradients that are missing."""
        return self.family.startswith(("torch", "optax"))

    @property
    def is_an_object(self) -> bool:
        """Whether an optimizer is an object with a state, and no pair of functions."""
        return self.family != "optax"

    def wrap(self, optimizer: Any) -> Any:
        """Wraps something with loss scaling, as a user does."""
        import lossscale

        if self.is_an_object:
            return lossscale.LossScaleOptimizer(optimizer)
        return lossscale.optax.loss_scaled(optimizer)

    def missing_gradient(self) -> Any:
        """What a step does that has a gradient for some variables only: a context manager."""
        if self.is_native:
            return contextlib.nullcontext()
        return pytest.warns(UserWarning, match="Gradients do not exist")

    def make(self, values: Sequence[Any], inner: str, rule: Any = None) -> Any:
        """Returns an optimizer around new variables, ready to step."""
        if inner in MISSING.get(self.family, {}):
            pytest.skip(MISSING[self.family][inner])
        if self.takes_loss_scales_only and rule is not None and not _has_a_loss_scale(rule):
            pytest.skip("no FixedLossScale or DynamicLossScale has these settings")
        if self.like and inner not in FEW:
            pytest.skip(f"what is inside of it is run as in {self.like}")
        return self.harness(values, inner, rule)

    def make_bare(self, values: Sequence[Any], inner: str, beside: Any) -> Any:
        """Returns the optimizer alone, to be compared with one of the rule `beside`."""
        if self.is_an_object:
            return self.make(values, inner)
        return self.harness(values, inner, beside=beside)


TABLE = (
    Shell("keras-tensorflow-eager", "tensorflow", KerasHarness, compiles=False),
    Shell("keras-tensorflow-function", "tensorflow", TensorFlowFunction, compiles=True),
    Shell("keras-tensorflow-xla", "tensorflow", TensorFlowXLA, compiles=True),
    Shell(
        "keras-tensorflow-apply_gradients",
        "tensorflow",
        ApplyGradients,
        compiles=True,
        like="keras-tensorflow-function",
    ),
    Shell(
        "keras-tensorflow-experimental",
        "tensorflow",
        Experimental,
        compiles=True,
        takes_loss_scales_only=True,
        like="keras-tensorflow-function",
    ),
    Shell("keras-jax-eager", "jax", KerasHarness, compiles=False),
    Shell("keras-jax-jit", "jax", JaxJit, compiles=True),
    Shell("keras-torch-eager", "torch", KerasHarness, compiles=False),
    Shell("torch-native-host", "torch", TorchNative, compiles=False, family="torch"),
    Shell("torch-native-device", "torch", TorchNativeDevice, compiles=False, family="torch-device"),
    Shell("optax-native-jit", "jax", OptaxJit, compiles=True, family="optax"),
    *(
        Shell(
            f"optax-native-{name}",
            "jax",
            harness,
            compiles=harness.is_compiled,
            family="optax",
            like="optax-native-jit",
            needs=needs,
        )
        for name, harness, needs in (
            ("eager", OptaxEager, ()),
            ("scan", OptaxScan, ()),
            ("nnx", OptaxNNX, ("flax",)),
        )
    ),
    *(
        Shell(
            f"{family}-{name}",
            "tensorflow",
            of_family(harness),
            compiles=name != "eager",
            takes_loss_scales_only=name == "experimental",
            keras="tf_keras",
            family=family,
            like=f"{family}-function" if name == "experimental" else "",
        )
        for family, of_family in (
            ("tf_keras-new", lambda harness: harness),
            ("tf_keras-legacy", _legacy),
        )
        for name, harness in (
            ("eager", TFKeras),
            ("function", TFKerasFunction),
            ("xla", TFKerasXLA),
            ("experimental", TFKerasExperimental),
        )
    ),
)

SHELLS = tuple(
    shell
    for shell in TABLE
    if (shell.backend, shell.keras) == (BACKEND, KERAS)
    and all(map(importlib.util.find_spec, shell.needs))
)
