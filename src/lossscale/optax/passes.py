"""Passes of a loss in JAX, in float32 and in float16, and what its operations return.

JAX has no policy of dtypes that could be switched from outside: the loss is given the dtype to
compute in. Each precision is compiled once. What XLA keeps in float32 between two operations of
float16 is not lost there. To look at the operations, what JAX traced is computed equation by
equation; a loop or a branch is one operation.
"""

from __future__ import annotations

import inspect
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from lossscale.checks import checked_above_zero, checked_count
from lossscale.diagnosis.batches import check_batches, checked_tolerance, first_batches
from lossscale.diagnosis.passes import LOSS, MODEL, Output, Pass
from lossscale.diagnosis.report import Report, report_on
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.jax import scaling
from lossscale.jax.jaxprs import bind
from lossscale.optax.loops import loss_scale
from lossscale.optax.noting import named_leaves

CALL = "loss_fn(params, batch, dtype)"
"""How the function of the user is called."""

_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
}  # fmt: skip
_MOVES_DATA = {
    "convert_element_type", "reshape", "broadcast_in_dim", "transpose", "squeeze", "slice",
    "dynamic_slice", "gather", "concatenate", "pad", "rev", "copy", "copy_p", "stop_gradient",
    "iota", "select_n", "expand_dims", "split",
}  # fmt: skip
"""What makes no number that was not there."""
_LIBRARIES = ("site-packages", "dist-packages")


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    parameters: Mapping[str, Sequence[str]] | None = None,
    max_batches: int = 2,
    in_use: Any = None,
    has_aux: bool = False,
    grad: Callable[..., Any] | None = None,
    tolerance: float = 0.1,
    after_batch: Callable[[int], None] = lambda number: None,
) -> Report:
    """Measures what float16 makes of gradients, and says which loss scaling a loss needs.

    On each batch `loss_fn(params, batch, dtype)` is derived several times: with float32, and with
    float16 at several loss scales. So the function that trains in float16 has to be one that can
    compute in float32 too. It is compiled by `jax.jit`, once for each of both, and measured is what
    the compiled function computes on this device. Nothing is updated.

    Gradients change as a network learns. Ask at the start of training, and again later.

    Args:
        loss_fn: A pure function of the parameters, a batch and a dtype, `jnp.float16` or
            `jnp.float32`, to which it casts what it computes with. Returns the loss, not scaled, a
            scalar; or a dictionary of losses, each of which is judged by itself. Random numbers
            come from keys in the batch, and are drawn in float32 and cast: in float16 other numbers
            would be drawn from the same key.
        params: The parameters: a tree of arrays, or a model of Equinox or NNX with `grad`. For
            float32 arrays in 16 bits are widened, in a batch too.
        batches: An iterable of batches, trees of arrays. Their size matters: the loss is averaged
            over a batch, so gradients are the smaller, the larger it is. Use that of training.
        parameters: For a dictionary of losses: name of a loss to the paths in `params` that its
            optimizer owns, such as ("critic",) or ("critic/dense",). A loss without an entry is
            judged by all.
        max_batches: How many batches to measure on, at most.
        in_use: The loss scale that trains, which is measured as well: an optimizer's state that
            has one, a number, or None.
        has_aux: Whether `loss_fn` returns a pair of the loss and anything else.
        grad: What differentiates: `equinox.filter_value_and_grad`, `flax.nnx.value_and_grad` or
            another that is called as `grad(function)(params, batch)`; None for JAX' own. With
            another one there is one loss, and its operations are not looked at.
        tolerance: How wrong a gradient may be, as a share of it.
        after_batch: Called after every batch with the number of batches so far.

    Returns:
        The report. Print it, or ask for `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If `loss_fn`, what it returns or `batches` are something else. It is a
            `TypeError`.
        ArgumentError: If there is nothing to train, no batch, no loss that can be derived, or
            `loss_fn` computes nothing in float16. It is a `ValueError`.

    Example:
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
    run = new_run(params, loss_fn, has_aux=has_aux, grad=grad, parameters=parameters)
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
    *,
    has_aux: bool = False,
    grad: Callable[..., Any] | None = None,
    parameters: Mapping[str, Sequence[str]] | None = None,
) -> LossRun:
    """Returns what computes passes of a loss.

    Args:
        params, loss_fn, has_aux, grad, parameters: As for `diagnose`.

    Raises:
        ArgumentTypeError: If `loss_fn` cannot be called so. It is a `TypeError`.
    """
    _check_function(loss_fn)
    return LossRun(loss_fn, params, grad, has_aux, parameters or {})


class LossRun:
    """Computes passes of a loss; see `lossscale.diagnosis.passes.Run`.

    Args:
        loss_fn, params, grad, has_aux, parameters: As for `diagnose`.

    Attributes:
        params: The parameters; others of the same structure may take their place.
        setting: What it is computed with, in words.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        grad: Callable[..., Any] | None,
        has_aux: bool,
        parameters: Mapping[str, Sequence[str]],
    ) -> None:
        self.params = params
        self.setting = f"JAX, {jax.default_backend()}, compiled with dtype=float16"
        self._loss_fn, self._grad, self._has_aux = loss_fn, grad, has_aux
        self._owned = {name: tuple(paths) for name, paths in parameters.items()}
        self._compiled: dict[Any, Any] = {}
        # The name of what float16 makes last, before the loss is computed in float32.
        self._last = ""
        self._checked = False

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False, move: str = ""
    ) -> dict[str, Pass]:
        """Returns a pass for each loss."""
        form, arrays = _Form.of((self.params, batch))
        dtype = jnp.float16 if half else jnp.float32
        if not self._checked:
            self._check(form, arrays)
        if move:
            losses = self._watched(form, arrays, dtype).moved(arrays, self._named(move))
            return {name: Pass({}, float(loss)) for name, loss in losses.items()}
        key = ("gradients", dtype, form.key)
        if key not in self._compiled:
            self._compiled[key] = jax.jit(self._gradients_of(form, dtype))
        found = self._compiled[key](arrays, jnp.float32(scale))
        outputs = self._outputs(form, arrays, half) if watch else {}
        return {
            name: Pass(
                {
                    path: _on_host(leaf)
                    for path, leaf in named_leaves(gradients)
                    if self._is_owned(name, path)
                },
                float(loss),
                outputs.get(name, {}),
            )
            for name, (loss, gradients) in found.items()
        }

    def _gradients_of(self, form: _Form, dtype: Any) -> Callable[..., Any]:
        def gradients(arrays: list[Any], scale: Any) -> dict[str, tuple[Any, Any]]:
            params, batch = form.filled(arrays, dtype)
            if self._grad is not None:

                def scaled(params: Any, batch: Any) -> Any:
                    losses = self._losses(params, batch, dtype)
                    if set(losses) != {LOSS}:
                        raise ArgumentError(
                            "With `grad` there may be one loss: `loss_fn` returned "
                            f"{', '.join(map(repr, losses))}. Leave `grad` out, or diagnose each."
                        )
                    return scaling.scaled(losses[LOSS], scale)

                value, found = self._grad(scaled)(params, batch)
                return {LOSS: (value / scale, found)}
            losses, pull = jax.vjp(lambda params: self._losses(params, batch, dtype), params)
            return {
                name: (loss, pull(_one_of(losses, name, scale))[0]) for name, loss in losses.items()
            }

        return gradients

    def _losses(self, params: Any, batch: Any, dtype: Any) -> dict[str, Any]:
        returned = self._loss_fn(params, batch, dtype)
        return {
            name: scaling.widened(loss)
            for name, loss in _checked_losses(returned, self._has_aux).items()
        }

    def _is_owned(self, loss: str, path: str) -> bool:
        owned = self._owned.get(loss)
        return owned is None or any(path == each or path.startswith(f"{each}/") for each in owned)

    def _check(self, form: _Form, arrays: list[Any]) -> None:
        """Checks the loss on the first batch."""
        wide = jax.eval_shape(self._gradients_of(form, jnp.float32), arrays, jnp.float32(1))
        unknown = sorted(set(self._owned) - set(wide))
        if unknown:
            raise ArgumentError(
                f"`parameters` names the loss {unknown[0]!r}, and `loss_fn` returns "
                f"{', '.join(map(repr, wide))}."
            )
        for name, (_, gradients) in wide.items():
            paths = [path for path, _ in named_leaves(gradients)]
            if not paths:
                raise ArgumentError(
                    "There is nothing to train in `params`: no array of floating-point numbers."
                )
            if not any(self._is_owned(name, path) for path in paths):
                raise ArgumentError(
                    f"`parameters` has no path of `params` for the loss {name!r}. Received: "
                    f"{self._owned[name]}; there are {', '.join(paths)}."
                )
        try:
            narrow = jax.make_jaxpr(self._gradients_of(form, jnp.float16))(arrays, jnp.float32(1))
        except Exception:
            # It will be seen when it is run.
            return
        if "f16[" not in str(narrow).replace("bf16[", ""):
            raise ArgumentError(
                f"`{CALL}` computes nothing in float16 when dtype is float16. Cast the parameters "
                "and the batch to dtype in it, or make the model with it, such as Net(dtype=dtype)."
            )
        self._checked = True

    # --- Operations -------------------------------------------------------------------------------

    def _watched(self, form: _Form, arrays: list[Any], dtype: Any) -> _Watched:
        key = ("watched", dtype, form.key)
        if key not in self._compiled:

            def losses(arrays: list[Any]) -> dict[str, Any]:
                params, batch = form.filled(arrays, dtype)
                return self._losses(params, batch, dtype)

            self._compiled[key] = _Watched(losses, arrays, dtype)
        found: _Watched = self._compiled[key]
        return found

    def _outputs(self, form: _Form, arrays: list[Any], half: bool) -> dict[str, dict[str, Output]]:
        if self._grad is not None:
            return {}
        found = self._watched(form, arrays, jnp.float16 if half else jnp.float32).outputs(arrays)
        try:
            self._last = self._watched(form, arrays, jnp.float16).last_name(arrays)
        except Exception:
            # It will be seen when it is run.
            self._last = ""
        for outputs in found.values():
            if self._last in outputs:
                outputs[MODEL] = outputs[self._last]
        return found

    def _named(self, output: str) -> str:
        return self._last if output == MODEL else output


