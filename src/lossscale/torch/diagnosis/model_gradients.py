"""The gradients of a model's loss in float32 and in float16, from one run after another."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from lossscale.diagnostics.measurement import NARROW, Derived
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.torch.diagnosis.kept import (
    KeptModel,
    copied,
    is_narrower,
    same_random_numbers,
    tensors_in,
)
from lossscale.torch.diagnosis.precisions import Precision
from lossscale.torch.diagnosis.tapping import TappedModel
from lossscale.torch.scaling import real_parts, scaled, stored

LossFn = Callable[[Any, Any], Any]


class Subject:
    """A model to derive, with all that a run may change put back after each.

    Args:
        model: The model.
        loss_fn: Given the model and a batch, returns the loss.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: LossFn) -> None:
        self.model, self._loss_fn = model, loss_fn
        self.names, self.parameters = named_trainable(model)
        self.devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        self._kept = KeptModel(model)

    def gradients(
        self,
        batch: Any,
        scale: float,
        precision: Precision,
        tapped_model: TappedModel | None = None,
    ) -> tuple[list[Any], list[Derived]]:
        """Returns the gradients of the scaled loss by parameters, and what was tapped.

        Args:
            batch: What the loss is computed on.
            scale: What it is multiplied by.
            precision: What to compute in.
            tapped_model: Where to tap the model; None for nowhere.
        """
        tapped: list[Derived] = []
        with self._running(), precision.around(), contextlib.ExitStack() as stack:
            if tapped_model is not None:
                tapped = stack.enter_context(tapped_model.installed())
            with precision.forward():
                loss = self._loss_fn(self.model, batch)
            check_loss(loss)
            # In autocast's own way the backward pass is outside of it.
            with torch.autocast(precision.device, enabled=False):
                total = scaled(loss.reshape(()), scale)
                found = torch.autograd.grad(total, self.parameters, allow_unused=True)
        return list(found), tapped

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with (
            same_random_numbers(self.devices),
            torch.enable_grad(),
            _not_compiled(),
            _nothing_recomputed(),
        ):
            if not self.model.training:
                self.model.train()
            try:
                yield
            finally:
                self._kept.put_back()


