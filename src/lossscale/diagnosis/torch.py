"""Gradients of a PyTorch model in float32 and in float16.

Everything that a pass may change is restored after it. Automatic casting is to
float16, or off for the reference, also if the model enables it itself; what the model disables
stays disabled.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lossscale.checks import checked_parameters
from lossscale.common.replaced_names import replace
from lossscale.diagnosis.measurement import Pass, checked_loss, measure
from lossscale.diagnosis.report import Report
from lossscale.errors import UnsupportedError
from lossscale.explain.text import Explanation
from lossscale.explain.torch import as_it_was, check_model_and_loss, explain, needs_autocast
from lossscale.torch.ranks import is_spread
from lossscale.torch.scaling import real_parts, scaled, widened

LossFn: TypeAlias = Callable[[Any, Any], Tensor]
"""A loss of a model, which may be of a class of the user's, and of a batch of any kind."""

_NARROW = (torch.float16, torch.bfloat16)
T = TypeVar("T")
_WHOLE_LAYERS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "rnn")
"""Random operations that compute more than random numbers, so they must run in float16."""


def diagnose(
    model: Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    parameters: Iterable[Parameter] | None = None,
    max_batches: int = 2,
) -> Report:
    """Measures how accurate a PyTorch model's gradients are in float16, and which rule they need.

    On each batch, `loss_fn(model, batch)` is called and differentiated several times: in float32,
    and under `torch.autocast` to float16 at several loss scales. No step is taken. The model stays
    unchanged, bit for bit: parameters, buffers such as the statistics of a normalization, `.grad`,
    training flags, and the states of random numbers, which are the same in every pass. `loss_fn`
    receives a copy of each batch.

    A model in evaluation mode is put into training mode during the measurement; a model in training
    mode keeps the modes of its modules. A model with float16 parameters is measured as it is, and
    compared with a float32 copy. Compiled models run uncompiled.

    Gradients change as a network learns. Measure at the start of training, and again later.

    Args:
        model: The model, with its parameters on their device. With `DistributedDataParallel`, pass
            `model.module`.
        loss_fn: Called with the model and a batch. Returns the unscaled loss, a tensor
            with one element. It needs no `autocast`; `diagnose` switches one inside to the dtype
            that is measured.
        batches: An iterable of batches of any kind that `loss_fn` takes, such as a `DataLoader`.
            Their size matters: a loss is averaged over the batch, so a larger batch has smaller
            gradients. Use the batch size of training.
        parameters: The parameters that the optimizer of this loss trains, if not all.
        max_batches: The largest number of batches to measure on.

    Returns:
        The report. Print it, or read `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If the model, the batches or the loss have another type.
        ArgumentError: If there is nothing to train, no batch, or no loss to differentiate.
        UnsupportedError: If parameters are sharded over processes, or have no values.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, batch):
        ...     return (model(batch) - 1).abs().mean() / 2**30
        >>> report = diagnose(model, loss_fn, [torch.ones(2, 3)])
        >>> report.verdict.value, report.rule.initial_scale > 1
        ('needed', True)
    """
    run = TorchGradientFunction(model, loss_fn, parameters)
    name = type(getattr(model, "_orig_mod", model)).__name__
    return Report(name, run.setting, measure(run, batches, max_batches))


