"""Explains a pass: computes it once more, watches each operation, and finds what failed.

`as_it_was` restores the model after it, and after the passes of `diagnose`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import reprlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.checkpoint import CheckpointFunction

from lossscale.checks import checked_parameters, checked_scale
from lossscale.common.random_states import kept_random_states
from lossscale.common.replaced_names import replace
from lossscale.errors import ArgumentTypeError
from lossscale.explain.origins import UnrepeatableError, Watched, explain_pass, not_compared
from lossscale.explain.text import Cause, Explanation, not_explained
from lossscale.explain.torch_watch import Watch, named_tensors
from lossscale.torch.backward import leaves_of
from lossscale.torch.ranks import has_others, is_spread
from lossscale.torch.scaling import scaled


def explain(
    model: Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    parameters: Iterable[Parameter] | None = None,
    scale: float = 2.0**15,
) -> Explanation:
    """Explains why a step on a batch would be skipped: the first operation that is not finite.

    Call it right after a skipped step, which changed no weight. It computes the loss and its
    gradients once, under `torch.autocast` to float16, and watches each operation. The model stays
    unchanged, as with `diagnose`: parameters, buffers, `.grad`, training flags, and the states of
    random numbers. Hooks on its modules do not run, and compiled models run uncompiled. A model in
    evaluation mode is put into training mode meanwhile.

    Args:
        model: The model. With `DistributedDataParallel`, pass `model.module`.
        loss_fn: Called with the model and a copy of the batch. Returns the unscaled loss, a tensor
            with one element. It needs no `autocast`. It must be repeatable: objects of Python, and
            tensors outside of the model, keep what it writes to them. It must not wait for a thread
            or another process.
        batch: One batch of any kind that `loss_fn` takes.
        parameters: The parameters that the optimizer of this loss trains, if not all.
        scale: The loss scale of the step.

    Returns:
        The explanation. Its cause is "unknown" if the pass is finite, also if an overflow in it is
        made finite by a later operation, which the text names; or if the pass cannot be watched,
        as that of a sharded or scripted model.

    Raises:
        ArgumentTypeError: If the model or the loss have another type.
        ArgumentError: If `scale` is not a number in [2**-126, 2**126], or none of `parameters` is a
            trained parameter of the model.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, batch):
        ...     return (model(batch) * 0.0).sum().sqrt()
        >>> found = explain(model, loss_fn, torch.ones(2, 3))
        >>> str(found.cause), found.operation
        ('singular', 'backward of sqrt')
    """
    check_model_and_loss(model, loss_fn)
    scale = checked_scale("scale", scale)
    all_trained = (p for p in model.parameters() if p.requires_grad)
    trained = checked_parameters(parameters, all_trained)
    if why_not := _why_not(model):
        return not_explained(why_not)
    device = next((p.device.type for p in model.parameters()), "cpu")
    outputs: list[Tensor] = []

    def computed() -> Tensor:
        with torch.autocast(device, torch.float16, enabled=needs_autocast(model)):
            loss = loss_fn(model, given)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentTypeError(
                f"`loss_fn` must return a tensor with one element. Received: {loss!r}."
            )
        outputs.append(scaled(loss.reshape(()), 1.0))
        return outputs[0]

    try:
        with torch.inference_mode(False), as_it_was(model), _watching(model) as watch:
            given = copy.deepcopy(batch)
            watch.mark(named_tensors({"batch": given}))
            found = examined(watch, computed, trained, scale)
    except UnrepeatableError as error:
        return not_explained(str(error))
    leaves = leaves_of(outputs[0])[0] if found.cause is Cause.UNKNOWN else trained
    if set(map(id, leaves)).isdisjoint(map(id, trained)):
        return not_explained("the loss is finite, and no trained parameter has a gradient of it")
    return found


@contextlib.contextmanager
def _watching(model: Module) -> Iterator[Watch]:
    """Within it, the user's hooks on modules do not run; `as_it_was` puts them back."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    watch, registered = Watch(model), set(map(id, tensors.values()))
    for path, module in model.named_modules():
        for name, tensor in named_tensors(vars(module), path):
            if id(tensor) not in registered:
                tensors[name] = tensor
        for name, value in list(vars(module).items()):
            if name.endswith("_hooks") and isinstance(value, OrderedDict):
                vars(module)[name] = OrderedDict(h for h in value.items() if _is_torchs(h[1]))
    watch.mark(tensors.items(), is_weight=True)
    with warnings.catch_warnings(action="ignore"):
        yield watch


