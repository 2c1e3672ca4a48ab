"""What passes of a model take in both generations of Keras."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lossscale.diagnosis.batches import NO_NUMBERS, leaves
from lossscale.diagnosis.passes import LOSS, MODEL, PARTS, Output, Pass, check_losses
from lossscale.errors import ArgumentError, ArgumentTypeError, LossScaleError

NARROW = ("float16", "bfloat16")
_WIDER = ("float32", "float64", "bfloat16")

Change = Callable[[str, Any], Any]
"""Given the name of an operation and a tensor that it returned, returns what goes on."""


class Watcher:
    """Keeps what operations return in a forward pass, and may change it.

    Args:
        change: What may change a tensor.
        is_tensor: Whether something is a tensor that holds numbers.
        map_structure: Applies a function to the leaves of a structure.
        location: What differs in a function that is traced within, out of which no tensor gets.
    """

    def __init__(
        self,
        change: Change,
        is_tensor: Callable[[Any], bool],
        map_structure: Callable[..., Any],
        location: Callable[[], Any] = lambda: None,
    ) -> None:
        self.kept: list[tuple[str, Any]] = []
        self._change, self._is_tensor, self._map = change, is_tensor, map_structure
        self._location, self._start = location, location()
        self._names: dict[str, int] = {}
        self._known: dict[int, tuple[Any, Any]] = {}
        self._is_inside = False

    def operation(self, function: Callable[..., Any], path: Callable[[], str], name: str) -> Any:
        """Returns a function of the library whose results are kept.

        What it calls of the library is a part of it.

        Args:
            function: The function.
            path: Returns the path of the layer that it is called in.
            name: The name of the function.
        """

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            try:
                returned = function(*args, **kwargs)
            finally:
                self._is_inside = False
            return self.keep(f"{path()} ({name})", returned)

        return watched

    def keep(self, name: str, returned: Any) -> Any:
        """Keeps what an operation returned, unless that is kept already."""
        if self._is_inside or self._location() != self._start:
            return returned
        known = self._known if name != MODEL else {}
        unique = ""

        def kept(tensor: Any) -> Any:
            nonlocal unique
            if not self._is_tensor(tensor) or "float" not in str(tensor.dtype):
                return tensor
            if not len(tensor.shape) or 0 in tensor.shape:
                return tensor
            if id(tensor) in known:
                # An operation may return one tensor twice, as a state and as an output.
                return known[id(tensor)][1]
            if not unique:
                self._names[name] = number = self._names.get(name, 0) + 1
                unique = name if number == 1 else f"{name}, {number}"
            mask = getattr(tensor, "_keras_mask", None)
            returned, tensor = tensor, self._change(unique, tensor)
            if mask is not None:
                # The loss leaves out what the mask hides.
                tensor._keras_mask = mask
            self.kept.append((unique, tensor))
            # Both are kept, so that no other tensor gets their identities.
            self._known |= {id(each): (each, tensor) for each in (returned, tensor)}
            return tensor

        return self._map(kept, returned)


class Derived(NamedTuple):
    """What a framework found in one pass.

    Attributes:
        losses: Name of each loss to its value.
        gradients: Name of each loss to the gradients of the scaled one by the variables; None
            where there is none.
        kept: The names of the operations, and what they returned.
        inside: Name of each loss to the gradients by what is kept, by its index; empty if nobody
            asked.
    """

    losses: Mapping[str, Any]
    gradients: Mapping[str, Sequence[Any]]
    kept: Sequence[tuple[str, Any]]
    inside: Mapping[str, Mapping[int, Any]]


Forward = Callable[[Sequence[Any], Change], tuple[dict[str, Any], Any]]
"""Given the values of the trainable variables, and what may change a tensor inside, returns the
losses and what a `Watcher` kept."""


class ModelRun:
    """Computes passes of a model; see `lossscale.diagnosis.passes.Run`.

    Args:
        model: The model, with its variables.
        loss_fn: As for `lossscale.diagnosis.diagnose`.
        parameters: The same.

    Attributes:
        setting: What it computes with, in words.

    Raises:
        ArgumentError: If its loss is not known, or it has no variables. It is a `ValueError`.
        ArgumentTypeError: If `loss_fn` is no function. It is a `TypeError`.
    """

    setting: str

    def __init__(self, model: Any, loss_fn: Any = None, parameters: Any = None) -> None:
        _check_model(model, self.library, loss_fn, is_compiled=self.is_compiled(model))
        self.model, self.loss_fn = model, loss_fn
        self.variables = list(model.trainable_variables)
        self._names = _unique(map(self.name_of, self.variables))
        self._owned = {key: {id(v) for v in each} for key, each in (parameters or {}).items()}
        self._computing: dict[Any, tuple[Any, list[str], list[str]]] = {}

    # What a library has to say.

    compiles = False
    library: Any
    ops: Any

    def is_compiled(self, model: Any) -> bool:
        """Whether `compile` was called."""
        raise NotImplementedError

    def name_of(self, variable: Any) -> str:
        """Returns what reports call a variable."""
        raise NotImplementedError

    def running(self, half: bool) -> contextlib.AbstractContextManager[Any]:
        """Within it the model computes in float32 or in float16; after it, it is as before."""
        raise NotImplementedError

    def forward(self, values: Any, batch: Any, watcher: Watcher | None) -> Any:
        """Returns what the loss function returns."""
        raise NotImplementedError

    def new_watcher(self, change: Change) -> Watcher:
        """Returns what keeps the results of operations."""
        raise NotImplementedError

    def derive(self, forward: Forward, values: Any, scale: Any, inside: bool) -> Derived:
        """Computes the losses, and their gradients."""
        raise NotImplementedError

    def values(self, wide: bool) -> Any:
        """Returns the values of all variables, those that are trained first."""
        raise NotImplementedError

    def compiled(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the same function, compiled where the library does that."""
        return compute

    def check(self, batch: Any) -> None:
        """Checks a batch before it is used."""

    # The pass.

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False, move: str = ""
    ) -> dict[str, Pass]:
        """Returns a pass for each loss."""
        batch = (*batch, None, None)[:3]
        self.check(batch)
        # To compile a pass a second time would cost more than to watch it each time.
        key = half, watch or (half and self.compiles), move
        if key not in self._computing:
            losses: list[str] = []
            operations: list[str] = []
            compute = self._new_computation(*key, losses, operations)
            self._computing[key] = self.compiled(compute), losses, operations
        compute, losses, operations = self._computing[key]
        with _attributes_kept(self.model), self.running(half):
            found = compute(self.values(not half), batch, np.float32(scale))
        check_losses(self._owned, losses)
        passes = {}
        for name, (loss, gradients, outputs) in zip(losses, found, strict=True):
            owned = self._owned.get(name)
            passes[name] = Pass(
                {
                    key: None if gradient is None else self.on_host(gradient)
                    for key, variable, gradient in zip(
                        self._names, self.variables, gradients, strict=False
                    )
                    if owned is None or id(variable) in owned
                },
                float(self.on_host(loss)),
                {
                    key: Output(float(largest), bool(finite), float(reach))
                    for key, (largest, finite, reach) in zip(operations, outputs, strict=False)
                },
            )
            if not move and all(each is None for each in passes[name].gradients.values()):
                raise ArgumentError(
                    "The loss depends on none of the trainable variables of the model that it is "
                    "judged by. Compute it with the model that `loss_fn` is given."
                )
        return passes

    def on_host(self, gradient: Any) -> Any:
        """Returns a gradient as a NumPy array of float32."""
        return np.asarray(gradient).astype(np.float32)

    def _new_computation(
        self, half: bool, watch: bool, move: str, losses: list[str], operations: list[str]
    ) -> Callable[..., Any]:
        """Returns what computes passes, and writes the names of what it returns into two lists."""

        def compute(values: Any, batch: Any, scale: Any) -> Any:
            count = len(self.variables)

            def forward(trained: Sequence[Any], change: Change) -> tuple[dict[str, Any], Any]:
                watcher = self.new_watcher(change) if watch or move else None
                with _host_random_numbers():
                    returned = self.forward([*trained, *values[count:]], batch, watcher)
                return self._checked(returned), watcher.kept if watcher else []

            inside = bool(move) or (watch and not half)
            derived = self.derive(forward, values[:count], scale, inside)
            losses[:] = derived.losses
            if move:
                return [
                    (self._lowest(derived, name, move, scale, forward, values[:count]), [], [])
                    for name in losses
                ]
            groups: dict[str, list[int]] = {}
            for index, (name, tensor) in enumerate(derived.kept):
                if not half or _dtype(tensor) == "float16":
                    groups.setdefault(name, []).append(index)
            operations[:] = groups
            return [
                (
                    loss,
                    derived.gradients[name],
                    [
                        self._summary(derived, name, indices, loss * scale)
                        for indices in groups.values()
                    ],
                )
                for name, loss in derived.losses.items()
            ]

        return compute

    def _checked(self, returned: Any) -> dict[str, Any]:
        ops = self.ops
        wanted = "`loss_fn` must return the loss, a scalar tensor, or a dictionary of such losses."
        losses = dict(returned) if isinstance(returned, dict) else {LOSS: returned}
        for loss in losses.values():
            if not ops.is_tensor(loss):
                more = " Add several losses up." if isinstance(loss, (list, tuple)) else ""
                raise ArgumentTypeError(f"{wanted} Received: a {type(loss).__name__}.{more}")
            if any(size != 1 for size in loss.shape) or "float" not in str(loss.dtype):
                raise ArgumentError(
                    f"{wanted} Received: a tensor of shape {tuple(loss.shape)} and dtype "
                    f"{loss.dtype}. Take the mean or the sum."
                )
        return {name: ops.reshape(ops.cast(x, "float32"), ()) for name, x in losses.items()}

    def _summary(self, derived: Derived, name: str, indices: Iterable[int], loss: Any) -> Any:
        """The largest finite magnitude, whether all are finite, and the reach."""
        ops, largest, finite = self.ops, [], []
        for index in indices:
            tensor = ops.cast(derived.kept[index][1], "float32")
            is_finite = ops.isfinite(tensor)
            largest.append(ops.max(ops.where(is_finite, ops.abs(tensor), 0.0)))
            finite.append(ops.all(is_finite))
        reached = [
            ops.max(ops.abs(ops.cast(derived.kept[index][1], "float32") + step))
            for index, step in self._steps(derived, name, indices, loss).items()
        ]
        reach = ops.max(ops.stack(reached)) if reached else np.nan
        return ops.max(ops.stack(largest)), ops.all(ops.stack(finite)), reach

    def _steps(
        self, derived: Derived, name: str, indices: Iterable[int], loss: Any
    ) -> dict[int, Any]:
        """What has to be added to each tensor of an output for a loss of 0, by its index."""
        ops, inside = self.ops, derived.inside.get(name, {})
        gradients = {i: ops.cast(inside[i], "float32") for i in indices if i in inside}
        if not gradients:
            return {}
        largest = ops.max(ops.stack([ops.max(ops.abs(g)) for g in gradients.values()]))
        # Squares of what they are would leave the range of float32.
        units = {index: gradient / largest for index, gradient in gradients.items()}
        squares = ops.sum(ops.stack([ops.sum(unit * unit) for unit in units.values()]))
        return {index: -2.0 * loss / largest / squares * unit for index, unit in units.items()}

    def _lowest(
        self, derived: Derived, name: str, output: str, scale: Any, forward: Forward, values: Any
    ) -> Any:
        """The lowest loss with an output on the way to where it has to be for a loss of 0."""
        indices = [index for index, (kept, _) in enumerate(derived.kept) if kept == output]
        steps = self._steps(derived, name, indices, derived.losses[name] * scale)

        def moved(part: float) -> Any:
            order = iter(indices)

            def change(kept: str, tensor: Any) -> Any:
                step = steps.get(next(order)) if kept == output else None
                if step is None:
                    return tensor
                return tensor + self.ops.cast(part * step, tensor.dtype)

            return forward(values, change)[0][name]

        return functools.reduce(self.ops.minimum, map(moved, PARTS))


