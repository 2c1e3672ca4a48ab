"""Gradients of a loss in JAX in float32 and in float16, and the ranges of its operations.

Each kind of pass is one compiled function, which rounds to float16 wherever the loss casts to it.
JAX has no layers: an operation is an equation of the traced loss, named after its source line. A
loop, a branch, and a function with a custom derivative count as one operation each.
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
"""How the user's function is called."""

_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
"""Primitives whose value and derivative are those of the jaxpr inside them."""
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

    On each batch `loss_fn(params, batch, dtype)` is differentiated several times: in float32, and
    in float16 at several loss scales. `dtype` is an argument because JAX has no global dtype
    policy, and each library sets its compute dtype in its own way.

    `loss_fn` is compiled by `jax.jit`, once for each kind of pass. Nothing is updated; parameters
    and batches stay as they are.

    Gradients change as a network learns. Run it at the start of training, and again later.

    Args:
        loss_fn: A pure function of the parameters, a batch and a dtype, `jnp.float16` or
            `jnp.float32`, to which it casts its inputs. Returns the unscaled loss, a scalar; or a
            dictionary of losses, each with a verdict. Take random keys from the batch, and draw in
            float32 and cast: the same key gives other numbers in float16.
        params: The parameters: a tree of arrays, or with `grad` an Equinox or NNX model. In the
            float32 passes, 16-bit arrays in `params` and in the batch are converted to float32.
        batches: An iterable of batches, trees of arrays. Use the batch size of training:
            gradients of a mean shrink as the batch grows.
        parameters: For a dictionary of losses: maps the name of a loss to the parameters that its
            optimizer updates, by their names in the report or the start of their paths, such as
            `{"critic": ["critic"]}`. A loss without an entry uses all parameters.
        max_batches: Maximum number of batches to measure.
        in_use: The loss scale of training, which is measured as well: an optimizer's state that
            has one, a number, or None.
        has_aux: Whether `loss_fn` returns a pair of the loss and anything else.
        grad: The function that differentiates: `equinox.filter_value_and_grad`,
            `flax.nnx.value_and_grad` or another that is called as `grad(function)(params, batch)`.
            None uses `jax.value_and_grad`. With `grad`, operations are not measured.
        tolerance: The largest relative error of a gradient that is accepted.
        after_batch: Called after every batch with the number of batches so far.

    Returns:
        The report. Print it, or read `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If `loss_fn`, its result or `batches` has the wrong type.
        ArgumentError: If there are no parameters or batches, the loss cannot be differentiated, or
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
        setting: Framework, device and precision, for the report.

    Raises:
        ArgumentTypeError: If `loss_fn` does not accept these arguments, or `parameters` has a
            string instead of a list.
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
        # A custom `grad` function cannot be traced.
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

        It writes the names of the operations into a list, because a compiled function returns only
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
    """The source line of an operation, or its module; "" if it is not in the user's code."""
    scopes = str(equation.source_info.name_stack)
    if scopes:
        return scopes
    found = source_info_util.summarize(equation.source_info)
    if __file__ in found:
        return ""
    parts = re.search(r":(\d+)(?::\d+)? \((.*)\)$", found)
    return f"{parts[2].rpartition('<locals>.')[2]}, line {parts[1]}" if parts else found


def _called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr that an equation calls and that can replace it, and its constants."""
    if equation.primitive.name not in _CALLS:
        return None
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if isinstance(called, ClosedJaxpr):
        return called.jaxpr, called.consts
    return None if called is None or called.constvars else (called, ())


# --- Arguments ------------------------------------------------------------------------------------


def _split(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any], Any]:
    """Splits a tree into its arrays and the rest, such as the functions in an Equinox model.

    Returns:
        The arrays; a function that rebuilds the tree with other arrays; and a key, which is equal
        for trees that can share one compiled function.
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
    """Returns the losses by name, in float32 or wider."""
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
