"""Gradients of a loss in JAX in float32 and in float16, and the ranges of its operations.

Each kind of pass is a compiled function, which rounds to float16 wherever the loss casts to it. JAX
does not know layers: an operation is an equation of the traced loss, named by its line in the
source. A loop, a branch, or a function with a custom derivative is one operation.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from lossscale.diagnosis.gradient_function import (
    LossGradients,
    OutputRange,
    checked_losses,
    numbered,
)
from lossscale.diagnosis.report import Report, make_report
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax.jaxprs import bind
from lossscale.optax.overflow_check import is_gradient
from lossscale.optax.overflow_tracking import named_leaves

CALL = "loss_fn(params, batch, dtype)"
"""The call of the user's function."""

_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
"""Primitives with the value and the derivative of the jaxpr that they call."""
_MOVES = {
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice"),
    *("dynamic_update_slice", "expand_dims", "gather", "name", "pad", "reshape", "rev"),
    *("select_n", "sharding_constraint", "slice", "squeeze", "stop_gradient", "transpose"),
}
"""Primitives that do not compute numbers."""


def diagnose(
    loss_fn: Callable[[Any, Any, Any], Any],
    params: Any,
    batches: Iterable[Any],
    *,
    parameters: Mapping[str, Iterable[str]] | None = None,
    max_batches: int = 2,
    tolerance: float = 0.1,
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
            `jnp.float32`, to which it casts its inputs. Returns the unscaled loss, a scalar; or a
            dictionary of losses, each of which gets a verdict. Draw random numbers in float32, from
            keys in the batch, and cast them: float16 would draw other numbers from the same key.
        params: The parameters: a tree of arrays, or a model of Equinox or NNX. Every floating-point
            array in it counts as trained. For the float32 passes, 16-bit arrays are widened, those
            in a batch too.
        batches: An iterable of batches, each a tree of arrays. Their size matters: a loss is
            averaged over the batch, so a larger batch has smaller gradients. Use the batch size of
            training.
        parameters: For a dictionary of losses: name of a loss to the parameters that its optimizer
            trains, named as in the report, or by the beginning of their path, such as
            `{"critic": ["critic"]}`. A loss without an entry is judged by all parameters.
        max_batches: The largest number of batches to measure on.
        tolerance: The largest accepted error of a gradient, relative to its norm.

    Returns:
        The report. Print it, or read `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If `loss_fn`, what it returns or `batches` have another type.
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
    options = {"max_batches": max_batches, "tolerance": tolerance}
    return make_report(run, batches, model=name, setting=run.setting, **options)


class JaxGradientFunction:
    """The passes of a loss; see `lossscale.diagnosis.gradient_function.GradientFunction`.

    Args:
        params, loss_fn, parameters: As for `diagnose`.

    Attributes:
        setting: What the loss computes with, in words.

    Raises:
        ArgumentTypeError: If `loss_fn` does not take three arguments, or `parameters` has a string
            for a list.
    """

    def __init__(
        self,
        params: Any,
        loss_fn: Callable[[Any, Any, Any], Any],
        parameters: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        try:
            inspect.signature(loss_fn).bind(None, None, None)
        except TypeError:
            raise ArgumentTypeError(
                f"`loss_fn` must accept the call {CALL} and compute in that dtype, float16 or "
                f"float32. Received: {loss_fn!r}."
            ) from None
        self._owned = {}
        for name, paths in (parameters or {}).items():
            if isinstance(paths, str):
                raise ArgumentTypeError(
                    "`parameters` must have a list of parameters for each loss. Received: "
                    f"{paths!r}; write [{paths!r}]."
                )
            self._owned[name] = tuple(paths)
        self._params, self._loss_fn = params, loss_fn
        self.setting = f"JAX, {jax.default_backend()}, compiled, by the loss with dtype=float16"
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False
    ) -> dict[str, LossGradients]:
        """Returns the gradients of each loss."""
        leaves, structure = jax.tree.flatten((self._params, batch))
        # Other leaves, such as the functions in a model of Equinox, are a part of what is compiled.
        arrays = {
            n: leaf if half else _widened(leaf) for n, leaf in enumerate(leaves) if _is_array(leaf)
        }
        rest = [None if n in arrays else leaf for n, leaf in enumerate(leaves)]
        key = half, watch, structure, str(rest)
        if key not in self._compiled:
            compute = functools.partial(self._compute, half, watch, structure, rest)
            exactly = {"xla_allow_excess_precision": False}
            function = jax.jit(compute, compiler_options=exactly)
            _check_dtypes(str(function.trace(arrays, scale).jaxpr), half)
            self._compiled[key] = function
        found, ranges = self._compiled[key](arrays, scale)
        paths = [path for path, leaf in named_leaves(self._params) if _is_array(leaf)]
        outputs = OutputRange.by_name(ranges)
        return {
            name: LossGradients(
                {
                    path: np.asarray(gradient).astype(np.float32)
                    for path, gradient in zip(paths, gradients.values(), strict=True)
                    if self._owns(name, path)
                },
                float(loss),
                outputs,
            )
            for name, (loss, gradients) in found.items()
        }

    def _owns(self, loss: str, path: str) -> bool:
        owned = self._owned.get(loss)
        return owned is None or any(path == each or path.startswith(f"{each}/") for each in owned)

    def _compute(
        self,
        half: bool,
        watch: bool,
        structure: Any,
        rest: Sequence[Any],
        arrays: Mapping[int, Any],
        scale: Any,
    ) -> Any:
        """Returns each loss with its gradients, and the range of the output of each operation."""
        dtype = jnp.float16 if half else jnp.float32

        def losses_of(trained: Mapping[int, Any]) -> dict[str, Any]:
            given = {**arrays, **trained}
            filled = [given.get(n, leaf) for n, leaf in enumerate(rest)]
            params, batch = jax.tree.unflatten(structure, filled)
            returned = self._loss_fn(params, batch, dtype)
            losses = checked_losses(returned, _is_array, self._owned)
            return {
                name: loss.reshape(()).astype(jnp.promote_types(loss.dtype, jnp.float32))
                for name, loss in losses.items()
            }

        of_params = structure.children()[0].num_leaves
        trained = {n: each for n, each in arrays.items() if n < of_params and is_gradient(each)}
        losses, pull = jax.vjp(losses_of, trained)
        found = {}
        for name, loss in losses.items():
            by = {
                each: jnp.asarray(scale if each == name else 0, other.dtype)
                for each, other in losses.items()
            }
            found[name] = loss, pull(by)[0]
        returned = _returned(losses_of, trained) if watch else {}
        # JAX would return the keys of a dictionary sorted.
        ranges = OrderedDict()
        for name, array in returned.items():
            if not half or array.dtype == dtype:
                ranges[name] = _range(array)
        return found, ranges


def _returned(function: Callable[[Any], Any], params: Any) -> dict[str, Any]:
    """Returns the name of each operation of a function with the array that it returns."""
    closed = jax.make_jaxpr(function)(params)
    found: dict[str, Any] = {}
    counts: Counter[str] = Counter()

    def evaluate(jaxpr: Any, constants: Any, inputs: Sequence[Any], place: str) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            # JAX traces a function on its first call, so its own lines may be of another call.
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


def _called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr that an equation calls and that can stand in its place, and its constants."""
    if equation.primitive.name not in _CALLS:
        return None
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if isinstance(called, ClosedJaxpr):
        return called.jaxpr, called.consts
    return None if called is None or called.constvars else (called, ())


def _place(equation: Any) -> str:
    """The module or the line of an operation; "" if it is not in the user's code."""
    scopes = str(equation.source_info.name_stack)
    if scopes:
        return scopes
    found = source_info_util.summarize(equation.source_info)
    if __file__ in found:
        return ""
    parts = re.search(r":(\d+)(?::\d+)? \((.*)\)$", found)
    return f"{parts[2].rpartition('<locals>.')[2]}, line {parts[1]}" if parts else found


def _range(array: Any) -> tuple[Any, Any]:
    """The largest finite magnitude in an array, and whether every element is finite."""
    finite = jnp.isfinite(array)
    return jnp.max(jnp.where(finite, jnp.abs(array.astype(jnp.float32)), 0.0)), jnp.all(finite)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


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
