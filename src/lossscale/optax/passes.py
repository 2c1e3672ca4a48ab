"""Passes of a loss in JAX in float32 and in float16, and what its operations return.

Each kind of pass is one compiled function, which rounds to float16 wherever the loss says so. JAX
knows no layers: an operation is what JAX has traced of the loss, named by the line it is written
in. A loop and a branch are one operation each, and a function with a derivative of its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from lossscale.checks import checked_above_zero, checked_count
from lossscale.diagnosis.batches import check_batches, checked_tolerance, first_batches
from lossscale.diagnosis.passes import LOSS, MODEL, PARTS, Output, Pass, check_losses
from lossscale.diagnosis.report import Report, report_on
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleError
from lossscale.jax.gradients import scaled
from lossscale.jax.jaxprs import bind
from lossscale.optax.loops import loss_scale
from lossscale.optax.noting import named_leaves

CALL = "loss_fn(params, batch, dtype)"
"""How the function of the user is called."""

Change = Callable[[str, Any], Any]
"""Given the name of an operation and an array that it returned, returns what goes on."""

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
    """Measures what float16 makes of gradients, and says which loss scaling they need.

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
        ArgumentTypeError: If `loss_fn`, what it returns or `batches` are something else. It is a
            `TypeError`.
        ArgumentError: If there is nothing to train, no batch, no loss that can be derived, or
            `loss_fn` computes nothing in float16. It is a `ValueError`.

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
    run = new_run(params, loss_fn, parameters, has_aux=has_aux, grad=grad)
    check_batches(batches, (jax.Array, np.ndarray))
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return report_on(
        run,
        first_batches(batches, max_batches),
        model="this loss" if name == "<lambda>" else name,
        setting=run.setting,
        tolerance=tolerance,
        in_use=scale,
        after_batch=after_batch,
    )


def new_run(
    params: Any,
    loss_fn: Callable[..., Any],
    parameters: Mapping[str, Iterable[str]] | None = None,
    *,
    has_aux: bool = False,
    grad: Callable[..., Any] | None = None,
) -> LossRun:
    """Returns what computes passes of a loss.

    Args:
        params, loss_fn, parameters, has_aux, grad: As for `diagnose`.

    Raises:
        ArgumentTypeError: If `loss_fn` cannot be called as it will be, or `parameters` has a string
            for a list. It is a `TypeError`.
    """
    _check_function(loss_fn)
    if strings := [paths for paths in (parameters or {}).values() if isinstance(paths, str)]:
        raise ArgumentTypeError(
            "`parameters` must have a list of parameters for each loss. Received: "
            f"{strings[0]!r}; write [{strings[0]!r}]."
        )
    owned = {name: tuple(paths) for name, paths in (parameters or {}).items()}
    return LossRun(params, loss_fn, owned, has_aux, grad)