class Differentiation:
    """The reference, and what float16 makes of it.

    A model whose parameters are in 16 bits has its reference from a copy with wider ones. If its
    loss cannot be computed with those, it is computed with the model as it is.

    Args:
        model: The model.
        loss_fn: Given the model and a batch, returns the loss.
        reference: The dtype of the reference.
        tapped_model: Where to tap the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        reference: torch.dtype,
        tapped_model: TappedModel,
    ) -> None:
        self._tapped_model, self._dtype = tapped_model, reference
        self.subject = Subject(model, loss_fn)
        device = next(iter(self.subject.parameters)).device.type
        dtypes = {parameter.dtype for parameter in self.subject.parameters}
        self._full = Precision(device, None, casts=False)
        self._narrow = Precision(device, torch.float16, casts=torch.float16 not in dtypes)
        self._wide: Subject | None = None
        if any(
            is_narrower(tensor, reference) for tensor in (*model.parameters(), *model.buffers())
        ):
            self._wide = Subject(_widened(model, reference), loss_fn)
            self._tapped_model = TappedModel(self._wide.model, tapped_model.name)
            self._tapped_model.layer_names = tapped_model.layer_names
        self._may_go_without = self._wide is not None and reference == torch.float32
        self._of_given_model = tapped_model
        self._without_onednn = False

    def reference(self, batch: Any, scale: float) -> list[Derived]:
        """Returns the gradients in the dtype of the reference, by parameters and inside."""
        data, _ = batch
        try:
            return self._reference(data, scale)
        except (ArgumentError, ArgumentTypeError):
            raise
        except Exception as error:
            _name_device(data, self.subject.devices, error)
            raise

    def _reference(self, data: Any, scale: float) -> list[Derived]:
        if self._wide is not None:
            try:
                found = self._wide.gradients(
                    copied(data, self._dtype), scale, self._full, self._tapped_model
                )
            except Exception:
                if not self._may_go_without:
                    raise
                # The loss casts what it gives to the model.
                self._wide, self._tapped_model = None, self._of_given_model
            else:
                return self._listed(*found)
        return self._listed(
            *self.subject.gradients(copied(data), scale, self._full, self._tapped_model)
        )

    def in_float16(self, batch: Any, scale: float) -> list[Derived]:
        """Returns the gradients by parameters as training in float16 has them."""
        data, _ = batch
        if not self._without_onednn:
            try:
                return self._in_float16(data, scale)
            except RuntimeError as error:
                # oneDNN computes an LSTM in float16 only on processors that have float16
                # themselves; PyTorch's own code does so on all.
                if "could not create a primitive" not in str(error):
                    raise
                self._without_onednn = True
        with _onednn_off():
            return self._in_float16(data, scale)

    def _in_float16(self, data: Any, scale: float) -> list[Derived]:
        return self._listed(*self.subject.gradients(copied(data), scale, self._narrow))

    def _listed(self, gradients: Sequence[Any], tapped: list[Derived]) -> list[Derived]:
        self._check_any(gradients)
        listed = []
        for number, (gradient, parameter) in enumerate(
            zip(gradients, self.subject.parameters, strict=True)
        ):
            dtype = str(parameter.dtype if gradient is None else gradient.dtype)
            left_out = 0
            if gradient is not None and gradient.layout == torch.sparse_coo:
                gradient = gradient.coalesce()
                left_out = parameter.numel() - gradient.values().numel()
            listed.append(Derived(number, dtype.removeprefix("torch."), gradient, left_out))
        return [*listed, *tapped]

    def _check_any(self, gradients: Sequence[Any]) -> None:
        if all(gradient is None for gradient in gradients):
            raise ArgumentError(
                "The loss that `loss_fn` returned depends on none of the trainable parameters of "
                "the model. Compute it with the model that `loss_fn` is given as its first "
                "argument."
            )


def named_trainable(model: torch.nn.Module) -> tuple[list[str], list[Any]]:
    """Returns the trainable parameters of a model and their names; a shared one has its first."""
    pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, _ in pairs], [parameter for _, parameter in pairs]


def on_host(gradient: Any) -> Any:
    """Returns a gradient as a NumPy array; of a sparse one the rows that are in it."""
    parts = real_parts(gradient)
    values = parts[0] if parts else stored(gradient.detach())
    if str(values.dtype).removeprefix("torch.") in NARROW:
        # NumPy has no bfloat16; each number of both is one of float32.
        values = values.float() if values.dtype == torch.bfloat16 else values
    return values.cpu().numpy()


def check_loss(loss: Any) -> None:
    """Checks what `loss_fn` has returned.

    Raises:
        ArgumentTypeError: If it is no tensor. It is a `TypeError`.
        ArgumentError: If it is no loss that can be derived. It is a `ValueError`.
    """
    wanted = "`loss_fn` must return the loss, a tensor with one element that backward() could take."
    if not isinstance(loss, torch.Tensor):
        more = ""
        if isinstance(loss, (list, tuple)):
            more = " Add several losses up, and leave out what is no loss."
        elif hasattr(loss, "loss") or isinstance(loss, dict):
            more = " Return the loss in it, such as `output.loss`."
        elif isinstance(loss, (int, float)):
            more = " Leave out .item()."
        raise ArgumentTypeError(f"{wanted} Received: {_described(loss)}.{more}")
    if loss.numel() != 1:
        raise ArgumentError(
            f"{wanted} Received: a tensor of shape {tuple(loss.shape)}. Take the mean or the sum."
        )
    if not loss.is_floating_point():
        raise ArgumentError(f"{wanted} Received: a tensor of dtype {loss.dtype}.")
    if not loss.requires_grad:
        raise ArgumentError(
            f"{wanted} Received: a tensor that depends on no trainable parameter. Leave out "
            "detach() and torch.no_grad(), and compute it with the model that `loss_fn` is given."
        )


def _described(value: Any) -> str:
    if value is None:
        return "None"
    return f"a {type(value).__name__}"


@contextlib.contextmanager
def _onednn_off() -> Iterator[None]:
    flags = torch.backends.mkldnn.flags(enabled=False)
    # To set all its flags at once warns of one that only another device has.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flags.__enter__()
    try:
        yield
    finally:
        flags.__exit__(None, None, None)


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
        # It is inherited.
        del cls.apply


def _widened(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    try:
        wide = copy.deepcopy(model)
    except Exception as error:
        raise ArgumentError(
            "The parameters of the model are narrower than the reference, which needs a copy of "
            f"the model, and it cannot be copied: {error}"
        ) from error
    for tensor in (*wide.parameters(), *wide.buffers()):
        if is_narrower(tensor, dtype):
            tensor.data = tensor.data.to(dtype)
    return wide


def _name_device(data: Any, devices: set[torch.device], error: Exception) -> None:
    """Says of an error that the batch is somewhere else, if it is."""
    elsewhere = {tensor.device for tensor in tensors_in(data)} - devices
    if elsewhere and "device" in str(error):
        raise ArgumentError(
            f"A batch is on {_listed(elsewhere)}, and the model on {_listed(devices)}. Move it in "
            "`loss_fn`, or before."
        ) from error


def _listed(devices: set[torch.device]) -> str:
    return ", ".join(sorted(str(device) for device in devices))


def _not_compiled() -> contextlib.AbstractContextManager[Any]:
    """Within it compiled models run as they were written: compiled, they call no hooks."""
    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if stance is None else stance("force_eager")
