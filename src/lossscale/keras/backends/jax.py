"""Keras on JAX: a step takes and returns its state, compiled or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import keras

from lossscale import registry
from lossscale.common.checks import scaled_value
from lossscale.errors import UnsupportedError
from lossscale.jax import gradients as jax_gradients
from lossscale.jax.apply_or_skip import gated
from lossscale.keras.backends import Backend, check_without_tape
from lossscale.keras_common.scaled_gradients import Location
from lossscale.keras_common.state import ScaleVariables
from lossscale.keras_common.step import OverflowCheck, Step
from lossscale.rules import GradientStats, ScaleRule


class JaxBackend(Backend):
    """Keras on JAX."""

    namespace = keras.ops
    gradient_stats = staticmethod(jax_gradients.gradient_stats)
    all_finite = staticmethod(jax_gradients.all_finite)
    flat_gradients = staticmethod(jax_gradients.flat_gradients)

    @staticmethod
    def new_overflow_tracker() -> Any:
        """Returns what tracks overflows for a monitor."""
        tracker = registry.package("lossscale.jax.overflow_tracker").OverflowTracker
        return tracker(_new_variable)

    # --- One step -----------------------------------------------------------------------------

    def check(
        self, step: Step, rule: ScaleRule, inner: Any, scale_variables: ScaleVariables
    ) -> OverflowCheck:
        """Checks whether the gradients are finite, with a scale that was passed in."""
        _check_not_baked_in(step.scale)
        return super().check(step, rule, inner, scale_variables)

    def runs_now(self, gradients: Sequence[Any]) -> bool:
        """Whether the step is not compiled."""
        return not _any_traced(gradients)

    def apply_or_skip(
        self,
        optimizer: Any,
        stats: GradientStats,
        step: Step,
        apply: Callable[[Sequence[Any], Any], None],
        update_scale: Callable[[GradientStats], None],
    ) -> None:
        """Selects each variable's new value in a compiled function; otherwise the host decides."""
        if jax_gradients.is_traced([stats.finite]):
            _apply_gated(stats.finite, step, optimizer.inner_optimizer, apply)
        elif bool(stats.finite):
            apply(step.gradients, step.scale)
        update_scale(stats)

    def run_guarded(
        self,
        model: Any,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        optimizers: Sequence[Any],
        weights_of: Callable[[Any], list[Any]],
    ) -> Any:
        """Selects the weights in the state that a step returns."""
        state = args[0]
        kept = set(map(id, weights_of(model)))
        counters = {id(optimizer._steps_skipped) for optimizer in optimizers}
        variables = getattr(model.optimizer, "variables", ())
        places = [place for place, each in enumerate(variables) if id(each) in counters]
        if not places:
            raise UnsupportedError(
                "On JAX, a guarded model must be compiled with the optimizer whose skips count. "
                "`fit` passes the variables of no other optimizer to `train_step`."
            )
        logs, after = step(*args)
        moved = [state[2][place] != after[2][place] for place in places]
        skipped = jnp.any(jnp.stack(moved))
        chosen = [
            jnp.where(skipped, old, new) if id(each) in kept else new
            for each, old, new in zip(
                model.non_trainable_variables, state[1], after[1], strict=True
            )
        ]
        return logs, (after[0], chosen, *after[2:])

    # --- Where calls are made, variables and arrays -------------------------------------------

    def current_location(self) -> Location:
        """A key of the function that is being compiled, or None."""
        return getattr(_traced_zero(), "_trace", None), (0,)

    def read(self, variable: Any) -> Any:
        """The current value of a Keras variable, an array."""
        return jnp.asarray(variable.value)

    def is_on_host(self, variable: Any) -> bool:
        """Whether nothing waits to read a variable."""
        return {device.platform for device in variable._value.devices()} == {"cpu"}

    def prepare_own_variable(self, variable: Any) -> None:
        """Makes a variable raise a clear error if Keras' trainer has taken its value."""
        if variable._value is not None:
            # Keras asks it for a value then; used once, it is None otherwise.
            variable._initializer = _no_value

    def scaled(self, loss: Any, scale: Any) -> Any:
        """Multiplies a loss by the scale, in float32 or wider."""
        _check_not_baked_in(scale)
        return jax_gradients.scaled(loss, scale)

    def unscaled(self, gradients: Sequence[Any], scale: Any, powers_of_two: bool) -> list[Any]:
        """Divides gradients by the scale; see `jax.gradients.unscaled`."""
        _check_not_baked_in(scale)
        if _any_traced(gradients):
            # XLA would fold a fixed scale and the learning rate into one factor, which may be 0.
            scale = jax.lax.optimization_barrier(scale)
        return jax_gradients.unscaled(gradients, scale, powers_of_two)

    def cast(self, gradient: Any, dtype: str) -> Any:
        """Returns a gradient, dense or sparse, in another dtype."""
        return gradient.astype(dtype)

    # --- Gradients of a loss ------------------------------------------------------------------

    def differentiate(
        self,
        loss: Any,
        variables: Any,
        scale: Callable[[Any], Any],
        *,
        tape: Any = None,
        grad_loss: Any = None,
    ) -> tuple[list[Any], list[Any]]:
        """Returns the gradients of a scaled loss, a callable, and the variables they belong to.

        What the loss assigns to other variables (averages of a batch normalization, seeds) is kept.
        """
        check_without_tape("JAX", variables, tape)
        if not callable(loss):
            return self.symbolic_gradients(loss, variables), []
        given = variables
        variables = self.flat_variables(given() if callable(given) else given)
        if callable(given) and not variables:
            # A model that was never called makes its variables now.
            with keras.StatelessScope():
                loss()
            variables = self.flat_variables(given())
        scope = _LossScope()

        def scaled(values: list[Any]) -> tuple[Any, list[Any]]:
            scope.begin(variables, values)
            with scope:
                value = jnp.asarray(scaled_value(loss, scale))
                return value, [scope.get_current_value(each) for each in scope.assigned.values()]

        value, pull, assigned = jax.vjp(scaled, [each.value for each in variables], has_aux=True)
        cotangent = jnp.ones_like(value) if grad_loss is None else grad_loss
        [gradients] = pull(jnp.broadcast_to(jnp.asarray(cotangent, value.dtype), value.shape))
        for variable, new in zip(scope.assigned.values(), assigned, strict=True):
            variable.assign(new)
        return [
            gradient if id(variable) in scope.read else None
            for variable, gradient in zip(variables, gradients, strict=True)
        ], variables

    def symbolic_gradients(self, loss: Any, variables: Any) -> Any:
        """Raises: an array does not know how it was computed."""
        raise UnsupportedError(
            "On the JAX backend `loss` must be a callable without arguments. "
            f"Received: {loss!r}. Pass lambda: loss_fn(y, model(x)). In a "
            "function that jax.jit compiles, take gradients with jax.grad, and apply them with "
            "stateless_apply()."
        )


