"""Gradients of a PyTorch model in float32 and in float16, and the ranges of its operations.

All that a pass may change is put back after it. Automatic casting is that of float16, or switched
off for the reference, also where a model enters it by itself; what it switches off stays off.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction

from lossscale.checks import checked_above_zero, checked_count
from lossscale.diagnosis.batches import check_batches, checked_tolerance, first_batches
from lossscale.diagnosis.measurement import (
    LossGradients,
    OutputRange,
    check_owners,
    checked_losses,
    numbered,
)
from lossscale.diagnosis.report import Report, make_report
from lossscale.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.optimizer import LossScaleOptimizer
from lossscale.torch.ranks import local
from lossscale.torch.scaling import real_parts, scaled, widened

LossFn = Callable[[Any, Any], Any]

_NARROW = (torch.float16, torch.bfloat16)
_WHOLE_LAYERS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "rnn")
"""Random operations that do more than to draw: in float32 they would not be what they are."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def diagnose(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    parameters: Mapping[str, Iterable[torch.nn.Parameter]] | None = None,
    max_batches: int = 2,
    in_use: Any = None,
    tolerance: float = 0.1,
    after_batch: Callable[[int], None] = lambda number: None,
) -> Report:
    """Measures how accurate a PyTorch model's gradients are in float16, and which rule they need.

    On each batch `loss_fn(model, batch)` is called and derived several times: in float32, and under
    `torch.autocast` to float16 at several loss scales. No step is taken. The model is left as it
    was, bit for bit: parameters, buffers such as the statistics of a normalization, `.grad`,
    training flags, and the states of random numbers, which are the same in every pass. A batch is
    handed over as a copy.

    A model in evaluation mode is put into training mode meanwhile; one in training mode keeps the
    modes of its modules. A model whose parameters are float16 is measured as it is, beside a copy
    of it in float32. Compiled models run as they were written.

    Gradients change as a network learns. Ask at the start of training, and again later.

    Args:
        model: The model, with its parameters on their device. Of `DistributedDataParallel` take
            `model.module`.
        loss_fn: Called with the model and one of the batches, returns the loss, not scaled: a
            tensor with one element; or a dictionary of losses, each of which is judged by itself.
            Needs no `autocast`; one inside is set to what is measured.
        batches: An iterable of batches, such as a `DataLoader`. What a batch is only `loss_fn`
            has to know. Its size matters: the loss is averaged over it, so gradients are the
            smaller, the larger it is. Use that of training.
        parameters: For a dictionary of losses: name of a loss to the parameters that its optimizer
            owns. A loss without an entry is judged by all.
        max_batches: How many batches to measure on, at most.
        in_use: The loss scale that the model trains with, which is measured as well: a
            `LossScaleOptimizer`, a `GradScaler`, a number, or None.
        tolerance: How wrong a gradient may be, as a share of it.
        after_batch: Called after every batch with the number of batches so far.

    Returns:
        The report. Print it, or ask for `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If the model, the batches or the loss are something else.
        ArgumentError: If there is nothing to train, no batch, or no loss that can be derived.
        UnsupportedError: If parameters are spread over processes.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, batch):
        ...     return (model(batch) - 1).abs().mean() / 2**30
        >>> report = diagnose(model, loss_fn, [torch.ones(2, 3)])
        >>> report.verdict.value, report.rule.initial_scale > 1
        ('needed', True)
    """
    checked_count("max_batches", max_batches)
    checked_tolerance(tolerance)
    scale = _scale_of(in_use)
    run = TorchGradientFunction(model, loss_fn, parameters)
    check_batches(batches, (torch.Tensor,))
    subject = getattr(model, "_orig_mod", model)
    return make_report(
        run,
        first_batches(batches, max_batches),
        model=type(subject).__name__,
        setting=run.setting,
        tolerance=tolerance,
        in_use=scale,
        after_batch=after_batch,
    )