class LossRun:
    """Computes passes of a loss; see `lossscale.diagnosis.passes.Run`.

    Args:
        params, loss_fn, has_aux, grad: As for `diagnose`.
        owned: Name of a loss to the paths of the parameters that it is judged by.

    Attributes:
        params: The parameters; others of the same structure may take their place.
        setting: What it is computed with, in words.
    """

    def __init__(
        self,
        params: Any,
        loss_fn: Callable[..., Any],
        owned: Mapping[str, tuple[str, ...]],
        has_aux: bool,
        grad: Callable[..., Any] | None,
    ) -> None:
        self.params, self._loss_fn, self._owned = params, loss_fn, owned
        self._has_aux, self._grad = has_aux, grad
        self.setting = f"JAX, {jax.default_backend()}, compiled, by the loss with dtype=float16"
        self._compiled: dict[Any, tuple[Any, list[str]]] = {}

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False, move: str = ""
    ) -> dict[str, Pass]:
        """Returns a pass for each loss."""
        form, arrays = _Form.of((self.params, batch))
        if watch and self._grad is None:
            try:
                return self._passes(*self._found(form, arrays, scale, half, True, ""))
            except LossScaleError:
                raise
            except Exception:
                # What JAX cannot trace so, or evaluate, is not looked at.
                pass
        return self._passes(*self._found(form, arrays, scale, half, False, move))

    def _found(
        self, form: _Form, arrays: list[Any], scale: float, half: bool, watch: bool, move: str
    ) -> Any:
        """Returns what the compiled function found, and the names of what it looked at."""
        key = half, watch, move, form.key
        given = arrays if half else [_widened(array) for array in arrays], jnp.float32(scale)
        if key not in self._compiled:
            operations = self._operations(form, arrays) if watch or move else {}
            names: list[str] = []
            compute = self._computation(form, half, watch, move, operations, names)
            function = jax.jit(compute, compiler_options=_EXACTLY)
            _check_dtypes(str(function.trace(*given).jaxpr), half)
            self._compiled[key] = function, names
        function, names = self._compiled[key]
        return function(*given), names

    def _passes(self, found: Any, names: Sequence[str]) -> dict[str, Pass]:
        check_losses(self._owned, found)
        passes = {}
        for name, (loss, gradients, outputs) in found.items():
            passes[name] = Pass(
                {
                    path: np.asarray(leaf).astype(np.float32)
                    for path, leaf in named_leaves(gradients)
                    if self._owns(name, path)
                },
                float(loss),
                {
                    each: Output(float(largest), bool(finite), float(reach))
                    for each, (largest, finite, reach) in zip(names, outputs, strict=True)
                },
            )
            if gradients is not None and not passes[name].gradients:
                raise ArgumentError(
                    "There is nothing to train in `params`: no array of floating-point numbers"
                    + (f" in {self._owned[name]}." if name in self._owned else ".")
                )
        return passes

    def _owns(self, loss: str, path: str) -> bool:
        owned = self._owned.get(loss)
        return owned is None or any(path == each or path.startswith(f"{each}/") for each in owned)

    def _losses(self, params: Any, batch: Any, half: bool) -> dict[str, Any]:
        dtype = jnp.float16 if half else jnp.float32
        returned = self._loss_fn(params, batch, dtype)
        return _checked_losses(returned, self._has_aux, self._grad is not None)

    def _computation(
        self,
        form: _Form,
        half: bool,
        watch: bool,
        move: str,
        operations: Mapping[str, bool],
        names: list[str],
    ) -> Callable[..., Any]:
        """Returns the function to compile, which writes the names of operations into a list."""

        def compute(arrays: list[Any], scale: Any) -> Any:
            params, batch = form.filled(arrays)
            if self._grad is not None:
                return {LOSS: (*self._derived_by_grad(params, batch, scale, half), ())}
            if not watch and not move:
                losses, pull = jax.vjp(lambda p: self._losses(p, batch, half), params)
                return {
                    name: (loss, pull(_chosen(losses, name, scale))[0], ())
                    for name, loss in losses.items()
                }

            def forward(params: Any, change: Change) -> Any:
                traced = jax.make_jaxpr(lambda p: self._losses(p, batch, half), return_shape=True)
                closed, shape = traced(params)
                evaluation = _Evaluation(operations, change)
                made = evaluation.run(closed, jax.tree.leaves(params))
                return dict(zip(shape, [each.array for each in made], strict=True)), evaluation.kept

            derived = _derived(forward, params, scale, inside=not half)
            if move:
                return {
                    name: (_lowest(derived, name, operations, move, forward, params), None, ())
                    for name in derived.losses
                }
            groups = _groups(derived.kept, operations)
            names[:] = groups
            return {
                name: (
                    loss,
                    derived.gradients[name],
                    [_summary(derived, name, indices, scale) for indices in groups.values()],
                )
                for name, loss in derived.losses.items()
            }

        return compute

    def _derived_by_grad(self, params: Any, batch: Any, scale: Any, half: bool) -> Any:
        assert self._grad is not None

        def scaled_loss(params: Any, batch: Any) -> Any:
            return scaled(self._losses(params, batch, half)[LOSS], scale)

        loss, gradients = self._grad(scaled_loss)(params, batch)
        return loss / scale, gradients

    def _operations(self, form: _Form, arrays: list[Any]) -> dict[str, bool]:
        """The names of the operations that return float16, and whether float16 ends there.

        It does where the loss takes what they return in float32, and casts nothing back.
        """
        found = _Evaluation(None, lambda name, array: array)
        last: set[str] = set()

        def losses(arrays: list[Any]) -> list[Any]:
            params, batch = form.filled(arrays)
            closed = jax.make_jaxpr(lambda p: self._losses(p, batch, True))(params)
            made = found.run(closed, jax.tree.leaves(params))
            last.update(*(each.casts for each in made))
            return [each.array for each in made]

        jax.eval_shape(losses, arrays)
        return {name: name in last for name, _ in found.kept}


