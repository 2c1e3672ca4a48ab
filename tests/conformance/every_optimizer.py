"""Every optimizer that the framework of this process has, found by looking.

So a new optimizer is tested on the day the framework has it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from conformance.harness import IS_TF_KERAS

# What makes some of them keep more state.
_SETTINGS = {"momentum": 0.5, "amsgrad": True, "centered": True, "nesterov": True}
_RATE = 0.125


def makers() -> dict[str, Callable[[], Any]]:
    """Returns what makes each optimizer, by its name; and one of a user's own for each family."""
    return dict(_of_tf_keras() if IS_TF_KERAS else _of_keras())


def _of_keras() -> Iterator[tuple[str, Callable[[], Any]]]:
    import keras

    own = keras.optimizers.LossScaleOptimizer
    for name, cls in _classes(keras.optimizers, keras.optimizers.Optimizer):
        if not issubclass(cls, own):
            yield name, lambda cls=cls: _made(cls, keras.optimizers)
    yield "averaging", lambda: keras.optimizers.SGD(_RATE, use_ema=True)
    yield "a user's", lambda: keras_optimizer_of_a_user()(_RATE)


def _of_tf_keras() -> Iterator[tuple[str, Callable[[], Any]]]:
    import tf_keras

    new, legacy = tf_keras.optimizers, tf_keras.optimizers.legacy
    for family, module in (("new", new), ("legacy", legacy)):
        for name, cls in _classes(module, module.Optimizer):
            yield f"{family}-{name}", lambda cls=cls, module=module: _made(cls, module)
    yield "new-a user's", lambda: tf_keras_optimizer_of_a_user()(_RATE)


def of_optax() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Returns the names of Optax' optimizers, and what makes each."""
    import optax

    # L-BFGS is refused; the noise has a key for its state.
    left_out = ("_", "scale_by_", "lbfgs", "noisy_sgd")
    for name, alias in vars(optax).items():
        if isinstance(alias, (types.FunctionType, functools.partial)):
            parameters = list(inspect.signature(alias).parameters)
            if parameters[:1] == ["learning_rate"] and not name.startswith(left_out):
                yield f"optax-{name}", functools.partial(alias, _RATE)


def _classes(module: Any, base: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    for name, cls in vars(module).items():
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base:
            yield name, cls


def _made(cls: type[Any], optimizers: Any) -> Any:
    parameters = inspect.signature(cls).parameters
    if "optimizer_map" in parameters:
        # The first variable of a layer, and of a harness.
        inside = {".*(kernel|value_0)": optimizers.Adafactor(_RATE)}
        return cls(optimizers.OptimizerMap(optimizers.Nadam(_RATE), inside))
    settings = {name: value for name, value in _SETTINGS.items() if name in parameters}
    return cls(learning_rate=_RATE, **settings)


def keras_optimizer_of_a_user() -> type[Any]:
    """Returns a class whose `build` sets variables as attributes, as Keras' Nadam does."""
    import keras

    if "tests>Attributes" in keras.saving.get_custom_objects():
        return keras.saving.get_custom_objects()["tests>Attributes"]

    @keras.saving.register_keras_serializable(package="tests", name="Attributes")
    class Attributes(keras.optimizers.Optimizer):
        def build(self, variables: list[Any]) -> None:
            if self.built:
                return
            super().build(variables)
            self.sizes = keras.Variable(0.0)
            self.seen = [keras.Variable(keras.ops.zeros(v.shape)) for v in variables]
            self.named = {"steps": keras.Variable(0.0)}

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            seen = self.seen[self._get_variable_index(variable)]
            self.assign_add(seen, keras.ops.abs(gradient))
            self.assign_add(self.sizes, keras.ops.sum(keras.ops.abs(gradient)))
            self.assign_add(self.named["steps"], 1.0)
            self.assign_sub(variable, gradient * learning_rate / (1.0 + seen + self.sizes))

    return Attributes


def tf_keras_optimizer_of_a_user() -> type[Any]:
    """Returns a class whose `build` sets variables as attributes, as tf_keras' Nadam does."""
    import tensorflow as tf
    import tf_keras

    if "tests>Attributes" in tf_keras.saving.get_custom_objects():
        return tf_keras.saving.get_custom_objects()["tests>Attributes"]

    @tf_keras.saving.register_keras_serializable(package="tests", name="Attributes")
    class Attributes(tf_keras.optimizers.Optimizer):
        def __init__(self, learning_rate: Any, name: str = "Attributes", **kwargs: Any) -> None:
            super().__init__(name=name, **kwargs)
            self._learning_rate = self._build_learning_rate(learning_rate)

        def build(self, variables: list[Any]) -> None:
            super().build(variables)
            if hasattr(self, "sizes"):
                return
            self.sizes = tf.Variable(0.0, name="sizes")
            self.seen = [
                tf.Variable(tf.zeros(v.shape), name=f"seen_{i}") for i, v in enumerate(variables)
            ]
            self.named = {"steps": tf.Variable(0.0, name="steps")}

        def update_step(self, gradient: Any, variable: Any) -> None:
            seen = self.seen[self._index_dict[self._var_key(variable)]]
            seen.assign_add(tf.abs(gradient))
            self.sizes.assign_add(tf.reduce_sum(tf.abs(gradient)))
            self.named["steps"].assign_add(1.0)
            variable.assign_sub(gradient * self.learning_rate / (1.0 + seen + self.sizes))

        def get_config(self) -> dict[str, Any]:
            rate = self._serialize_hyperparameter(self._learning_rate)
            return {**super().get_config(), "learning_rate": rate}

    return Attributes


def state_of(optimizer: Any) -> dict[str, Any]:
    """Returns an optimizer's variables by their places, whatever lists it keeps of them itself."""
    found: dict[str, Any] = {}
    _walk("", optimizer, found, set())
    return found


# What is kept somewhere else too, `_coalesced_children` from the first save on.
_NOT_STATE = {
    "_trainable_variables",
    "_built_groups",
    "_self_unconditional_dependency_names",
    "_coalesced_children",
}


def _walk(path: str, thing: Any, found: dict[str, Any], seen: set[int]) -> None:
    if id(thing) in seen:
        return
    if hasattr(thing, "assign") and hasattr(thing, "shape"):
        seen.add(id(thing))
        found[path] = thing
    elif isinstance(thing, dict):
        # Slots are found by the variables' own numbers, which no other optimizer has.
        for number, (key, value) in enumerate(thing.items()):
            name = key if isinstance(key, str) and not key[-1:].isdecimal() else number
            _walk(f"{path}/{name}", value, found, seen)
    elif isinstance(thing, (list, tuple)):
        for number, value in enumerate(thing):
            _walk(f"{path}/{number}", value, found, seen)
    elif hasattr(thing, "apply_gradients"):
        seen.add(id(thing))
        inside = {name: part for name, part in vars(thing).items() if name not in _NOT_STATE}
        for name in sorted(inside):
            _walk(f"{path}/{name}", inside[name], found, seen)
