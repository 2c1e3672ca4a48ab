"""Runs an inner transformation so that a skipped step changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.extend.core import ClosedJaxpr
from jax.tree_util import PyTreeDef

from lossscale.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.jax.apply_or_skip import ArrayTree, gated, state_dtype, static_size
from lossscale.jax.gradients import is_traced
from lossscale.rules import ScaleRule

Update = Callable[[], tuple[ArrayTree, ArrayTree]]
"""Runs the inner transformation on the gradients; returns updates and the new state."""


State = TypeVar("State")
Tree = TypeVar("Tree")

if TYPE_CHECKING:

    class GradientTransformationExtraArgs(optax.GradientTransformationExtraArgs, Generic[State]):
        """Optax's class, with the type of the state, which Optax does not know."""

        def __new__(
            cls, init: Callable[[ArrayTree], State], update: Callable[..., tuple[ArrayTree, State]]
        ) -> Self: ...

        # Methods, because a field cannot keep the class of the updates.
        def init(self, params: ArrayTree) -> State: ...  # type: ignore[override]
        # A state, or a variable annotated as `optax.OptState`.
        def update(  # type: ignore[override]  # as above
            self, updates: Tree, state: optax.OptState, params: ArrayTree = None, **extra_args: Any
        ) -> tuple[Tree, State]: ...

else:
    GradientTransformationExtraArgs = optax.GradientTransformationExtraArgs


def owner_of(tx: object) -> object:
    """The object whose `init` and `update` a transformation consists of; itself if there is none.

    It says which function of this package has made the transformation, and its rule.
    """
    return getattr(getattr(tx, "update", None), "__self__", tx)


def checked_transformation(inner: object) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that takes extra arguments.

    Raises:
        ArgumentTypeError: If it is not a transformation.
    """
    init, update = getattr(inner, "init", None), getattr(inner, "update", None)
    # A rule has methods of these names too.
    if isinstance(inner, (type, ScaleRule)) or not (callable(init) and callable(update)):
        raise ArgumentTypeError(
            "The first argument must be an Optax transformation to wrap, such as "
            f"optax.adamw(1e-3). Received: {inner!r} of type {type(inner).__name__}. For Keras and "
            "PyTorch optimizers, use lossscale.LossScaleOptimizer."
        )
    if isinstance(inner, optax.GradientTransformationExtraArgs):
        return inner
    # Optax checks only the class, and would drop the extra arguments of MultiSteps.
    kinds = {parameter.kind for parameter in inspect.signature(update).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return optax.GradientTransformationExtraArgs(init, update)
    plain = optax.GradientTransformation(init, update)
    # Public, but not in Optax's `__all__`.
    return optax.with_extra_args_support(plain)  # type: ignore[attr-defined]


def is_gradient(leaf: object) -> TypeGuard[Array]:
    """Whether a leaf is a floating-point or complex array, not integers or float0."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_narrow(leaf: object) -> TypeGuard[Array]:
    """Whether a leaf is a floating-point array of 16 bits or less."""
    return is_gradient(leaf) and leaf.dtype.itemsize < 4


def widened_if_narrow(leaf: object) -> object:
    """Converts a leaf to float32 if it is a floating-point array of 16 bits or less."""
    if not is_narrow(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=jnp.float32)  # type: ignore[no-untyped-call]  # of JAX
    return jnp.asarray(leaf, jnp.float32)


