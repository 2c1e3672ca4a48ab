"""What loss scaling needs from a backend of Keras; a file for each has it.

The functions are those of the backends that have them in common.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable

import keras

import lossscale.framework_types as ft
from lossscale.common.arrays import Arrays
from lossscale.common.gradient_arguments import flat_list
from lossscale.common.private_names import private_name
from lossscale.errors import ArgumentError, UnsupportedError
from lossscale.keras_common.step import Step
from lossscale.packages import BACKENDS

in_stateless_scope: Callable[[], bool] = private_name(
    "keras.src.backend.common.stateless_scope",
    "in_stateless_scope",
    "see whether variables hold their values, or a stateless scope does",
)


def is_variable(value: object) -> bool:
    """Whether a value is a variable."""
    return isinstance(value, keras.Variable)


def flat_variables(variables: ft.Structure) -> list[ft.Variable]:
    """Returns a list of variables from one variable or a nest of them."""
    return flat_list(variables, keras.tree.flatten, is_variable)


def apply(inner: ft.KerasOptimizer, step: Step) -> None:
    """Has an inner optimizer apply the unscaled gradients of a step."""
    inner.apply(accumulable(inner, step), step.variables)


def accumulable(inner: ft.KerasOptimizer, step: Step) -> list[ft.Gradient]:
    """Returns the gradients of a step in dtypes that an inner optimizer can accumulate."""
    parts = (inner, *getattr(inner, "optimizers", ()))
    if not any(part.gradient_accumulation_steps for part in parts):
        return step.gradients
    # Keras adds them to sums of the variables' dtype, and does not add two dtypes.
    dtype_of = keras.backend.standardize_dtype
    return [
        gradient
        if gradient is None or dtype_of(gradient.dtype) == dtype_of(variable.dtype)
        else keras.ops.cast(gradient, variable.dtype)
        for gradient, variable in zip(step.gradients, step.variables, strict=True)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """A backend of Keras: its `Arrays`, and what Keras 3 alone needs."""

    arrays: Arrays
    # The array functions for `ScaleRule.update`.
    namespace: object
    # Returns the gradients of a scaled loss, and the variables they belong to. Takes
    #   loss: a callable without arguments, or a tensor that knows how it was computed;
    #   var_list: a list, one variable, or a callable that returns either; with a tape None
    #       stands for the trainable variables that it watched;
    #   scale: multiplies a loss by the loss scale;
    #   tape: a `tf.GradientTape`, or None;
    #   grad_loss: tensor of the loss's shape that multiplies the gradients, or None.
    differentiate: Callable[..., tuple[list[ft.Gradient], list[ft.Variable]]]
    # Returns the gradients of a tensor of the function that is being traced, by variables.
    symbolic_gradients: Callable[[ft.Tensor, ft.Variables], list[ft.Gradient]]
    # Whether a value is a variable; a list of variables from one variable or a nest of them.
    is_variable: Callable[[object], bool] = is_variable
    flat_variables: Callable[[ft.Structure], list[ft.Variable]] = flat_variables
    # Has an inner optimizer apply the unscaled gradients of a step.
    apply: Callable[[ft.KerasOptimizer, Step], None] = apply
    # Called with each new variable of a loss scale optimizer.
    prepare_own_variable: Callable[[ft.Variable], None] = lambda variable: None
    # Raises under a distribution that loss scaling does not support.
    check_strategy: Callable[[], None] = lambda: None


def assign(variable: ft.Variable, value: ft.Scalar) -> None:
    """Sets a variable to a tensor or a Python number."""
    variable.assign(keras.ops.cast(value, variable.dtype))


def add(variable: ft.Variable, value: ft.Scalar) -> None:
    """Adds a tensor or a Python number to a variable."""
    variable.assign_add(keras.ops.cast(value, variable.dtype))


def trace_call(model: ft.Model, inputs: ft.Structure) -> None:
    """Makes the weights of a model as a call with these inputs would."""
    dtype = keras.backend.standardize_dtype
    model(keras.tree.map_structure(lambda x: keras.KerasTensor(x.shape, dtype(x.dtype)), inputs))


def check_without_tape(backend: str, variables: ft.VarList, tape: ft.Tape) -> None:
    """Checks what is differentiated on a backend that does not record operations on a tape.

    Raises:
        ArgumentError: If there is a tape, or no variables are given.
    """
    if tape is not None:
        raise ArgumentError("`tape` is for the TensorFlow backend. Leave it out.")
    if variables is None:
        raise ArgumentError(
            f"`var_list` must be given on the {backend} backend. It does not record the variables "
            "a loss was computed from. Pass model.trainable_variables."
        )


# Cached also because AutoGraph, in a function that is being traced, cannot translate an import.
@functools.cache
def load() -> Backend:
    """Returns the `Backend` that Keras runs on."""
    name = keras.backend.backend()
    if name not in BACKENDS:
        raise UnsupportedError(
            f"Keras runs on the backend {name!r}; lossscale supports {', '.join(BACKENDS)}. "
            "Set the environment variable KERAS_BACKEND before importing Keras."
        )
    backend: Backend = importlib.import_module(f"{__name__}.{name}").BACKEND
    return backend