class TorchGradientFunction:
    """The passes of a PyTorch model; see `lossscale.diagnosis.measurement.GradientFunction`.

    Args:
        model, loss_fn, parameters: As for `diagnose`.

    Attributes:
        setting: The format that the model computes in, in words.
    """

    def __init__(
        self, model: Module, loss_fn: LossFn, parameters: Iterable[Parameter] | None = None
    ) -> None:
        check_model_and_loss(model, loss_fn)
        if any(is_spread(parameter) or parameter.is_meta for parameter in model.parameters()):
            raise UnsupportedError(
                "diagnose() does not support sharded models, nor models on the meta device. Run it "
                "on one process, after the parameters have values and before fully_shard()."
            )
        self._model, self._loss_fn = model, loss_fn
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._parameters = checked_parameters(parameters, [p for _, p in named])
        owned = set(map(id, self._parameters))
        self._names = [_plain(n) for n, p in named if id(p) in owned]
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._casts = needs_autocast(model)
        casting = "autocast to float16" if self._casts else "its own float16"
        self.setting = f"PyTorch, {self._device}, {casting}"

    def __call__(self, batch: object, scale: float, half: bool) -> Pass:
        """Computes a pass."""
        tensors = *self._model.parameters(), *self._model.buffers()
        if not half and any(map(_is_narrow, tensors)):
            # It fails if the loss function casts its input to the dtype of the model.
            with contextlib.suppress(RuntimeError):
                return self._pass(tree_map(_widened, batch), scale, half, widen=True)
        return self._pass(batch, scale, half)

    def explain(self, batch: object, scale: float, half: bool = True) -> Explanation:
        """Explains why a pass is not finite."""
        dtype = torch.float16 if half else None
        given = self._model, self._loss_fn, batch
        with _casting_to(dtype), _DrawnInFloat32():
            return explain(*given, parameters=self._parameters, scale=scale)

    def _pass(self, batch: object, scale: float, half: bool, *, widen: bool = False) -> Pass:
        dtype = torch.float16 if half else None
        model = _wide_copy(self._model) if widen else self._model
        with as_it_was(model), _casting_to(dtype), _DrawnInFloat32():
            # Cached casts belong to an earlier graph.
            torch.clear_autocast_cache()
            mine = copy.deepcopy(batch)
            with torch.autocast(self._device, dtype, enabled=half and self._casts):
                loss: Tensor = checked_loss(self._loss_fn(model, mine), torch.is_tensor)
            by_name = {_plain(name): each for name, each in model.named_parameters()}
            chosen = [by_name[name] for name in self._names]
            gradients: Sequence[Tensor | None] = [None] * len(chosen)
            # PyTorch recommends the backward pass outside of autocast.
            with torch.autocast(self._device, enabled=False):
                if loss.requires_grad and chosen:
                    gradients = torch.autograd.grad(
                        scaled(loss.reshape(()), scale), chosen, allow_unused=True
                    )
                on_host = dict(zip(self._names, map(_on_host, gradients), strict=True))
            return Pass(float(loss.detach()), on_host)


# --- Precision ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _casting_to(dtype: torch.dtype | None) -> Iterator[None]:
    """Within it, every enabled `torch.autocast` casts to a dtype; with None it does not cast."""
    enter: Callable[[torch.autocast], torch.autocast] = torch.autocast.__enter__

    def entered(autocast: torch.autocast) -> torch.autocast:
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

    with contextlib.ExitStack() as stack:
        replace(stack, torch.autocast, "__enter__", entered)
        yield


class _DrawnInFloat32(TorchDispatchMode):
    """Within it, 16-bit random numbers are drawn in float32 and rounded.

    The same seed gives other numbers in float16: dropout on a GPU would drop other elements than in
    the reference, and the two could not be compared.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of PyTorch

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        given = args, kwargs or {}
        dtypes = [getattr(each, "dtype", each) for each in tree_leaves(given)]
        narrow = [each for each in dtypes if each in _NARROW]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not (is_random and narrow) or any(part in func.__name__ for part in _WHOLE_LAYERS):
            return func(*given[0], **given[1])

        def wide(value: object) -> object:
            is_dtype = isinstance(value, torch.dtype) and value in _NARROW
            return torch.float32 if is_dtype else _widened(value)

        def rounded(value: object) -> object:
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                return value.to(narrow[-1])
            return value

        wider = tree_map(wide, given)
        drawn = func(*wider[0], **wider[1])
        return args[0].copy_(drawn) if func._schema.is_mutable else tree_map(rounded, drawn)


def _wide_copy(model: Module) -> Module:
    """A copy of a model in float32 at least."""
    wide = copy.deepcopy(model)
    for tensor in (*wide.parameters(), *wide.buffers()):
        tensor.data = _widened(tensor.data)
    return wide


def _is_narrow(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4


def _widened(value: T) -> T | Tensor:
    return value.float() if _is_narrow(value) else value


def _on_host(gradient: Tensor | None) -> NDArray[numpy.float32] | None:
    """A gradient as a NumPy array of float32; of a sparse gradient, the rows that it has."""
    return None if gradient is None else widened(*real_parts(gradient)).cpu().numpy()


def _plain(path: str) -> str:
    """The name of a parameter in the uncompiled model."""
    return path.replace("_orig_mod.", "")
