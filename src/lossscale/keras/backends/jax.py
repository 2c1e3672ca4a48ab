"""Keras on JAX: a step takes and returns its state, compiled or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import keras

import lossscale.framework_types as ft
from lossscale import registry
from lossscale.common.arrays import Arrays
from lossscale.common.gradient_arguments import scaled_value
from lossscale.errors import UnsupportedError
from lossscale.jax import gradients as jax_gradients
from lossscale.jax.apply_or_skip import gated
from lossscale.keras.backends import Backend, add, assign, check_without_tape, flat_variables
from lossscale.keras_common.step import Step


def _all_finite(
    gradients: ft.Gradients, scale: ft.Scalar = None, powers_of_two: bool = True
) -> jax.Array:
    _check_not_baked_in(scale)
    return jax_gradients.all_finite(gradients, scale, powers_of_two)


def _scaled(loss: ft.Array, scale: ft.Scalar) -> jax.Array:
    _check_not_baked_in(scale)
    return jax_gradients.scaled(loss, scale)


def _unscaled(gradients: ft.Gradients, scale: ft.Scalar, powers_of_two: bool) -> list[Any]:
    _check_not_baked_in(scale)
    if _any_traced(gradients):
        # XLA would fold a fixed scale and the learning rate into one factor, which may be 0.
        scale = jax.lax.optimization_barrier(scale)
    return jax_gradients.unscaled(gradients, scale, powers_of_two)


def _branch(
    finite: ft.Scalar,
    step: Step,
    inner: ft.KerasOptimizer,
    written: Callable[[], list[ft.Variable]],
    apply: Callable[..., object],
    update: Callable[[ft.Scalar], object],
) -> None:
    """Selects each variable's new value in a compiled function; otherwise the host decides."""
    if jax_gradients.is_traced([finite]):
        _apply_gated(finite, step, written(), apply)
    elif bool(finite):
        apply(step.gradients, step.scale)
    update(finite)


def _run_guarded(
    models: Sequence[ft.Model], step: partial[Any], counters: ft.Variables, weights: ft.Variables
) -> ft.Structure:
    """Selects the weights in the state that a `train_step` takes first and returns."""
    [model], state = models, step.args[0]
    kept, counts = set(map(id, weights)), set(map(id, counters))
    variables = getattr(model.optimizer, "variables", ())
    places = [place for place, each in enumerate(variables) if id(each) in counts]
    if not places:
        raise UnsupportedError(
            "On JAX, a guarded model must be compiled with the optimizer whose skips count. "
            "`fit` passes the variables of no other optimizer to `train_step`."
        )
    logs, after = step()
    moved = [state[2][place] != after[2][place] for place in places]
    skipped = jnp.any(jnp.stack(moved))
    chosen = [
        jnp.where(skipped, old, new) if id(each) in kept else new
        for each, old, new in zip(model.non_trainable_variables, state[1], after[1], strict=True)
    ]
    return logs, (after[0], chosen, *after[2:])


def _new_overflow_tracker() -> Any:
    tracker = registry.package("lossscale.jax.overflow_tracker").OverflowTracker
    return tracker(_new_variable)


def _is_on_host(variable: ft.Variable) -> bool:
    return {device.platform for device in variable._value.devices()} == {"cpu"}


def _prepare_own_variable(variable: ft.Variable) -> None:
    """Makes a variable raise a clear error if Keras' trainer has taken its value."""
    if variable._value is not None:
        # Keras asks it for a value then; used once, it is None otherwise.
        variable._initializer = _no_value


