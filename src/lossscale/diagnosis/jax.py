"""Gradients of a loss in JAX in float32 and in float16, and the ranges of its operations.

Each kind of pass is one compiled function, which rounds to float16 wherever the loss says so. JAX
knows no layers: an operation is an equation of the traced loss, named by the line it is written
in. A loop and a branch are one operation each, and a function with a derivative of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from lossscale.checks import checked_above_zero, checked_count
from lossscale.diagnosis.batches import check_batches, checked_tolerance, first_batches
from lossscale.diagnosis.measurement import (
    LOSS,
    LossGradients,
    OutputRange,
    check_owners,
    checked_losses,
    numbered,
)
from lossscale.diagnosis.report import Report, make_report
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax.gradients import scaled
from lossscale.jax.jaxprs import bind
from lossscale.optax.loops import loss_scale
from lossscale.optax.overflow_tracking import named_leaves

CALL = "loss_fn(params, batch, dtype)"
"""How the function of the user is called."""

_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
"""Primitives whose value and derivative are those of what is traced in them."""
_MOVES = {
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
    *("dynamic_update_slice", "expand_dims", "gather", "name", "pad", "reshape", "rev"),
    *("select_n", "sharding_constraint", "slice", "squeeze", "stop_gradient", "transpose"),
}
"""Primitives that compute nothing."""
_EXACTLY = {"xla_allow_excess_precision": False}


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    parameters: Mapping[str, Iterable[str]] | None = None,
    max_batches: int = 2,
    in_use: Any = None,
    has_aux: bool = False,
    grad: Callable[..., Any] | None = None,
    tolerance: float = 0.1,
    after_batch: Callable[[int], None] = lambda number: None,
) -> Report:
    """Measures how accurate gradients are in float16, and which rule they need.

    On each batch `loss_fn(params, batch, dtype)` is derived several times: in float32, and in
    float16 at several loss scales. So the function that trains in float16 has to be one that can
    compute in float32 too. JAX has no policy of dtypes that could be switched from outside, and
    each library says in its own way what it computes in; an argument serves all.

    It is compiled by `jax.jit`, once for each kind of pass. Nothing is updated. Parameters and
    batches are left as they are.

    Gradients change as a network learns. Ask at the start of training, and again later.

    Args:
        loss_fn: A pure function of the parameters, a batch and a dtype, `jnp.float16` or
            `jnp.float32`, to which it casts what it computes with. Returns the loss, not scaled, a
            scalar; or a dictionary of losses, each of which is judged by itself. Random numbers
            come from keys in the batch, and are drawn in float32 and cast: in float16 other numbers
            would be drawn from the same key.
        params: The parameters: a tree of arrays, or a model of Equinox or NNX with `grad`. In
            float32 arrays in 16 bits are widened, in a batch too.
        batches: An iterable of batches, trees of arrays. Their size matters: the loss is averaged
            over a batch, so gradients are the smaller, the larger it is. Use that of training.
        parameters: For a dictionary of losses: name of a loss to the parameters that its optimizer
            owns, named as in the report, or by the beginning of their path, such as
            `{"critic": ["critic"]}`. A loss without an entry is judged by all.
        max_batches: How many batches to measure on, at most.
        in_use: The loss scale that trains, which is measured as well: an optimizer's state that
            has one, a number, or None.
        has_aux: Whether `loss_fn` returns a pair of the loss and anything else.
        grad: What differentiates: `equinox.filter_value_and_grad`, `flax.nnx.value_and_grad` or
            another that is called as `grad(function)(params, batch)`; None for
            `jax.value_and_grad`. Then operations are not looked at.
        tolerance: How wrong a gradient may be, as a share of it.
        after_batch: Called after every batch with the number of batches so far.

    Returns:
        The report. Print it, or ask for `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If `loss_fn`, what it returns or `batches` are something else.
        ArgumentError: If there is nothing to train, no batch, no loss that can be derived, or
            `loss_fn` computes nothing in float16.

    Examples:
        >>> def loss_fn(params, batch, dtype):
        ...     predicted = batch.astype(dtype) @ params["w"].astype(dtype)
        ...     return jnp.mean(predicted.astype(jnp.float32) ** 2) / 2**30
        >>> report = diagnose(loss_fn, {"w": jnp.ones((3, 1))}, [jnp.ones((2, 3))])
        >>> report.verdict.value, report.rule.initial_scale > 1
        ('needed', True)
    """
    checked_count("max_batches", max_batches)
    checked_tolerance(tolerance)
    scale = _scale_of(in_use)
    run = JaxGradientFunction(params, loss_fn, parameters, has_aux=has_aux, grad=grad)
    check_batches(batches, (jax.Array, np.ndarray))
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return make_report(
        run,
        first_batches(batches, max_batches),
        model="this loss" if name == "<lambda>" else name,
        setting=run.setting,
        tolerance=tolerance,
        in_use=scale,
        after_batch=after_batch,
    )


class JaxGradientFunction:
    """Computes passes of a loss; see `lossscale.diagnosis.measurement.GradientFunction`.

    Args:
        params, loss_fn, parameters, has_aux, grad: As for `diagnose`.

    Attributes:
        setting: What it computes with, in words.

    Raises:
        ArgumentTypeError: If `loss_fn` cannot be called as it will be, or `parameters` has a string
            for a list.
    """

    def __init__(
        self,
        params: Any,
        loss_fn: Callable[..., Any],
        parameters: Mapping[str, Iterable[str]] | None = None,
        *,
        has_aux: bool = False,
        grad: Callable[..., Any] | None = None,
    ) -> None:
        _check_function(loss_fn)
        self._owned = {}
        for name, paths in (parameters or {}).items():
            if isinstance(paths, str):
                raise ArgumentTypeError(
                    "`parameters` must have a list of parameters for each loss. Received: "
                    f"{paths!r}; write [{paths!r}]."
                )
            self._owned[name] = tuple(paths)
        self._params, self._loss_fn = params, loss_fn
        self._has_aux, self._grad = has_aux, grad
        self.setting = f"JAX, {jax.default_backend()}, compiled, by the loss with dtype=float16"
        self._compiled: dict[Any, tuple[Any, list[str]]] = {}

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False
    ) -> dict[str, LossGradients]:
        """Returns a pass for each loss."""
        arrays, filled, form = _split((self._params, batch))
        given = arrays if half else [_widened(array) for array in arrays], jnp.float32(scale)
        # A function that differentiates by itself cannot be traced.
        key = half, watch and self._grad is None, form
        if key not in self._compiled:
            names: list[str] = []
            compute = functools.partial(self._compute, filled, *key[:2], names)
            function = jax.jit(compute, compiler_options=_EXACTLY)
            _check_dtypes(str(function.trace(*given).jaxpr), half)
            self._compiled[key] = function, names
        function, names = self._compiled[key]
        found, ranges = function(*given)
        check_owners(self._owned, found)
        outputs = {
            name: OutputRange(float(largest), bool(finite))
            for name, (largest, finite) in zip(names, ranges, strict=True)
        }
        passes = {}
        for name, (loss, gradients) in found.items():
            chosen = {
                path: np.asarray(leaf).astype(np.float32)
                for path, leaf in named_leaves(gradients)
                if self._owns(name, path)
            }
            if not chosen:
                raise ArgumentError(
                    "There is nothing to train in `params`: no array of floating-point numbers"
                    + (f" in {self._owned[name]}." if name in self._owned else ".")
                )
            passes[name] = LossGradients(chosen, float(loss), outputs)
        return passes

    def _owns(self, loss: str, path: str) -> bool:
        owned = self._owned.get(loss)
        return owned is None or any(path == each or path.startswith(f"{each}/") for each in owned)

    def _compute(
        self, filled: Any, half: bool, watch: bool, names: list[str], arrays: Any, scale: Any
    ) -> Any:
        """Returns each loss with its gradients, and the range of each operation.

        It writes the names of the operations into a list, since a compiled function returns only
        arrays.
        """
        params, batch = filled(arrays)
        dtype = jnp.float16 if half else jnp.float32

        def losses_of(params: Any, batch: Any = batch) -> dict[str, Any]:
            returned = self._loss_fn(params, batch, dtype)
            return _checked_losses(returned, self._has_aux, self._grad is not None)

        if self._grad is not None:
            by_grad = self._grad(lambda *given: scaled(losses_of(*given)[LOSS], scale))
            loss, gradients = by_grad(params, batch)
            return {LOSS: (loss / scale, gradients)}, []
        losses, pull = jax.vjp(losses_of, params)
        found = {}
        for name, loss in losses.items():
            by = {
                each: (scale if each == name else jnp.float32(0)).astype(other.dtype)
                for each, other in losses.items()
            }
            found[name] = loss, pull(by)[0]
        returned = _returned(losses_of, params) if watch else {}
        shown = {name: each for name, each in returned.items() if not half or each.dtype == dtype}
        names[:] = shown
        return found, [_range(array) for array in shown.values()]


# --- What operations return -----------------------------------------------------------------------


def _returned(function: Callable[[Any], Any], params: Any) -> dict[str, Any]:
    """Returns the names of the operations of a function, and the arrays that they return."""
    closed = jax.make_jaxpr(function)(params)
    found: dict[str, Any] = {}
    counts: Counter[str] = Counter()

    def evaluate(jaxpr: Any, constants: Any, inputs: Sequence[Any], place: str) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            # JAX traces a function on its first call.
            here = place or _place(equation)
            called = _called(equation)
            made = evaluate(*called, given, here) if called else bind(jaxpr, equation, given)
            values.update(zip(equation.outvars, made, strict=True))
            if not called and equation.primitive.name not in _MOVES:
                for array in made:
                    if jnp.issubdtype(jnp.result_type(array), jnp.floating) and array.size:
                        found[numbered(f"{here} ({equation.primitive.name})", counts)] = array
        return [read(atom) for atom in jaxpr.outvars]

    evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(params), "")
    return {name: array for name, array in found.items() if array.ndim}


def _range(array: Any) -> tuple[Any, Any]:
    """The largest finite magnitude in an array, and whether every element is finite."""
    finite = jnp.isfinite(array)
    return jnp.max(jnp.where(finite, jnp.abs(array.astype(jnp.float32)), 0.0)), jnp.all(finite)


def _place(equation: Any) -> str:
    """Where an operation is written, or the module it is in; "" if it is not in the user's code."""
    scopes = str(equation.source_info.name_stack)
    if scopes:
        return scopes
    found = source_info_util.summarize(equation.source_info)
    if __file__ in found:
        return ""
    parts = re.search(r":(\d+)(?::\d+)? \((.*)\)$", found)
    return f"{parts[2].rpartition('<locals>.')[2]}, line {parts[1]}" if parts else found


def _called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr that an equation calls and that can stand in its place, and its constants."""
    if equation.primitive.name not in _CALLS:
        return None
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if isinstance(called, ClosedJaxpr):
        return called.jaxpr, called.consts
    return None if called is None or called.constvars else (called, ())


# --- What is given --------------------------------------------------------------------------------


def _split(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any], Any]:
    """Splits a tree into its arrays and the rest, such as the functions in a model of Equinox.

    Returns:
        The arrays; a function that returns the tree with others in their place; and a key that is
        equal for trees that one compiled function serves.
    """
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]
    rest = [None if there else leaf for leaf, there in zip(leaves, is_array, strict=True)]

    def filled(arrays: Sequence[Any]) -> Any:
        waiting = iter(arrays)
        together = zip(rest, is_array, strict=True)
        return jax.tree.unflatten(structure, [next(waiting) if a else leaf for leaf, a in together])

    return list(itertools.compress(leaves, is_array)), filled, (structure, str(rest))


def _widened(leaf: Any) -> Any:
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
        f"`{CALL}` must compute in the dtype that it receives; it computes {found}. Cast the "
        "parameters and the batch to dtype in it, or create the model with it, such as "
        "Net(dtype=dtype)."
    )


def _check_function(loss_fn: Any) -> None:
    # Some functions have no readable signature.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(loss_fn).bind(None, None, None)
        except TypeError:
            raise ArgumentTypeError(
                f"`loss_fn` must accept the call {CALL} and compute in that dtype, float16 or "
                f"float32. Received: {loss_fn!r}."
            ) from None


def _checked_losses(returned: Any, has_aux: bool, is_one: bool) -> dict[str, Any]:
    """Returns losses in float32 at least, by their names."""
    if has_aux:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ArgumentTypeError(
                f"With has_aux=True `loss_fn` must return a pair of the loss and anything else. "
                f"Received: a {type(returned).__name__}."
            )
        returned = returned[0]
    elif isinstance(returned, tuple):
        raise ArgumentTypeError(
            "`loss_fn` must return the loss. Received: a tuple. For a pair (loss, anything), pass "
            "has_aux=True."
        )
    if isinstance(returned, dict) and is_one:
        raise ArgumentTypeError(
            "With `grad`, `loss_fn` must return one loss. Received: a dictionary of losses. Leave "
            "out `grad`, or return one of them."
        )
    returned = jax.tree.map(lambda x: jnp.asarray(x) if np.isscalar(x) else x, returned)
    losses = checked_losses(returned, lambda loss: isinstance(loss, (jax.Array, np.ndarray)))
    return {
        name: loss.reshape(()).astype(jnp.promote_types(loss.dtype, jnp.float32))
        for name, loss in losses.items()
    }


def _scale_of(in_use: Any) -> float | None:
    if in_use is None:
        return None
    if isinstance(in_use, (int, float)):
        return checked_above_zero("in_use", in_use)
    return float(np.asarray(loss_scale(in_use)))