def with_arrays(tree: ArrayTree) -> ArrayTree:
    """Converts Python floats in a tree to arrays: outside `jit` a gradient may be a float."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, (float, complex)) else x, tree)


def check_extra_args(extra_args: Mapping[str, Any], gradients: ArrayTree) -> None:
    """Checks what the inner transformation is to get besides the gradients.

    Args:
        extra_args: The arguments by name.
        gradients: The scaled gradients.

    Raises:
        UnsupportedError: If one is a function, or holds the scaled gradients.
    """
    given = {id(leaf) for leaf in jax.tree.leaves(gradients) if is_gradient(leaf)}
    for name, value in extra_args.items():
        leaves = jax.tree.leaves(value)
        is_gradients = (name == "grad" and leaves) or any(id(leaf) in given for leaf in leaves)
        if is_gradients or callable(value):
            raise UnsupportedError(
                f"`{name}` must be neither a function nor the scaled gradients. Line searches, "
                "L-BFGS and others that evaluate the loss need float32: leave out loss_scaled. "
                "Other optimizers get the unscaled gradients as `updates`."
            )


def has_elements(leaves: Sequence[object]) -> bool:
    """Whether there is an element to check."""
    return any(is_gradient(leaf) and static_size(leaf) != 0 for leaf in leaves)


def skipped_like(update: Array) -> Array:
    """An update that leaves a parameter unchanged, bit for bit: adding +0.0 turns -0.0 into 0.0."""
    if not is_gradient(update):
        return jnp.zeros_like(update)
    zero = complex(-0.0, -0.0) if jnp.issubdtype(update.dtype, jnp.complexfloating) else -0.0
    return jnp.full_like(update, zero)


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array or a number.

    Gradients with respect to integers are float0 arrays, which no operation accepts. A model of
    Equinox or a state of Flax may contain functions.
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (bool, int, float, complex))
    return bool(dtype != jax.dtypes.float0)


class TracedUpdate(NamedTuple):
    """A traced update of a transformation.

    Attributes:
        jaxpr: Takes nothing; returns the array leaves of the updates and of the new state.
        updates: Number of outputs that are updates.
        state: The new state, with a type in place of each array.
        rebuild: Builds the updates and the new state from the outputs.
    """

    jaxpr: ClosedJaxpr
    updates: int
    state: ArrayTree
    rebuild: Callable[[Sequence[object]], tuple[ArrayTree, ArrayTree]]


def trace(update: Update) -> TracedUpdate:
    """Traces an update without running it."""
    # Set by the trace, which returns arrays only.
    kept: list[object]
    form: PyTreeDef

    def flat() -> list[Array]:
        nonlocal kept, form
        outputs, form = jax.tree.flatten(tuple(update()))
        kept = [None if is_array(leaf) else _untraced(leaf) for leaf in outputs]
        return list(filter(is_array, outputs))

    jaxpr = jax.make_jaxpr(flat)()

    def rebuild(outputs: Sequence[object]) -> tuple[ArrayTree, ArrayTree]:
        rest = iter(outputs)
        whole = [next(rest) if leaf is None else leaf for leaf in kept]
        updates, new_state = jax.tree.unflatten(form, whole)
        return updates, new_state

    updates, new_state = rebuild(jaxpr.out_avals)
    number = sum(map(is_array, jax.tree.leaves(updates)))
    return TracedUpdate(jaxpr, number, new_state, rebuild)


def _untraced(leaf: ArrayTree) -> object:
    """A leaf without a tracer of the trace that has ended: a float0 array is 0."""
    return np.zeros(leaf.shape, leaf.dtype) if getattr(leaf, "dtype", None) is not None else leaf


def update_or_skip(
    update: Update, finite: Array | None, state: ArrayTree
) -> tuple[ArrayTree, ArrayTree]:
    """Runs an update if the gradients are finite, and otherwise changes nothing.

    Args:
        update: Runs the inner transformation on the unscaled gradients, which are 0 if they are
            not finite.
        finite: Whether the gradients are finite, a boolean scalar array; None if every step is
            applied.
        state: The state of the inner transformation.

    Returns:
        The updates, -0.0 on a skip; and the new state.

    Raises:
        ArgumentError: If the update changes the structure of the state, so that a step cannot be
            skipped.
    """
    if finite is None:
        updates, new_state = update()
        return updates, _in_dtypes_of(state, new_state)
    if not is_traced([finite]):
        return _run_at_once(update, finite, state)
    traced = trace(update)
    _check_form(state, traced.state)
    old_values = dict(enumerate(map(jnp.asarray, _arrays(state)), start=traced.updates))
    outputs = gated(traced.jaxpr, [], old_values, finite)
    updates = [jnp.where(finite, x, skipped_like(x)) for x in outputs[: traced.updates]]
    return traced.rebuild([*updates, *outputs[traced.updates :]])


def _run_at_once(update: Update, finite: Array, state: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
    """Runs an update outside compiled functions, where JAX would compile a branch at each call."""
    updates, new_state = update()
    if bool(jax.device_get(finite)):
        return updates, _in_dtypes_of(state, new_state)
    nothing = [_skipped_jit(finite, x) if is_array(x) else x for x in jax.tree.leaves(updates)]
    return jax.tree.unflatten(jax.tree.structure(updates), nothing), state


# Selected by a constant decision: with a constant array, every device would hold the whole array.
_skipped_jit = jax.jit(lambda finite, update: jnp.where(finite, update, skipped_like(update)))


# --- The state before and after a step ------------------------------------------------------------


def _arrays(state: ArrayTree) -> list[Array]:
    return list(filter(is_array, jax.tree.leaves(state)))


def form_change(old: ArrayTree, new: ArrayTree) -> str:
    """Returns the first difference between two trees, in structure or in the shape of an array.

    Args:
        old: A tree.
        new: Another tree; the types of arrays are enough.

    Returns:
        A part of a message; an empty string if there is no difference.
    """
    before, after = (
        {path: jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(tree) if is_array(leaf)}
        for tree in (old, new)
    )
    for path in {**before, **after}:
        if before.get(path) != after.get(path):
            name = jax.tree_util.keystr(path)
            return f"`{name}` has shape {before.get(path)} before and {after.get(path)} after"
    structures: list[object] = [jax.tree.structure(each) for each in (old, new)]
    return "" if structures[0] == structures[1] else "a node or a non-array leaf changed"


def _check_form(old_state: ArrayTree, new_state: ArrayTree) -> None:
    if change := form_change(old_state, new_state):
        raise ArgumentError(
            "The inner optimizer changes the structure of its state, so a step cannot be skipped: "
            f"{change}. Create all state in init(), and keep changing values in arrays."
        )


def _in_dtypes_of(old_state: ArrayTree, new_state: ArrayTree) -> ArrayTree:
    """Returns the state after an applied step, in the dtypes that a skipped step would keep."""
    _check_form(old_state, new_state)

    def same(old: ArrayTree, new: ArrayTree) -> ArrayTree:
        if not is_array(new):
            return new
        # A user may have put a Python number into the state.
        old, new = jnp.asarray(old), jnp.asarray(new)
        return jnp.asarray(new, state_dtype(new, old))

    return jax.tree.map(same, old_state, new_state)