class _Watched:
    """What the operations of a loss return, in one precision.

    Args:
        losses: Returns the losses.
        arrays: What it is given.
        dtype: What it computes in.

    Attributes:
        half: Whether it is float16.
        last: The name of the last operation whose result is float16 and goes on in float32.
    """

    def __init__(
        self, losses: Callable[[list[Any]], dict[str, Any]], arrays: list[Any], dtype: Any
    ) -> None:
        self._closed, shapes = jax.make_jaxpr(losses, return_shape=True)(arrays)
        self._losses = jax.tree.structure(shapes)
        self.half = dtype == jnp.float16
        self.last = ""
        self._names: list[str] = []
        self._compute = jax.jit(self._narrow if self.half else self._wide)
        self._move = jax.jit(self._moved, static_argnums=1)

    def outputs(self, arrays: list[Any]) -> dict[str, dict[str, Output]]:
        """Returns what the operations return, for each loss."""
        largest, finite, reaches = self._compute(arrays)
        found = {}
        for loss, reach in reaches.items():
            rows = zip(self._names, largest, finite, reach, strict=True)
            found[loss] = {
                name: Output(float(size), bool(whole), float(far))
                for name, size, whole, far in rows
            }
        return found

    def last_name(self, arrays: list[Any]) -> str:
        """Returns the name of what float16 makes last; what follows is float32."""
        if not self._names:
            jax.eval_shape(self._compute, arrays)
        return self.last

    def moved(self, arrays: list[Any], name: str) -> dict[str, Any]:
        """Returns each loss with an output where it has to be for a loss of 0."""
        if not self._names:
            jax.eval_shape(self._compute, arrays)
        found: dict[str, Any] = self._move(arrays, self._names.index(name))
        return found

    def _run(self, arrays: list[Any], see: Callable[[str, Any], Any]) -> dict[str, Any]:
        flat = _evaluated(self._closed, jax.tree.leaves(arrays), see, _Names(self))
        losses: dict[str, Any] = jax.tree.unflatten(self._losses, flat)
        return losses

    def _seen(self, arrays: list[Any], probes: Sequence[Any] | None) -> tuple[Any, list[Any]]:
        """The losses, and what the operations return, with probes added to it."""
        names: list[str] = []
        made: list[Any] = []

        def see(name: str, array: Any) -> Any:
            if probes is not None:
                array = array + probes[len(made)]
            names.append(name)
            made.append(array)
            return array

        losses = self._run(arrays, see)
        self._names = names
        return losses, made

    def _narrow(self, arrays: list[Any]) -> Any:
        losses, made = self._seen(arrays, None)
        nothing = [jnp.float32(math.nan)] * len(made)
        return *_sizes(made), dict.fromkeys(losses, nothing)

    def _steps(self, arrays: list[Any]) -> tuple[Any, list[Any], dict[str, list[Any]]]:
        """The losses, what the operations return, and the way to a loss of 0 for each of them."""
        shapes = jax.eval_shape(lambda arrays: self._seen(arrays, None)[1], arrays)
        probes = [jnp.zeros(each.shape, each.dtype) for each in shapes]
        losses, pull, made = jax.vjp(lambda p: self._seen(arrays, p), probes, has_aux=True)
        steps = {}
        for name, loss in losses.items():
            (gradients,) = pull(_one_of(losses, name, 1.0))
            # Of subnormal squares nothing would be left.
            units = [g / jnp.maximum(jnp.max(jnp.abs(g), initial=0), 1e-38) for g in gradients]
            steps[name] = [
                -2 * loss / jnp.sum(u * g) * u for u, g in zip(units, gradients, strict=True)
            ]
        return losses, made, steps

    def _wide(self, arrays: list[Any]) -> Any:
        _, made, steps = self._steps(arrays)
        reaches = {
            name: [_largest(array + step) for array, step in zip(made, each, strict=True)]
            for name, each in steps.items()
        }
        return *_sizes(made), reaches

    def _moved(self, arrays: list[Any], index: int) -> dict[str, Any]:
        losses, made, steps = self._steps(arrays)

        def loss_at(name: str, part: float) -> Any:
            probes = [jnp.zeros_like(array) for array in made]
            probes[index] = part * steps[name][index]
            return self._seen(arrays, probes)[0][name]

        return {name: jnp.minimum(loss_at(name, 1.0), loss_at(name, 0.5)) for name in losses}