# --- What JAX has traced --------------------------------------------------------------------------


class _Value(NamedTuple):
    """An array on the way.

    Attributes:
        array: The array.
        maker: The name of the operation that computed what is in it.
        casts: The names of those whose results were cast from float16 on the way to it, if nothing
            was cast back.
    """

    array: Any
    maker: str = ""
    casts: frozenset[str] = frozenset()


class _Evaluation:
    """Evaluates what JAX has traced, operation by operation, and keeps what they return.

    Args:
        wanted: The names of the operations to keep; None for those that return float16.
        change: What may change an array.

    Attributes:
        kept: The names of the operations, and what they returned.
    """

    def __init__(self, wanted: Iterable[str] | None, change: Change) -> None:
        self.kept: list[tuple[str, Any]] = []
        self._wanted = None if wanted is None else frozenset(wanted)
        self._change = change
        self._counts: dict[str, int] = {}

    def run(self, closed: Any, inputs: Sequence[Any]) -> list[_Value]:
        """Returns the outputs of a closed jaxpr."""
        return self._evaluated(closed.jaxpr, closed.consts, [_Value(each) for each in inputs], "")

    def _evaluated(
        self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[_Value], place: str
    ) -> list[_Value]:
        known = [*(_Value(each) for each in constants), *inputs]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], known, strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            # What is in a function of JAX was traced where that was called first.
            here = place or _place(equation)
            called = _called(equation)
            if called is not None:
                made = self._evaluated(*called, given, here)
            else:
                arrays = bind(jaxpr, equation, [each.array for each in given])
                made = self._kept(equation, here, given, arrays)
            values.update(zip(equation.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _kept(
        self, equation: Any, place: str, given: Sequence[_Value], arrays: Sequence[Any]
    ) -> list[_Value]:
        primitive = equation.primitive.name
        floating = [value for value in given if _is_floating(value.array)]
        maker = next((value.maker for value in floating if value.maker), "")
        if primitive not in _MOVES and any(map(_is_floating, arrays)):
            name = f"{place} ({primitive})"
            self._counts[name] = number = self._counts.get(name, 0) + 1
            maker = name if number == 1 else f"{name}, {number}"
        made = []
        for array in arrays:
            if primitive not in _MOVES and self._is_wanted(maker, array):
                array = self._change(maker, array)
                self.kept.append((maker, array))
            casts: frozenset[str] = frozenset()
            if not _is_half(array):
                casts = casts.union(*(value.casts for value in floating))
                casts |= {value.maker for value in floating if _is_half(value.array)} - {""}
            made.append(_Value(array, maker, casts))
        return made

    def _is_wanted(self, name: str, array: Any) -> bool:
        if not _is_floating(array) or not array.ndim or not array.size:
            return False
        return _is_half(array) if self._wanted is None else name in self._wanted


def _place(equation: Any) -> str:
    """Where an operation is written, or the module it is in; "" if it is not the user's."""
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


def _is_floating(array: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(array), jnp.floating)


def _is_half(array: Any) -> bool:
    return bool(jnp.result_type(array) == jnp.float16)


# --- Inside of the loss ---------------------------------------------------------------------------


class _Derived(NamedTuple):
    """What came of a forward and a backward pass.

    Attributes:
        losses: Name of each loss to its value.
        gradients: Name of each loss to the gradients of the scaled one by the parameters.
        kept: The names of the operations, and what they returned.
        inside: Name of each loss to the gradients by what is kept; empty if nobody asked.
    """

    losses: Mapping[str, Any]
    gradients: Mapping[str, Any]
    kept: Sequence[tuple[str, Any]]
    inside: Mapping[str, Sequence[Any]]


def _derived(forward: Any, params: Any, scale: Any, inside: bool) -> _Derived:
    """Derives losses; inside by zeros that are added to what is kept."""

    def arrays(params: Any) -> list[Any]:
        return [array for _, array in forward(params, lambda name, array: array)[1]]

    shapes = jax.eval_shape(arrays, params) if inside else []
    zeros = [jnp.zeros(each.shape, each.dtype) for each in shapes]
    names: list[str] = []

    def compute(params: Any, zeros: Any) -> Any:
        waiting = iter(zeros)
        losses, kept = forward(
            params, lambda name, array: array + next(waiting) if inside else array
        )
        names[:] = [name for name, _ in kept]
        return losses, [array for _, array in kept]

    losses, pull, kept = jax.vjp(compute, params, zeros, has_aux=True)
    pulled = {name: pull(_chosen(losses, name, scale)) for name in losses}
    return _Derived(
        losses,
        {name: by_params for name, (by_params, _) in pulled.items()},
        list(zip(names, kept, strict=True)),
        {name: by_kept for name, (_, by_kept) in pulled.items()},
    )


def _chosen(losses: Mapping[str, Any], name: str, scale: Any) -> dict[str, Any]:
    return {
        each: (scale if each == name else jnp.float32(0)).astype(loss.dtype)
        for each, loss in losses.items()
    }


def _groups(
    kept: Sequence[tuple[str, Any]], operations: Mapping[str, bool]
) -> dict[str, list[int]]:
    """Names of outputs to the indices of their arrays; where float16 ends, all together too."""
    groups: dict[str, list[int]] = {}
    for index, (name, _) in enumerate(kept):
        groups.setdefault(name, []).append(index)
    last = [index for index, (name, _) in enumerate(kept) if operations[name]]
    return {**groups, MODEL: last} if last else groups


def _summary(derived: _Derived, name: str, indices: Sequence[int], scale: Any) -> Any:
    """The largest finite magnitude, whether all are finite, and the reach."""
    arrays = [derived.kept[index][1].astype(jnp.float32) for index in indices]
    finite = [jnp.isfinite(array) for array in arrays]
    largest = [
        jnp.max(jnp.where(is_finite, jnp.abs(array), 0.0))
        for array, is_finite in zip(arrays, finite, strict=True)
    ]
    reach = jnp.float32(jnp.nan)
    if derived.inside[name]:
        steps = _steps(derived, name, indices, scale)
        moved = [jnp.abs(array + step) for array, step in zip(arrays, steps, strict=True)]
        reach = jnp.max(jnp.stack([jnp.max(each) for each in moved]))
    all_finite = jnp.all(jnp.stack([jnp.all(each) for each in finite]))
    return jnp.max(jnp.stack(largest)), all_finite, reach


def _steps(derived: _Derived, name: str, indices: Sequence[int], scale: Any) -> list[Any]:
    """What has to be added to each array of an output for a loss of 0."""
    gradients = [derived.inside[name][index].astype(jnp.float32) for index in indices]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(each)) for each in gradients]))
    # Squares of what they are would leave the range of float32.
    units = [each / largest for each in gradients]
    squares = jnp.sum(jnp.stack([jnp.sum(unit * unit) for unit in units]))
    loss = derived.losses[name] * scale
    return [-2.0 * loss / largest / squares * unit for unit in units]