# --- Precision ------------------------------------------------------------------------------------


@contextlib.contextmanager
def computing_in(
    layers: Iterable[Any], wanted: Callable[[Any], Mapping[str, Any]]
) -> Iterator[None]:
    """Within it layers have other attributes, of which Keras' tracking knows nothing.

    Args:
        layers: The layers.
        wanted: Returns the attributes of a layer.
    """
    with contextlib.ExitStack() as stack:
        for layer in layers:
            for name, value in wanted(layer).items():
                stack.enter_context(replaced(layer, name, value))
        yield


def cast_to_float16(
    model: Any, library: str, asks: Callable[[Any], bool], is_kept: Callable[[Any], bool]
) -> list[Any]:
    """Returns the layers that compute in float16 only once the model trains in it.

    None if one of them does so already; otherwise those that did not ask for a dtype.

    Args:
        model: The model.
        library: The name of the library.
        asks: Whether a layer was made with a dtype of its own.
        is_kept: Whether a layer has to compute as it does.
    """
    if any(layer.compute_dtype == "float16" for layer in model._flatten_layers()):
        return []
    whole: list[Any] = []
    parts: list[Any] = []

    def visit(layer: Any) -> None:
        own = list(layer._flatten_layers(include_self=False, recursive=False))
        if layer is model or (own and (hasattr(layer, "train_step") or _root(layer) != library)):
            whole.append(layer)
            for each in own:
                visit(each)
        else:
            parts.append(layer)

    visit(model)
    chosen = [layer for layer in parts if not asks(layer)]
    # Of a model that was loaded each layer has its dtype written down.
    if not any(layer.weights for layer in chosen):
        chosen = parts
    # A layer of the library gives its dtype to those in it.
    inside = [each for layer in chosen for each in layer._flatten_layers()]
    found = {id(layer): layer for layer in (*whole, *inside)}.values()
    return [layer for layer in found if layer.compute_dtype in _WIDER and not is_kept(layer)]