class _Names:
    """Names of operations as they come: where they were written, and what they are.

    Args:
        watched: What keeps the name of the last one that goes on in float32.
    """

    def __init__(self, watched: _Watched) -> None:
        self._watched, self.half = watched, watched.half
        # With the arrays, so that no other one gets their identity.
        self._made_by: dict[int, tuple[Any, str]] = {}
        self._count: dict[str, int] = {}

    def new(self, equation: Any, scope: str) -> str:
        """Returns the name of an operation; the same ones come in the same order."""
        name = f"{scope or _where(equation)} ({equation.primitive.name})"
        self._count[name] = self._count.get(name, 0) + 1
        number = self._count[name]
        return name if number == 1 else f"{name}, {number}"

    def follow(self, equation: Any, arguments: Sequence[Any], made: Sequence[Any]) -> None:
        """Takes note of which operation made the numbers that are only moved."""
        sources = [self._made_by[id(each)][1] for each in arguments if id(each) in self._made_by]
        if not sources:
            return
        narrow = any(getattr(each, "dtype", None) == jnp.float16 for each in arguments)
        if equation.primitive.name == "convert_element_type" and narrow:
            if made[0].dtype == jnp.float32:
                self._watched.last = sources[-1]
            return
        for each in made:
            self._made_by[id(each)] = each, sources[-1]

    def made(self, name: str, array: Any) -> None:
        """Takes note of what an operation made."""
        self._made_by[id(array)] = array, name


