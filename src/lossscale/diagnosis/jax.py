"""Gradients of a loss in JAX in float32 and in float16.

Each kind of pass is a compiled function, which rounds to float16 wherever the loss casts to it.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike
from numpy.typing import NDArray

from lossscale.checks import checked_scale
from lossscale.diagnosis.measurement import Pass, checked_loss, explained_in_float16, measure
from lossscale.diagnosis.report import Report
from lossscale.errors import ArgumentError, ArgumentTypeError, first_names
from lossscale.explain.jax import JaxprWatch
from lossscale.explain.origins import explain_pass
from lossscale.explain.text import Explanation
from lossscale.jax.apply_or_skip import ArrayTree
from lossscale.optax.gating import is_gradient
from lossscale.optax.overflow_tracking import named_leaves

LossFn: TypeAlias = Callable[[ArrayTree, ArrayTree, Any], ArrayLike]
"""A loss of the parameters, of a batch, and of a dtype."""
Leaf: TypeAlias = jax.Array | NDArray[np.generic] | np.generic
"""An array of a tree of the user's."""
Arrays: TypeAlias = Mapping[int, Leaf]
"""Arrays by their number among the leaves of the parameters and a batch."""
Computed: TypeAlias = tuple[jax.Array, dict[int, jax.Array]]
"""The loss, and its gradients by the number of the parameter."""
Key: TypeAlias = tuple[bool, PyTreeDef, str]
"""What a compiled function depends on: whether it is in float16, and all that is not an array."""


def diagnose(
    loss_fn: LossFn,
    params: ArrayTree,
    batches: Iterable[ArrayTree],
    *,
    parameters: Iterable[str] | None = None,
    max_batches: int = 2,
) -> Report:
    """Measures how accurate gradients are in float16, and which rule they need.

    On each batch, `loss_fn(params, batch, dtype)` is differentiated several times: in float32, and
    in float16 at several loss scales. JAX has no dtype policy that could be switched from outside,
    so the function takes the dtype to compute in.

    It is compiled by `jax.jit`, once for each kind of pass. Nothing is updated; parameters and
    batches stay unchanged.

    Gradients change as a network learns. Measure at the start of training, and again later.

    Args:
        loss_fn: A pure function of the parameters, a batch and a dtype, `jnp.float16` or
            `jnp.float32`, to which it casts its inputs. Returns the unscaled loss, a scalar. Draw
            random numbers in float32, from keys in the batch, and cast them: float16 would draw
            other numbers from the same key.
        params: The parameters: a tree of arrays, or a model of Equinox or NNX. Every floating-point
            array in it counts as trained. For the float32 passes, 16-bit arrays are widened, those
            in a batch too.
        batches: An iterable of batches, each a tree of arrays. Their size matters: a loss is
            averaged over the batch, so a larger batch has smaller gradients. Use the batch size of
            training.
        parameters: The parameters that the optimizer of this loss trains, if not all: named as in
            the report, or by the beginning of their path, such as `["critic"]`.
        max_batches: The largest number of batches to measure on.

    Returns:
        The report. Print it, or read `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If what `loss_fn` returns or `batches` have another type.
        ArgumentError: If there is nothing to train, no batch, no loss to differentiate, or
            `loss_fn` does not compute in `dtype`.

    Examples:
        >>> def loss_fn(params, batch, dtype):
        ...     predicted = batch.astype(dtype) @ params["w"].astype(dtype)
        ...     return jnp.mean(predicted.astype(jnp.float32) ** 2) / 2**30
        >>> report = diagnose(loss_fn, {"w": jnp.ones((3, 1))}, [jnp.ones((2, 3))])
        >>> report.verdict.value, report.rule.initial_scale > 1
        ('needed', True)
    """
    run = JaxGradientFunction(params, loss_fn, parameters)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    name = "this loss" if name == "<lambda>" else name
    setting = f"JAX, {jax.default_backend()}, compiled, by the loss with dtype=float16"
    return Report(name, setting, measure(run, batches, max_batches))


