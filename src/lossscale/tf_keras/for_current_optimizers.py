"""The loss scale optimizer around the new optimizers of tf_keras."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from lossscale.optimizer import LossScaleOptimizer
from lossscale.tensorflow.gate import can_gate
from lossscale.tensorflow.tracing import in_xla, translated
from lossscale.tf_keras.files import KerasFiles
from lossscale.tf_keras.persistence import UNLISTED
from lossscale.tf_keras.private_names import LossScaleOptimizerV3
from lossscale.tf_keras.shell import ByFamily, CommonShell, register_shell
from lossscale.tf_keras.weights import DocumentedWeights


class TFKerasLossScaleOptimizer(
    DocumentedWeights, KerasFiles, CommonShell, LossScaleOptimizerV3, metaclass=ByFamily
):
    __doc__ = LossScaleOptimizer.__doc__

    _inner_base = tf_keras.optimizers.Optimizer
    _is_legacy = False

    def build(self, var_list: Sequence[Any]) -> None:
        self._build(list(var_list))

    def _build(self, variables: list[Any], has_gradient: Sequence[bool] = ()) -> None:
        self._optimizer.build(variables)
        self._trained = (variables,)
        self._load_what_waited()

    def _unlisted_variables(self) -> dict[str, Any]:
        # tf_keras lists what `add_variable` made, and not what `build` set as an attribute.
        inner, found = self._optimizer, {}
        listed = [*inner.variables, inner.iterations, *(self._trained[0] if self._trained else ())]
        seen = {id(variable) for variable in (*listed, inner._learning_rate)}
        for name, variable in _variables_in(vars(inner), UNLISTED.removesuffix(".")):
            if id(variable) not in seen:
                seen.add(id(variable))
                found[name] = variable
        return found

    def _inner_weights(self) -> list[Any]:
        return list(self._optimizer.variables)

    def _inner_gradients(self, loss: Any, variables: list[Any], tape: Any) -> list[Any]:
        pairs: list[Any] = self._optimizer.compute_gradients(loss, variables, tape=tape)
        return pairs

    def _symbolic_gradients(self, loss: Any, variables: Sequence[Any]) -> list[Any]:
        gradients: list[Any] = tf.gradients(loss, list(variables))
        return gradients

    def _aggregated(self, pairs: list[Any]) -> Any:
        inner = self._optimizer
        # Gradients over DTensor are whole already.
        if inner._run_with_dtensor or inner._mesh:
            return pairs
        return translated(inner.aggregate_gradients)(pairs)

    def _apply_inner(self, pairs: list[Any], name: str | None) -> Any:
        inner = self._optimizer
        if "_u_product_counter" in vars(inner) and tf.executing_eagerly():
            # By this number Nadam tells whether this step has multiplied its product already, and
            # no file has it. A traced function keeps what it was when it was traced.
            inner._u_product_counter = int(inner.iterations) + 1
        with _without_own_function(inner) if in_xla() else contextlib.nullcontext():
            apply = translated(inner.apply_gradients)
            return apply(pairs, name=name, skip_gradients_aggregation=True)

    def _can_gate(self, gradients: Sequence[Any]) -> bool:
        return can_gate(self._optimizer, gradients)

    def _written(self, trained: Sequence[Any]) -> list[Any]:
        inner = self._optimizer
        unlisted = self._unlisted_variables().values()
        return [*inner.variables, inner.iterations, *unlisted, *trained]

    # Methods of the base class that would use variables and settings it has not got here.

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """Sums gradients over the replicas, as the inner optimizer does."""
        return self._optimizer.aggregate_gradients(grads_and_vars)

    def update_step(self, gradient: Any, variable: Any) -> Any:
        """Updates a variable as the inner optimizer does, whatever the gradient is."""
        return self._optimizer.update_step(gradient, variable)

    def add_variable(self, *args: Any, **kwargs: Any) -> Any:
        """Adds a state variable to the inner optimizer, and returns it."""
        return self._optimizer.add_variable(*args, **kwargs)

    def add_variable_from_reference(self, *args: Any, **kwargs: Any) -> Any:
        """Adds a state variable for a variable to the inner optimizer, and returns it."""
        return self._optimizer.add_variable_from_reference(*args, **kwargs)


def _variables_in(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the variables in nested containers, by their places."""
    if isinstance(thing, tf.Variable):
        yield path, thing
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _variables_in(value, f"{path}.{key}")
    elif isinstance(thing, (list, tuple)):
        for number, value in enumerate(thing):
            yield from _variables_in(value, f"{path}.{number}")


@contextlib.contextmanager
def _without_own_function(inner_optimizer: Any) -> Iterator[None]:
    """Within it an update is part of the function that is being traced.

    The optimizers compile each update as a function of its own. Where all is compiled anyway,
    that only hides from XLA what the update is part of.
    """
    before, inner_optimizer.jit_compile = inner_optimizer.jit_compile, False
    try:
        yield
    finally:
        inner_optimizer.jit_compile = before


register_shell(TFKerasLossScaleOptimizer)