def _evaluated(
    closed: Any,
    inputs: Sequence[Any],
    see: Callable[[str, Any], Any],
    names: _Names,
    scope: str = "",
) -> list[Any]:
    """Evaluates a closed jaxpr, and the calls in it, with what each operation makes replaced."""
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        arguments = [read(atom) for atom in equation.invars]
        called = _called(equation)
        within = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
        if called is not None:
            made = _evaluated(called, arguments, see, names, within)
        else:
            made = bind(jaxpr, equation, arguments)
            if equation.primitive.name in _MOVES_DATA:
                names.follow(equation, arguments, made)
            else:
                for number, array in enumerate(made):
                    if array.ndim and jnp.issubdtype(array.dtype, jnp.floating):
                        name = names.new(equation, within)
                        if names.half and array.dtype != jnp.float16:
                            continue
                        made[number] = see(name, array)
                        names.made(name, made[number])
        values.update(zip(equation.outvars, made, strict=True))
    return [jnp.asarray(read(atom), atom.aval.dtype) for atom in jaxpr.outvars]


def _called(equation: Any) -> Any:
    """The closed jaxpr that an equation calls, or None."""
    if equation.primitive.name not in _CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        called = equation.params.get(key)
        if called is not None:
            return called if hasattr(called, "consts") else ClosedJaxpr(called, ())
    return None