def _lowest(
    derived: _Derived,
    name: str,
    operations: Mapping[str, bool],
    output: str,
    forward: Any,
    params: Any,
) -> Any:
    """The lowest loss with an output on the way to where it has to be for a loss of 0."""
    indices = _groups(derived.kept, operations).get(output, [])
    steps = dict(zip(indices, _steps(derived, name, indices, 1.0), strict=True))

    def moved(part: float) -> Any:
        numbers = iter(range(len(derived.kept)))

        def change(_: str, array: Any) -> Any:
            step = steps.get(next(numbers))
            return array if step is None else array + (part * step).astype(array.dtype)

        return forward(params, change)[0][name]

    return jnp.nanmin(jnp.stack([moved(part) for part in PARTS]))


# --- What is given --------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A tree without its arrays.

    What is no array, such as the activation functions in a model of Equinox, is part of the
    functions that are compiled.

    Attributes:
        structure: That of the tree.
        there: For each leaf, whether it is an array.
        fixed: The leaves that are none.
    """

    structure: Any
    there: list[bool]
    fixed: list[Any]

    @classmethod
    def of(cls, tree: Any) -> tuple[_Form, list[Any]]:
        """Returns the form of a tree, and its arrays."""
        leaves, structure = jax.tree.flatten(tree)
        there = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]
        traced = [leaf for leaf, is_array in zip(leaves, there, strict=True) if is_array]
        fixed = [None if is_array else leaf for leaf, is_array in zip(leaves, there, strict=True)]
        return cls(structure, there, fixed), traced

    @property
    def key(self) -> Any:
        """What is equal for forms that one compiled function serves."""
        return self.structure, tuple(map(repr, self.fixed))

    def filled(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with arrays in it."""
        waiting = iter(arrays)
        leaves = [
            next(waiting) if is_array else leaf
            for is_array, leaf in zip(self.there, self.fixed, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def _widened(leaf: Any) -> Any:
    narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(jnp.float32) if narrow else leaf


def _check_dtypes(jaxpr: str, half: bool) -> None:
    """Checks that a loss computes in float16 when it is asked to, and only then."""
    if half == ("f16[" in jaxpr.replace("bf16[", "")):
        return
    found = (
        "nothing in float16 when dtype is float16" if half else "in float16 when dtype is float32"
    )
    raise ArgumentError(
        f"`{CALL}` computes {found}. Cast the parameters and the batch to dtype in it, or make the "
        "model with it, such as Net(dtype=dtype)."
    )


def _check_function(loss_fn: Any) -> None:
    if callable(loss_fn):
        try:
            inspect.signature(loss_fn).bind(None, None, None)
        except TypeError:
            pass
        except ValueError:
            # Of some functions nothing is known.
            return
        else:
            return
    raise ArgumentTypeError(
        f"`loss_fn` must be a function that is called as {CALL}: it computes the loss in the dtype "
        f"that it is given, float16 or float32. Received: {loss_fn!r}."
    )


def _checked_losses(result: Any, has_aux: bool, is_one: bool) -> dict[str, Any]:
    """Returns losses in float32 at least, by their names."""
    wanted = "`loss_fn` must return the loss, a scalar of floating-point numbers"
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            raise ArgumentTypeError(
                f"With has_aux=True `loss_fn` must return a pair of the loss and anything else. "
                f"Received: a {type(result).__name__}."
            )
        result = result[0]
    elif isinstance(result, (tuple, list)):
        raise ArgumentTypeError(
            f"{wanted}. Received: a {type(result).__name__}. Add several losses up, or name them "
            "in a dictionary; of a pair (loss, anything) say has_aux=True."
        )
    if isinstance(result, dict) and (is_one or not result):
        more = "With `grad` only one loss can be derived. " if is_one else ""
        raise ArgumentTypeError(f"{wanted}. {more}Received: a dictionary of {len(result)} losses.")
    losses = {}
    for name, each in (result if isinstance(result, dict) else {LOSS: result}).items():
        try:
            loss = jnp.asarray(each)
        except (TypeError, ValueError):
            raise ArgumentTypeError(f"{wanted}. Received: a {type(each).__name__}.") from None
        if loss.shape:
            raise ArgumentError(
                f"{wanted}. Received: an array of shape {loss.shape}. Take the mean or the sum."
            )
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ArgumentError(f"{wanted}. Received: an array of dtype {loss.dtype.name}.")
        losses[str(name)] = loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
    return losses


def _scale_of(in_use: Any) -> float | None:
    if in_use is None:
        return None
    if isinstance(in_use, (int, float)):
        return checked_above_zero("in_use", in_use)
    return float(np.asarray(loss_scale(in_use)))