class JaxGradientFunction:
    """The passes of a loss; see `lossscale.diagnosis.measurement.GradientFunction`."""

    def __init__(
        self, params: ArrayTree, loss_fn: LossFn, parameters: Iterable[str] | None = None
    ) -> None:
        self._params, self._loss_fn = params, loss_fn
        self._owned = _checked_names(params, parameters)
        self._compiled: dict[Key, Callable[[Arrays, ArrayLike], Computed]] = {}

    def __call__(self, batch: ArrayTree, scale: float, half: bool) -> Pass:
        """Computes a pass."""
        compute, arrays, key = self._function(batch, half)
        if key not in self._compiled:
            exactly = {"xla_allow_excess_precision": False}
            function = jax.jit(compute, compiler_options=exactly)
            _check_dtypes(str(function.trace(arrays, scale).jaxpr), half)
            self._compiled[key] = function
        loss, gradients = self._compiled[key](arrays, scale)
        owned = self._owned_ones(gradients)
        found = {path: np.asarray(each).astype(np.float32) for path, each in owned.items()}
        return Pass(float(loss), found)

    def _function(
        self, batch: ArrayTree, half: bool
    ) -> tuple[Callable[[Arrays, ArrayLike], Computed], Arrays, Key]:
        """Returns what computes the loss and its gradients, its arrays, and a key of it."""
        leaves, structure = jax.tree.flatten((self._params, batch))
        # Other leaves, such as the functions in a model of Equinox, are a part of what is compiled.
        arrays = {
            n: leaf if half else _widened(leaf) for n, leaf in enumerate(leaves) if _is_array(leaf)
        }
        rest = [None if n in arrays else leaf for n, leaf in enumerate(leaves)]
        of_params = len(jax.tree.leaves(self._params))
        dtype = jnp.float16 if half else jnp.float32

        def compute(arrays: Arrays, scale: ArrayLike) -> Computed:
            def loss_of(trained: Arrays) -> jax.Array:
                given = {**arrays, **trained}
                filled = [given.get(n, leaf) for n, leaf in enumerate(rest)]
                params, batch = jax.tree.unflatten(structure, filled)
                loss: Leaf = checked_loss(self._loss_fn(params, batch, dtype), _is_array)
                wide = jnp.promote_types(loss.dtype, jnp.float32)
                return jnp.asarray(loss).reshape(()).astype(wide)

            trained = {n: each for n, each in arrays.items() if n < of_params and is_gradient(each)}
            loss, pull = jax.vjp(loss_of, trained)
            return loss, pull(jnp.asarray(scale, loss.dtype))[0]

        return compute, arrays, (half, structure, str(rest))

    # JAX computes constants with NumPy, which warns of an overflow.
    @np.errstate(all="ignore")
    def explain(self, batch: ArrayTree, scale: float, half: bool = True) -> Explanation:
        """Explains why a pass is not finite."""
        watch = functools.cache(functools.partial(self._watch, batch))

        def explained(half: bool) -> Explanation:
            return explain_pass(lambda s: watch(half)(s), scale, lambda s: watch(False)(s))

        return explained_in_float16(explained) if half else explained(False)

    def _watch(self, batch: ArrayTree, half: bool) -> JaxprWatch:
        compute, arrays, _ = self._function(batch, half)

        def owned(arrays: Arrays, scale: ArrayLike) -> tuple[jax.Array, list[jax.Array]]:
            loss, gradients = compute(arrays, scale)
            return loss, list(self._owned_ones(gradients).values())

        weights = {id(leaf): path for path, leaf in named_leaves(self._params)}
        inputs = {id(leaf): path for path, leaf in named_leaves({"batch": batch})}
        names = [
            (weights.get(id(each), inputs.get(id(each), "batch")), id(each) in weights)
            for each in arrays.values()
        ]
        watch = JaxprWatch(owned, arrays, names)
        _check_dtypes(str(watch.closed), half)
        return watch

    def _owned_ones(self, gradients: Mapping[int, jax.Array]) -> dict[str, jax.Array]:
        """The gradients of the parameters that are trained, by path."""
        paths = [path for path, leaf in named_leaves(self._params) if _is_array(leaf)]
        named = zip(paths, gradients.values(), strict=True)
        return {path: gradient for path, gradient in named if path in self._owned}