class _LossScope(keras.StatelessScope):
    """Holds what a loss is derived by; notes the variables that it reads, and those it assigns."""

    def begin(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Starts with these values of these variables."""
        super().__init__(zip(variables, values, strict=True), collect_losses=True)
        self.read: set[int] = set()
        self.assigned: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Takes what is assigned to a variable."""
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable: Any) -> Any:
        """The value of a variable here, or in the scope around."""
        self.read.add(id(variable))
        value = super().get_current_value(variable)
        outer = self.original_scope
        return value if value is not None or outer is None else outer.get_current_value(variable)


def _apply_gated(
    finite: Any, step: Step, inner: Any, apply: Callable[[Sequence[Any], Any], None]
) -> None:
    """Applies gradients, with the old value of each variable unless `finite`."""
    everything = (*inner.variables, *inner._trainable_variables, *step.variables)
    targets = list({id(variable): variable for variable in everything}.values())
    old = [target.value for target in targets]
    leaves, structure = jax.tree.flatten(step.gradients)
    # Nothing inside sees a number that is not finite.
    leaves = [jnp.where(finite, leaf, jnp.zeros_like(leaf)) for leaf in leaves]

    def applied(old: list[Any], leaves: list[Any], scale: Any) -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(targets, old, strict=True))) as scope:
            apply(jax.tree.unflatten(structure, leaves), scale)
        return [scope.get_current_value(target) for target in targets]

    given = old, leaves, step.scale
    inputs = jax.tree.leaves(given)
    new = gated(jax.make_jaxpr(applied)(*given), inputs, dict(enumerate(old)), finite)
    for target, value in zip(targets, new, strict=True):
        target.assign(value)


def _new_variable(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    return keras.Variable(
        initializer="zeros", shape=shape, dtype=dtype, trainable=False, name=f"tracked_{name}"
    )


def _no_value(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "The optimizer's variables have no values now: while `fit` runs on JAX, these are "
        "arguments of the compiled step. In a `train_step`, open keras.StatelessScope("
        "state_mapping=zip(optimizer.variables, values)) with the values that the step was given. "
        "In a callback, read from `self.model.optimizer`, which puts the values back."
    )


def _any_traced(gradients: Sequence[Any]) -> bool:
    return jax_gradients.is_traced(jax.tree.leaves(list(gradients)))


def _traced_zero() -> Any:
    # While a function is compiled, every operation is traced, also one on constants.
    return jnp.zeros(()) + 0


def _check_not_baked_in(scale: Any) -> None:
    """Raises if a variable's value would become a constant of a function being compiled."""
    is_known = isinstance(scale, jax.Array) and not jax_gradients.is_traced([scale])
    if is_known and jax_gradients.is_traced([_traced_zero()]):
        raise UnsupportedError(
            "Inside a function that jax.jit compiles, the loss scale must come in as an argument; "
            "read from the optimizer's variable it would stay what it is now. Call scale_loss() "
            "in keras.StatelessScope(state_mapping=zip(optimizer.variables, values)), and apply "
            "gradients with stateless_apply(values, ...)."
        )


BACKEND = JaxBackend()
