"""The operations that loss scaling needs from a backend of Keras; a file for each has them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import keras

import lossscale.framework_types as ft
from lossscale.common.gradient_arguments import flat_list
from lossscale.common.private_names import private_name
from lossscale.errors import ArgumentError, UnsupportedError
from lossscale.keras_common.step import Step, StepOperations
from lossscale.members import Wrapper
from lossscale.packages import BACKENDS
from lossscale.rules import ScaleState

in_stateless_scope: Callable[[], bool] = private_name(
    "keras.src.backend.common.stateless_scope",
    "in_stateless_scope",
    "see whether variables hold their values, or a stateless scope does",
)


class Backend(StepOperations):
    """A backend of Keras; the defaults are those of a single device.

    The attributes that each backend must define are declared first.
    """

    # The array functions for `ScaleRule.update`.
    namespace: object

    # Returns a gradient, dense or sparse, in another dtype.
    cast: Callable[[ft.Gradient, str], ft.Gradient]

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

    # --- One step -----------------------------------------------------------------------------

    # Whether Keras' trainer calls `apply_gradients`, so that this is what people override.
    calls_apply_gradients = False

    def applying(self, inner: ft.KerasOptimizer, aggregate: bool) -> AbstractContextManager[None]:
        """A context for a call of the inner optimizer."""
        return nullcontext()

    def translated(self, function: ft.Function) -> ft.Function:
        """A function of a user's, as a function that is being traced can call it."""
        return function

    def accumulable(self, inner: ft.KerasOptimizer, step: Step) -> list[ft.Gradient]:
        """Returns the gradients of a step in dtypes that an inner optimizer can accumulate."""
        parts = (inner, *getattr(inner, "optimizers", ()))
        if not any(part.gradient_accumulation_steps for part in parts):
            return step.gradients
        # Keras adds them to sums of the variables' dtype, and does not add two dtypes.
        dtype_of = keras.backend.standardize_dtype
        return [
            gradient
            if gradient is None or dtype_of(gradient.dtype) == dtype_of(variable.dtype)
            else self.cast(gradient, dtype_of(variable.dtype))
            for gradient, variable in zip(step.gradients, step.variables, strict=True)
        ]

    def update_on_host(
        self, optimizer: Wrapper, finite: ft.Scalar, state_on_host: ScaleState | None
    ) -> bool:
        """Updates the loss scale and the counters of an optimizer with Python numbers.

        Args:
            optimizer: The loss scale optimizer.
            finite: Whether the step is applied.
            state_on_host: That of `OverflowCheck`.

        Returns:
            Whether it did; if not, the optimizer updates them with tensors.
        """
        return False

    @staticmethod
    def trace_call(model: ft.Model, inputs: ft.Structure) -> None:
        """Makes the weights of a model as a call with these inputs would."""
        dtype = keras.backend.standardize_dtype
        model(
            keras.tree.map_structure(lambda x: keras.KerasTensor(x.shape, dtype(x.dtype)), inputs)
        )

    # --- Where calls are made -----------------------------------------------------------------

    def check_strategy(self) -> None:
        """Raises an error under a distribution that loss scaling does not support."""

    # --- Variables ----------------------------------------------------------------------------

    def is_variable(self, value: object) -> bool:
        """Whether a value is a variable."""
        return isinstance(value, keras.Variable)

    def flat_variables(self, variables: ft.Structure) -> list[ft.Variable]:
        """Returns a list of variables from one variable or a nest of them."""
        return flat_list(variables, keras.tree.flatten, self.is_variable)

    def prepare_own_variable(self, variable: ft.Variable) -> None:
        """Called with each new variable of a loss scale optimizer."""

    # --- Arrays -------------------------------------------------------------------------------

    def flat_gradients(self, gradients: ft.Structure) -> list[ft.Gradient]:
        """The gradients in a nest, without None."""
        return [gradient for gradient in keras.tree.flatten(gradients) if gradient is not None]


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