def arguments_of(layer: Any) -> Mapping[str, Any] | None:
    """Returns what a layer was made with; None if Keras has not kept it."""
    config = getattr(layer, "_auto_config", None)
    found: Mapping[str, Any] | None = getattr(config, "config", None)
    return found


@contextlib.contextmanager
def replaced(target: Any, attribute: str, value: Any) -> Iterator[None]:
    """Within it an object has another attribute, of which Keras' tracking knows nothing."""
    attributes = vars(target)
    was_there, before = attribute in attributes, attributes.get(attribute)
    attributes[attribute] = value
    try:
        yield
    finally:
        if was_there:
            attributes[attribute] = before
        else:
            del attributes[attribute]


# --- As it was ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _attributes_kept(model: Any) -> Iterator[None]:
    """After it each layer has the attributes that it had before, past the tracking of Keras."""
    before = [(vars(layer), dict(vars(layer))) for layer in model._flatten_layers()]
    try:
        yield
    finally:
        for attributes, values in before:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            attributes.update(values)


@contextlib.contextmanager
def _host_random_numbers() -> Iterator[None]:
    """After it Python and NumPy draw the numbers that they would have drawn before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


# --- Checks ---------------------------------------------------------------------------------------


def _check_model(model: Any, library: Any, loss_fn: Any, *, is_compiled: bool) -> None:
    """Checks that passes of a model of a library can be computed."""
    if loss_fn is not None and not callable(loss_fn):
        raise ArgumentTypeError(
            "`loss_fn` must be a function of the model and a batch (x, y, sample_weight) that "
            f"returns the loss. Received: {loss_fn!r} of type {type(loss_fn).__name__}."
        )
    own_step = type(model).train_step is not library.Model.train_step
    if loss_fn is None and (own_step or "train_step" in vars(model)):
        raise ArgumentError(_lines_to_write(model, _optimizer_names(model, library)))
    if loss_fn is None and not is_compiled:
        raise ArgumentError(
            f"The model {model.name!r} is not compiled, so its loss is not known. "
            "Call model.compile(optimizer, loss) first, or give loss_fn=."
        )
    is_built = model.built or (loss_fn is not None and bool(model.variables))
    if not is_built or not model.trainable_variables:
        yet = " yet. Call it on a batch, or give it an Input, first."
        raise ArgumentError(
            f"The model {model.name!r} has no trainable variables{'.' if is_built else yet}"
        )


def _lines_to_write(model: Any, optimizers: Sequence[str]) -> str:
    """The message with the function that a model with a `train_step` of its own needs."""
    owner, call = type(model).__name__, ""
    if len(optimizers) > 1:
        losses = [each.removesuffix("optimizer").strip("_") or "main" for each in optimizers]
        lines = [
            f"{loss}_loss = ...  # what model.{optimizer} minimizes"
            for loss, optimizer in zip(losses, optimizers, strict=True)
        ]
        lines.append("return {" + ", ".join(f'"{each}": {each}_loss' for each in losses) + "}")
        owned = ", ".join(f'"{each}": [...]' for each in losses)
        call = f", parameters={{{owned}}}"
    else:
        known = bool(getattr(model, "loss", None))
        loss = "model.compute_loss(x, y, y_pred, sample_weight)" if known else "..."
        lines = ["y_pred = model(x, training=True)", f"loss = {loss}", "return loss"]
    body = "".join(f"        {line}\n" for line in ("x, y, sample_weight = batch", *lines))
    return (
        f"{owner} has a train_step of its own, so its loss is not known. Write down the loss that "
        f"{owner}.train_step derives, not scaled, and pass it:\n\n"
        f"    def loss_fn(model, batch):\n{body}\n"
        f"    diagnose(model, ..., loss_fn=loss_fn{call})"
    )


def check_batch(batch: Any, inputs: Sequence[Any], *, needs_targets: bool) -> None:
    """Checks what a model is going to be given.

    Args:
        batch: Inputs, targets and sample weights; None for what there is not.
        inputs: The symbolic inputs of the model; none if they are not known.
        needs_targets: Whether its loss compares with targets.

    Raises:
        ArgumentError: If it cannot be given that; the message names the argument.
    """
    texts = any("string" in str(each.dtype) for each in inputs)
    for name, value in zip(("x", "y", "sample_weight"), batch, strict=True):
        for array in leaves(value):
            kind = getattr(getattr(array, "dtype", None), "kind", "f")
            if kind in NO_NUMBERS and not (name == "x" and texts):
                raise ArgumentError(
                    f"`{name}` must hold numbers. Received: an array of dtype {array.dtype}."
                )
    x, y, _ = batch
    if y is None and needs_targets:
        raise ArgumentError(
            "`y` is missing: the loss of the model compares what it returns with targets. Pass "
            "them as `y`, or in batches (x, y)."
        )
    if isinstance(x, Mapping):
        # What other keys mean is for the model to say.
        arrays: list[Any] = [x.get(each.name) for each in inputs]
    else:
        arrays = list(leaves(x))
        if inputs and len(arrays) != len(inputs):
            names = ", ".join(repr(each.name) for each in inputs)
            raise ArgumentError(
                f"`x` must have one array for each input of the model: {names}. "
                f"Received: {len(arrays)}."
            )
    for each, array in zip(inputs, arrays, strict=False):
        if hasattr(array, "shape") and not fits(array.shape, each.shape):
            shape = ", ".join(str(size) for size in ("rows", *each.shape[1:]))
            raise ArgumentError(
                f"`x` must have the shape ({shape}) for the input {each.name!r}. "
                f"Received: {tuple(array.shape)}."
            )


def fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Whether Keras takes an array for an input; the first number of both is that of the rows."""
    found, wanted = tuple(shape)[1:], tuple(expected)[1:]
    # Keras adds or takes away a last dimension of 1.
    shapes = [wanted, (*wanted, 1), *([wanted[:-1]] if wanted[-1:] == (1,) else [])]
    return any(
        len(found) == len(each)
        and all(want in (None, got) for want, got in zip(each, found, strict=True))
        for each in shapes
    )