def explain(
    loss_fn: LossFn,
    params: ArrayTree,
    batch: ArrayTree,
    *,
    scale: float = 2.0**15,
    parameters: Iterable[str] | None = None,
) -> Explanation:
    """Explains why a step on a batch would be skipped: the first operation that is not finite.

    A skipped step changed no parameter, so `params` are those that it returned. This evaluates the
    loss and its gradients in float16, operation by operation, which takes many times as long as a
    compiled step. A compiled step may compute some of them together, without rounding to float16 in
    between.

    Args:
        loss_fn: As for `diagnose`: a pure function of the parameters, a batch and a dtype.
        params: The parameters, as for `diagnose`.
        batch: One batch, a tree of arrays.
        scale: The loss scale of the step.
        parameters: The parameters that the optimizer of this loss trains, as for `diagnose`.

    Returns:
        The explanation. Its cause is "unknown" if the pass is finite, also if an overflow in it is
        made finite by a later operation, which the text names.

    Raises:
        ArgumentTypeError: If what `loss_fn` returns has another type.
        ArgumentError: If `scale` is not a number in [2**-126, 2**126], there is nothing to train,
            or `loss_fn` does not compute in `dtype`.

    Examples:
        >>> def loss_fn(params, batch, dtype):
        ...     x = batch.astype(dtype) * params["w"].astype(dtype)
        ...     return jnp.mean((x / (x + 1e-8)).astype(jnp.float32))
        >>> found = explain(loss_fn, {"w": jnp.ones(3)}, jnp.zeros((2, 3)))
        >>> str(found.cause), found.operation
        ('singular', 'div')
        >>> "the epsilon 1e-08 is 0 in float16" in found.text
        True
    """
    run = JaxGradientFunction(params, loss_fn, parameters)
    return run.explain(batch, checked_scale("scale", scale))


def _checked_names(params: ArrayTree, parameters: Iterable[str] | None) -> set[str]:
    """The paths of the parameters that are trained."""
    paths = {path for path, leaf in named_leaves(params) if _is_array(leaf)}
    if not paths:
        raise ArgumentError(
            "`params` must have a floating-point array to train. Received: a "
            f"{type(params).__name__} without one."
        )
    found: set[str] = set()
    names = [parameters] if isinstance(parameters, str) else parameters
    if names is not None and not isinstance(names, Iterable):
        raise ArgumentTypeError(
            "`parameters` must be an iterable of names of parameters. Received: a "
            f"{type(names).__name__}."
        )
    for name in paths if names is None else names:
        fitting = {p for p in paths if p == name or p.startswith(f"{name}/")}
        if not fitting:
            raise ArgumentError(
                "`parameters` must be names of parameters, or the beginnings of their paths. "
                f"Received: {reprlib.repr(name)}, which is none of {first_names(sorted(paths))}."
            )
        found |= fitting
    if not found:
        raise ArgumentError("`parameters` must name a parameter. Received: nothing.")
    return found


def _is_array(leaf: object) -> TypeGuard[Leaf]:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _widened(leaf: Leaf) -> Leaf:
    narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(jnp.float32) if narrow else leaf


def _check_dtypes(jaxpr: str, half: bool) -> None:
    """Checks that a loss computes in the dtype that it receives."""
    if half == ("f16[" in jaxpr.replace("bf16[", "")):
        return
    found = (
        "nothing in float16 when dtype is float16" if half else "in float16 when dtype is float32"
    )
    raise ArgumentError(
        "`loss_fn(params, batch, dtype)` must compute in the dtype that it receives; it computes "
        f"{found}. Cast the parameters and the batch to dtype in it, or create the model with it, "
        "such as Net(dtype=dtype)."
    )