class TorchGradientFunction:
    """Computes passes of a PyTorch model; see `lossscale.diagnosis.measurement.GradientFunction`.

    Args:
        model, loss_fn, parameters: As for `diagnose`.

    Attributes:
        setting: What it computes with, in words.

    Raises:
        ArgumentError, ArgumentTypeError, UnsupportedError: As `diagnose`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        parameters: Mapping[str, Iterable[torch.nn.Parameter]] | None = None,
    ) -> None:
        _check_model(model)
        if not callable(loss_fn):
            raise ArgumentTypeError(
                "`loss_fn` must be a function of the model and a batch that returns the loss. "
                f"Received: {loss_fn!r} of type {type(loss_fn).__name__}."
            )
        self._model, self._loss_fn = model, loss_fn
        self._owned = {name: set(map(id, owned)) for name, owned in (parameters or {}).items()}
        self._device = next(model.parameters()).device.type
        self._casts = all(each.dtype != torch.float16 for each in model.parameters())
        casting = "autocast to float16" if self._casts else "its own float16"
        self.setting = f"PyTorch, {self._device}, {casting}"
        self._is_narrow = any(_is_narrow(t) for t in (*model.parameters(), *model.buffers()))
        self._without_onednn = False

    def __call__(
        self, batch: Any, scale: float, half: bool, *, watch: bool = False
    ) -> dict[str, LossGradients]:
        """Returns a pass for each loss."""
        if half:
            return self._narrow_pass(batch, scale, watch)
        if self._is_narrow:
            try:
                return self._pass(_widened(self._model), batch, scale, None, watch, widens=True)
            except (ArgumentError, ArgumentTypeError):
                raise
            except RuntimeError:
                # The loss function casts its input to the dtype of the model.
                pass
        try:
            return self._pass(self._model, batch, scale, None, watch)
        except RuntimeError as error:
            _name_device(batch, self._model, error)
            raise

    def _narrow_pass(self, batch: Any, scale: float, watch: bool) -> dict[str, LossGradients]:
        narrow = functools.partial(self._pass, self._model, batch, scale, torch.float16, watch)
        if not self._without_onednn:
            try:
                return narrow()
            except RuntimeError as error:
                # oneDNN computes an LSTM in float16 only on CPUs that have float16 themselves;
                # PyTorch's own code does so on all.
                if "could not create a primitive" not in str(error):
                    raise
                self._without_onednn = True
        with _onednn_off():
            return narrow()

    def _pass(
        self,
        model: torch.nn.Module,
        batch: Any,
        scale: float,
        dtype: torch.dtype | None,
        watch: bool,
        widens: bool = False,
    ) -> dict[str, LossGradients]:
        with _as_it_was(model), _casting_to(dtype), _DrawnInFloat32():
            watcher = _Watcher(model) if watch else None
            # Cached casts belong to a graph that is gone.
            torch.clear_autocast_cache()
            casting = torch.autocast(self._device, dtype, enabled=dtype is not None and self._casts)
            mine = _copied(batch, widens)
            with casting, watcher or contextlib.nullcontext():
                losses = _checked_losses(self._loss_fn(model, mine))
            check_owners(self._owned, losses)
            outputs = {} if watcher is None else watcher.outputs(dtype is not None)
            # autocast documents the backward pass outside of its context.
            with torch.autocast(self._device, enabled=False):
                return self._derived(model, losses, scale, outputs)

    def _derived(
        self,
        model: torch.nn.Module,
        losses: Mapping[str, Any],
        scale: float,
        outputs: Mapping[str, OutputRange],
    ) -> dict[str, LossGradients]:
        named = [
            (_plain(name), mine, given)
            for (name, mine), given in zip(
                model.named_parameters(), self._model.parameters(), strict=True
            )
            if given.requires_grad
        ]
        passes = {}
        for number, (name, loss) in enumerate(losses.items(), 1):
            owned = self._owned.get(name)
            chosen = {n: p for n, p, given in named if owned is None or id(given) in owned}
            gradients = torch.autograd.grad(
                scaled(loss.reshape(()), scale),
                list(chosen.values()),
                retain_graph=number < len(losses),
                allow_unused=True,
            )
            if all(gradient is None for gradient in gradients):
                raise ArgumentError(
                    "The loss depends on none of the model's trainable parameters. Compute it "
                    "with the model that `loss_fn` receives as its first argument."
                )
            on_host = dict(zip(chosen, map(_on_host, gradients), strict=True))
            passes[name] = LossGradients(on_host, float(loss.detach()), outputs)
        return passes


class _Watcher(TorchFunctionMode):
    """Within it the results of functions of PyTorch are kept, under the module that calls them.

    The same ones come in the same order in float32 and in float16.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._path = [_plain_class(model)]
        self._returned: dict[str, list[Any]] = {}
        self._counts: Counter[str] = Counter()
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> Any:
        for path, module in self._model.named_modules():
            # Scripted modules take no hooks.
            if isinstance(module, torch.jit.ScriptModule):
                continue
            name = _plain(path) or self._path[0]
            before = module.register_forward_pre_hook(
                lambda module, given, name=name: self._path.append(name)
            )
            after = module.register_forward_hook(lambda *given: self._leave(), always_call=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._hooks.close()
        return super().__exit__(*error)

    def _leave(self) -> None:
        self._path.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [each for each in tree_leaves(returned) if _is_output(each)]
        if name != "__get__" and tensors:
            self._returned[numbered(f"{self._path[-1]} ({name})", self._counts)] = tensors
        return returned

    def outputs(self, half: bool) -> dict[str, OutputRange]:
        """Returns the range of what each operation has returned."""
        found = {}
        for name, tensors in self._returned.items():
            chosen = [
                part
                for tensor in tensors
                for part in _plain_tensors(tensor)
                if not half or part.dtype == torch.float16
            ]
            if chosen:
                finite = all(bool(part.isfinite().all()) for part in chosen)
                found[name] = OutputRange(max(map(_largest, chosen)), finite)
        return found


def _plain_tensors(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that hold the numbers of one; of `torch.vmap` those of all rows."""
    tensor = torch.func.debug_unwrap(tensor).detach()
    if tensor.is_nested:
        return [tensor.values()] if tensor.layout == torch.jagged else tensor.unbind()
    return [tensor]


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude in a tensor, 0 if there is none."""
    finite = torch.nan_to_num(tensor, 0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def _is_output(value: Any) -> bool:
    # A tensor on the meta device has only a shape, as parts of nested tensors do.
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and bool(value.dim())
        and not value.is_meta
    )


# --- Checks -------------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"The model must be a torch.nn.Module. Received: {model!r} of type "
            f"{type(model).__name__}."
        )
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ArgumentError(
                f"The parameter {name} is uninitialized. Call the model on a batch first."
            )
        if parameter.is_meta:
            raise ArgumentError(
                f"The parameter {name} is on the meta device and has no values. Initialize the "
                "model first, such as by model.to_empty(device='cpu') and load_state_dict()."
            )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ArgumentError(
            "The model has no trainable parameters: none has requires_grad=True. Received: a "
            f"{type(model).__name__}."
        )
    if any(local(parameter) is not parameter for parameter in trainable):
        raise UnsupportedError(
            "diagnose() does not support sharded models. Run it before fully_shard(), on one "
            "process."
        )


def _checked_losses(returned: Any) -> dict[str, Any]:
    def hint(loss: Any) -> str:
        if hasattr(loss, "loss"):
            return " Return the loss in it, such as `output.loss`."
        return " Leave out .item()." if isinstance(loss, (int, float)) else ""

    losses = checked_losses(returned, lambda loss: isinstance(loss, torch.Tensor), hint)
    if not all(loss.requires_grad for loss in losses.values()):
        raise ArgumentError(
            "The loss depends on no trainable parameter. Remove detach() and torch.no_grad(), and "
            "compute it with the model that `loss_fn` receives."
        )
    return losses


def _scale_of(in_use: Any) -> float | None:
    if in_use is None:
        return None
    if isinstance(in_use, LossScaleOptimizer):
        return float(in_use.loss_scale)
    if isinstance(in_use, torch.amp.GradScaler):
        return float(in_use.get_scale())
    return checked_above_zero("in_use", in_use)


def _name_device(batch: Any, model: torch.nn.Module, error: Exception) -> None:
    """Reports a batch on another device as the cause of an error."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    elsewhere = {t.device for t in tree_leaves(batch) if isinstance(t, torch.Tensor)} - devices
    if elsewhere and "device" in str(error):
        there, here = (", ".join(sorted(map(str, each))) for each in (elsewhere, devices))
        raise ArgumentError(
            f"The batch is on {there}, and the model is on {here}. Move the batch in `loss_fn`, or "
            "before."
        ) from error


# --- A model as it was --------------------------------------------------------------------------


@contextlib.contextmanager
def _uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Leaves modules as they were written, on PyTorch 2.4 and 2.5. `_as_it_was` puts them back."""
    for module in model.modules():
        attributes = vars(module)
        if attributes.get("_compiled_call_impl") is not None:
            attributes["_compiled_call_impl"] = None
        if "_orig_mod" in attributes["_modules"]:
            attributes["forward"] = attributes["_modules"]["_orig_mod"]
    yield


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Within it a model trains as it was written, from random numbers that are always the same.

    Parameters are put back as well: `torch.nn.Embedding(max_norm=...)` writes to its own in the
    forward pass.
    """
    tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    modules = [
        (vars(module), dict(vars(module)), [(d, dict(d)) for d in _dictionaries(module)])
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    # In scripted modules, a pass changes only these.
    modes = [(module, module.training) for module in model.modules()]
    stance = getattr(torch.compiler, "set_stance", None)
    try:
        with (
            # Tensors copied in inference mode cannot be differentiated.
            torch.inference_mode(False),
            torch.enable_grad(),
            _same_random_numbers({t.device for t, _ in tensors}),
            # Compiled models call no hooks.
            _uncompiled(model) if stance is None else stance("force_eager"),
            _nothing_recomputed(),
        ):
            if not model.training:
                model.train()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for now, before, dictionaries in modules:
            now.clear()
            now.update(before)
            for dictionary, entries in dictionaries:
                dictionary.clear()
                dictionary.update(entries)
        with torch.no_grad():
            for tensor, value in tensors:
                # Write only what changed: a write spoils graphs that hold the parameter. Version
                # numbers do not help, because a batch normalization updates its statistics without
                # them.
                if not _same_bits(tensor, value):
                    tensor.copy_(value)


def _dictionaries(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [vars(module)[name] for name in ("_parameters", "_buffers", "_modules")]


def _same_bits(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    integer = _INTEGERS.get(tensor.dtype.itemsize)
    if integer is None or tensor.layout != torch.strided:
        return False
    return bool(torch.equal(tensor.detach().view(integer), value.view(integer)))


@contextlib.contextmanager
def _same_random_numbers(devices: set[torch.device]) -> Iterator[None]:
    others = {device for device in devices if device.type != "cpu"}
    kind = next(iter(others)).type if others else "cuda"
    indices = sorted({device.index or 0 for device in others})
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(indices, device_type=kind):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def _nothing_recomputed() -> Iterator[None]:
    """Within it `checkpoint(use_reentrant=True)` keeps what it would compute again.

    It derives by `backward()` what is in it, behind the back of `torch.autograd.grad`. The
    gradients are the same.
    """
    cls: Any = CheckpointFunction
    cls.apply = staticmethod(lambda function, preserve, *args: function(*args))
    try:
        yield
    finally:
        # The flag is inherited.
        del cls.apply


# --- Precision ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _casting_to(dtype: torch.dtype | None) -> Iterator[None]:
    """Within it `torch.autocast` casts to a dtype whatever it was made for; None for not at all."""
    cls: Any = torch.autocast
    enter = cls.__enter__

    def entered(autocast: Any) -> Any:
        before = autocast._enabled, autocast.fast_dtype
        if dtype is None:
            autocast._enabled = False
        else:
            autocast.fast_dtype = dtype
        try:
            return enter(autocast)
        finally:
            # As a decorator, it may be entered again later.
            autocast._enabled, autocast.fast_dtype = before

    cls.__enter__ = entered
    try:
        yield
    finally:
        cls.__enter__ = enter


class _DrawnInFloat32(TorchDispatchMode):
    """Within it 16-bit random numbers are drawn in float32 and rounded.

    From the same seed other ones would be drawn in float16: dropout on a GPU would hide other
    elements than in the reference, and the two could not be compared.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or any(
            part in func.__name__ for part in _WHOLE_LAYERS
        ):
            return func(*args, **kwargs)
        narrow: list[torch.dtype] = []

        def wide(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
                narrow.append(value.dtype)
                return value.float()
            if isinstance(value, torch.dtype) and value in _NARROW:
                narrow.append(value)
                return torch.float32
            return value

        widened = tree_map(wide, (args, kwargs))
        if not narrow:
            return func(*args, **kwargs)
        drawn = func(*widened[0], **widened[1])
        if func._schema.is_mutable:
            return args[0].copy_(drawn)

        def rounded(value: Any) -> Any:
            is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
            return value.to(narrow[-1]) if is_wide else value

        return tree_map(rounded, drawn)


@contextlib.contextmanager
def _onednn_off() -> Iterator[None]:
    flags = torch.backends.mkldnn.flags(enabled=False)
    # Setting all its flags at once warns about one that only another device has.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flags.__enter__()
    try:
        yield
    finally:
        flags.__exit__(None, None, None)


def _widened(model: torch.nn.Module) -> torch.nn.Module:
    try:
        wide = copy.deepcopy(model)
    # A module may define its own copy, in the user's code.
    except Exception as error:
        raise ArgumentError(
            f"The model has parameters narrower than float32 and cannot be copied: {error}. The "
            "float32 reference needs a copy. Pass a model that copy.deepcopy() can copy."
        ) from error
    for tensor in (*wide.parameters(), *wide.buffers()):
        if _is_narrow(tensor):
            tensor.data = tensor.data.float()
    return wide


def _copied(batch: Any, widens: bool) -> Any:
    """A batch whose tensors may be written to, in dictionaries, lists and tuples of any kind."""
    if isinstance(batch, torch.Tensor):
        made = batch.detach().clone()
        made = made.float() if widens and _is_narrow(made) else made
        return made.requires_grad_(batch.requires_grad)
    if isinstance(batch, Mapping):
        found = {key: _copied(value, widens) for key, value in batch.items()}
        try:
            return found if type(batch) is dict else type(batch)(found)  # type: ignore[call-arg]
        except TypeError:
            # A derived attribute; it stays as it is.
            return batch
    if isinstance(batch, (list, tuple)):
        parts = [_copied(value, widens) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return tuple(parts) if isinstance(batch, tuple) else parts
    return batch


def _is_narrow(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() and tensor.dtype.itemsize < 4)


def _on_host(gradient: Any) -> Any:
    """A gradient as a NumPy array of float32; of a sparse one the rows that are in it."""
    if gradient is None:
        return None
    (values,) = real_parts(gradient)
    return widened(values).cpu().numpy()


def _plain(path: str) -> str:
    """The name of a parameter or a module as it is without compiling the model."""
    return path.replace("_orig_mod.", "").removesuffix("._orig_mod").removesuffix("_orig_mod")


def _plain_class(model: torch.nn.Module) -> str:
    return type(getattr(model, "_orig_mod", model)).__name__