def _differentiate(
    loss: ft.Loss, var_list: ft.VarList, scale: ft.Function, tape: ft.Tape, grad_loss: Any
) -> tuple[list[ft.Gradient], list[ft.Variable]]:
    """Returns the gradients of a scaled loss, a callable, and the variables they belong to.

    What the loss assigns to other variables (averages of a batch normalization, seeds) is kept.
    """
    check_without_tape("JAX", var_list, tape)
    if not callable(loss):
        _symbolic_gradients(loss, var_list)
    variables = flat_variables(var_list() if callable(var_list) else var_list)
    if callable(var_list) and not variables:
        # A model that was never called makes its variables now.
        with keras.StatelessScope():
            loss()
        variables = flat_variables(var_list())
    scope = _LossScope()

    def scaled(values: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
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


def _symbolic_gradients(loss: ft.Tensor, variables: ft.Variables) -> NoReturn:
    """Raises: an array does not know how it was computed."""
    raise UnsupportedError(
        "On the JAX backend `loss` must be a callable without arguments. "
        f"Received: {loss!r}. Pass lambda: loss_fn(y, model(x)). In a "
        "function that jax.jit compiles, take gradients with jax.grad, and apply them with "
        "stateless_apply()."
    )


class _LossScope(keras.StatelessScope):
    """Holds what a loss is derived by; notes the variables that it reads, and those it assigns."""

    def begin(self, variables: ft.Variables, values: Sequence[jax.Array]) -> None:
        """Starts with these values of these variables."""
        super().__init__(zip(variables, values, strict=True), collect_losses=True)
        self.read: set[int] = set()
        self.assigned: dict[int, ft.Variable] = {}

    def add_update(self, update: tuple[ft.Variable, jax.Array]) -> None:
        """Takes what is assigned to a variable."""
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable: ft.Variable) -> ft.Tensor:
        """The value of a variable here, or in the scope around."""
        self.read.add(id(variable))
        value = super().get_current_value(variable)
        outer = self.original_scope
        return value if value is not None or outer is None else outer.get_current_value(variable)


def _apply_gated(
    finite: jax.Array, step: Step, written: list[ft.Variable], apply: Callable[..., object]
) -> None:
    """Applies gradients, with the old value of each variable unless `finite`."""
    targets = list({id(variable): variable for variable in written}.values())
    old = [target.value for target in targets]
    leaves, structure = jax.tree.flatten(step.gradients)
    # Nothing inside sees a number that is not finite.
    leaves = [jnp.where(finite, leaf, jnp.zeros_like(leaf)) for leaf in leaves]

    def applied(old: list[jax.Array], leaves: list[jax.Array], scale: ft.Scalar) -> list[jax.Array]:
        with keras.StatelessScope(state_mapping=list(zip(targets, old, strict=True))) as scope:
            apply(jax.tree.unflatten(structure, leaves), scale)
        return [scope.get_current_value(target) for target in targets]

    given = old, leaves, step.scale
    inputs = jax.tree.leaves(given)
    new = gated(jax.make_jaxpr(applied)(*given), inputs, dict(enumerate(old)), finite)
    for target, value in zip(targets, new, strict=True):
        target.assign(value)


def _new_variable(name: str, dtype: str, shape: tuple[int, ...]) -> ft.Variable:
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


def _any_traced(gradients: ft.Gradients) -> bool:
    return jax_gradients.is_traced(jax.tree.leaves(list(gradients)))


def _traced_zero() -> jax.Array:
    # While a function is compiled, every operation is traced, also one on constants.
    return jnp.zeros(()) + 0


def _check_not_baked_in(scale: ft.Scalar) -> None:
    """Raises if a variable's value would become a constant of a function being compiled."""
    is_known = isinstance(scale, jax.Array) and not jax_gradients.is_traced([scale])
    if is_known and jax_gradients.is_traced([_traced_zero()]):
        raise UnsupportedError(
            "Inside a function that jax.jit compiles, the loss scale must come in as an argument; "
            "read from the optimizer's variable it would stay what it is now. Call scale_loss() "
            "in keras.StatelessScope(state_mapping=zip(optimizer.variables, values)), and apply "
            "gradients with stateless_apply(values, ...)."
        )


BACKEND = Backend(
    arrays=Arrays(
        scaled=_scaled,
        unscaled=_unscaled,
        all_finite=_all_finite,
        flat_gradients=jax_gradients.flat_gradients,
        read=lambda variable: jnp.asarray(variable.value),
        assign=assign,
        add=add,
        is_on_host=_is_on_host,
        branch=_branch,
        run_guarded=_run_guarded,
        new_overflow_tracker=_new_overflow_tracker,
        runs_now=lambda gradients: not _any_traced(gradients),
        # A key of the function that is being compiled, or None.
        location=lambda: (getattr(_traced_zero(), "_trace", None), (0,)),
    ),
    namespace=keras.ops,
    differentiate=_differentiate,
    symbolic_gradients=_symbolic_gradients,
    prepare_own_variable=_prepare_own_variable,
)