@contextlib.contextmanager
def naming_targets(y: Any, y_pred: Any) -> Iterator[None]:
    """Says of an error within it that the targets do not fit, the same for every framework."""
    try:
        yield
    except LossScaleError:
        raise
    except Exception as error:
        y, y_pred = (
            ", ".join(str(tuple(leaf.shape)) for leaf in leaves(each)) or "nothing"
            for each in (y, y_pred)
        )
        raise ArgumentError(
            "`y` does not fit what the model returns, or not its loss. Received: the shape "
            f"{y}, for outputs of the shape {y_pred}."
        ) from error


def without_a_loss(model: Any) -> ArgumentError:
    """Returns the error about a model that has nothing to differentiate."""
    return ArgumentError(
        f"The model {model.name!r} was compiled without a loss. "
        "Call model.compile(optimizer, loss) with one, or give loss_fn=."
    )


def _optimizer_names(model: Any, library: Any) -> list[str]:
    """What the optimizers of a model are called in it, each once."""
    module = library.optimizers
    kinds = (module.Optimizer, *(() if library.__name__ == "keras" else (module.legacy.Optimizer,)))
    found = {
        id(each): name for name, each in reversed(vars(model).items()) if isinstance(each, kinds)
    }
    names = [name for name in vars(model) if name in found.values()]
    # `compile` makes an RMSprop where it is given none.
    if len(names) > 2 and type(vars(model).get("optimizer")).__name__ == "RMSprop":
        names.remove("optimizer")
    return names


def _unique(names: Iterable[str]) -> list[str]:
    """Returns names, those that come again with a number."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = number = counts.get(name, 0) + 1
        found.append(name if number == 1 else f"{name}, {number}")
    return found


def _root(layer: Any) -> str:
    return type(layer).__module__.partition(".")[0]


def _dtype(tensor: Any) -> str:
    return str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch.")