def _is_torchs(hook: object) -> bool:
    """Whether a hook is a part of the model, such as that of a spectral norm."""
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def needs_autocast(model: Module) -> bool:
    """Whether a model computes in float16 under autocast only; some of its parameters may be."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return dtypes != {torch.float16}


def check_model_and_loss(model: object, loss_fn: object) -> None:
    """Checks that they are a model and a function."""
    if not isinstance(model, Module):
        raise ArgumentTypeError(
            "The model must be a torch.nn.Module. "
            f"Received: {reprlib.repr(model)} of type {type(model).__name__}."
        )
    if not callable(loss_fn):
        raise ArgumentTypeError(
            "`loss_fn` must be a function of the model and a batch that returns the loss. "
            f"Received: {reprlib.repr(loss_fn)} of type {type(loss_fn).__name__}."
        )


def _why_not(model: Module) -> str:
    """Why a pass of a model cannot be watched; "" if it can."""
    names = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in names or any(map(is_spread, model.parameters())):
        return "the model is sharded, and its processes communicate in the forward pass"
    if "SyncBatchNorm" in names and has_others():
        return "the model has a SyncBatchNorm, whose processes communicate in the forward pass"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "a part of the model is a ScriptModule, whose operations have no modules"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the step is captured in a CUDA graph"
    return ""


def examined(
    watch: Watch,
    compute: Callable[[], Tensor],
    roots: Sequence[Tensor],
    scale: float,
    in_float32: Callable[[float], Watched] = not_compared,
) -> Explanation:
    """Explains why a loss or its gradients are not finite.

    Args:
        watch: Knows what the pass is given.
        compute: Computes the unscaled loss.
        roots: The tensors to differentiate by.
        scale: The loss scale.
        in_float32: As for `explain_pass`.
    """
    evaluation = watch.evaluation
    computed = functools.cache(lambda: watch.forward(compute))

    def watched(lower: float) -> Watched:
        output = computed()
        origin = watch.origin([output], masks=True)
        if origin is not None or not output.requires_grad or not roots:
            return evaluation.watched(origin)
        watch.in_backward, evaluation.first = True, None
        # Anomaly detection would raise what is to be explained.
        with torch.autograd.set_detect_anomaly(False), watch:
            gradients = torch.autograd.grad(
                output, roots, output.new_tensor(lower), retain_graph=True, allow_unused=True
            )
        return evaluation.watched(None, watch.origin(g for g in gradients if g is not None))

    return explain_pass(lambda s: evaluation.until_error(lambda: watched(s)), scale, in_float32)


# --- The model as it was -------------------------------------------------------------------------


@contextlib.contextmanager
def as_it_was(model: Module) -> Iterator[None]:
    """Within it, a model trains uncompiled, with the same random numbers each time.

    After it, the model is unchanged, `.grad` included. Parameters are restored as well:
    `torch.nn.Embedding(max_norm=...)` writes to its own in the forward pass.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    dense = [g for _, g in gradients if g is not None and g.layout == torch.strided]
    written = *model.parameters(), *model.buffers(), *dense
    tensors = [(t, t.detach().clone()) for t in written]
    # A pass changes only the mode of scripted modules, whose other attributes are in C++.
    modes = [(module, module.training) for module in model.modules()]
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    entries = [
        (now, dict(now))
        for m in modules
        for now in (vars(m), m._parameters, m._buffers, m._modules)
    ]
    devices = {tensor.device for tensor, _ in tensors if tensor.device.type != "cpu"}
    try:
        with (
            kept_random_states(),
            torch.random.fork_rng(
                sorted({device.index or 0 for device in devices}),
                device_type=next((device.type for device in devices), "cuda"),
            ),
            _eager_passes(model),
        ):
            if not model.training:
                model.train()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for now, before in entries:
            now.clear()
            now.update(before)
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in tensors:
                # Write only what changed: a write spoils graphs that hold the parameter. Version
                # numbers do not help, because a batch normalization updates its statistics without
                # them.
                if not torch.equal(_bits(tensor), _bits(value)):
                    tensor.copy_(value)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def _eager_passes(model: Module) -> Iterator[None]:
    """Within it, a model runs uncompiled, and its passes can be differentiated.

    Compiled modules call no hooks. The caller restores the attributes of the modules.
    """
    # Tensors of inference mode cannot be differentiated.
    with contextlib.ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        # Reentrant checkpointing would call `backward` within the backward pass, which
        # `torch.autograd.grad` refuses. The gradients are the same without it.
        called = staticmethod(lambda function, preserve, *args: function(*args))
        replace(stack, CheckpointFunction, "apply", called)
        stance = getattr(torch.compiler, "set_stance", None)
        if stance is not None:
            stack.enter_context(stance("force_eager"))
        else:
            # PyTorch 2.4 and 2.5.
            for module in model.modules():
                vars(module)["_compiled_call_impl"] = None
                if "_orig_mod" in module._modules:
                    vars(module)["forward"] = module._modules["_orig_mod"]
        yield