def _where(equation: Any) -> str:
    """The line of a function where an operation was written."""
    frames = getattr(equation.source_info.traceback, "frames", ())
    for frame in frames:
        ours = pathlib.Path(__file__).parents[1]
        if not any(part in frame.file_name for part in (*_LIBRARIES, str(ours))):
            return f"{frame.function_name}, line {frame.line_num}"
    return "loss"


def _sizes(made: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return [_largest(each) for each in made], [jnp.all(jnp.isfinite(each)) for each in made]


def _largest(array: Any) -> Any:
    finite = jnp.where(jnp.isfinite(array), jnp.abs(array), 0)
    return jnp.max(finite, initial=0).astype(jnp.float32)


def _one_of(losses: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """What the losses are multiplied by, where all but one are not derived."""
    return {
        each: jnp.asarray(value if each == name else 0, loss.dtype) for each, loss in losses.items()
    }


def _on_host(gradient: Any) -> Any:
    """A gradient as a NumPy array of float32; a complex one has both parts."""
    array = np.asarray(gradient)
    return array.view(np.float32) if array.dtype == np.complex64 else array.astype(np.float32)


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
        arrays = [leaf for leaf, is_array in zip(leaves, there, strict=True) if is_array]
        fixed = [None if is_array else leaf for leaf, is_array in zip(leaves, there, strict=True)]
        return cls(structure, there, fixed), arrays

    @property
    def key(self) -> Any:
        """What is equal for forms that one compiled function serves."""
        return self.structure, tuple(map(repr, self.fixed))

    def filled(self, arrays: Sequence[Any], dtype: Any) -> Any:
        """Returns the tree with arrays in it, widened to float32 if that is the dtype."""
        waiting = iter(arrays)
        leaves = [
            _widened(next(waiting), dtype) if is_array else leaf
            for is_array, leaf in zip(self.there, self.fixed, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def _widened(leaf: Any, dtype: Any) -> Any:
    is_narrower = jnp.issubdtype(leaf.dtype, jnp.floating) and (
        leaf.dtype.itemsize < np.dtype(dtype).itemsize
    )
    return leaf.astype(dtype) if is_narrower else leaf


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


def _checked_losses(result: Any, has_aux: bool) -> dict[str, Any]:
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
            f"{wanted}, or a dictionary of such losses. Received: a {type(result).__name__}. Add "
            "several losses up; of a pair (loss, anything) say has_aux=True."
        )
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
        losses[name] = loss
    return losses


def _scale_of(in_use: Any) -> float | None:
    if in_use is None:
        return None
    if isinstance(in_use, (int, float)):
        return checked_above_zero("in_use", in_use)
    return float(np.asarray(loss_scale(in_use)))
