"""Explains a step: repeats its forward and backward pass, and finds what failed.

That is before gradients are applied, so the weights are those that the step had. References to the
inputs, to the random state and to the gradients of the outputs are enough to repeat it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import pickle
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_map

from lossscale.checks import checked_parameters, checked_scale
from lossscale.errors import ArgumentTypeError, first_line
from lossscale.monitoring.explanation import Explanation, Facts, GradientCounts, explained
from lossscale.monitoring.origins import UnrepeatableError, Watched, explain_pass
from lossscale.torch.buffers import Hook, innermost
from lossscale.torch.isolation import copied, isolated, random_states, set_random_states
from lossscale.torch.ranks import is_spread
from lossscale.torch.scaling import scaled
from lossscale.torch.watch import Watch, is_finite, largest, tensors_in

DEFAULT_BYTES = 2**28
"""The limit for what is held of a step."""
_STATE_BYTES = 2**15
"""About the size of the random state that is held for each call of the model."""
_VERSION = operator.attrgetter("_version")


def explain(
    model: Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    parameters: Iterable[Parameter] | None = None,
    scale: float = 2.0**15,
) -> Explanation:
    """Explains why a step on a batch would be skipped: the first operation that is not finite.

    Computes the loss and its gradients once, under `torch.autocast` to float16, and watches each
    operation. The model stays unchanged, as with `diagnose`; hooks on its modules do not run. A
    model in evaluation mode is put into training mode meanwhile.

    Args:
        model: The model. With `DistributedDataParallel`, pass `model.module`.
        loss_fn: Called with the model and the batch. Returns the unscaled loss, a tensor with one
            element. It needs no `autocast`.
        batch: One batch of any kind that `loss_fn` takes.
        parameters: The parameters that the optimizer of this loss trains, if not all.
        scale: The loss scale of the step.

    Returns:
        The explanation. Its cause is "unknown" if the forward and the backward pass are finite,
        unless an overflow that they hide, as that of the squares in a norm, makes the loss wrong.

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
    if why := _refusal(model):
        return explained(Facts(why_not=why))
    device = next((p.device.type for p in model.parameters()), "cpu")
    casts = needs_autocast(model)
    all_trained = (p for p in model.parameters() if p.requires_grad)
    trained = checked_parameters(parameters, all_trained)
    try:
        with torch.inference_mode(False), isolated(model, {"batch": batch}) as (watch, known):
            batch = copied(batch, known, "batch")
            if not model.training:
                model.train()
            with watch.forward():
                try:
                    with torch.autocast(device, torch.float16, enabled=casts):
                        loss = loss_fn(model, batch)
                except Exception as error:
                    raised = watch.evaluation.watched_until(error)
                    return explained(explain_pass(lambda _: raised, scale))
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    raise ArgumentTypeError(
                        f"`loss_fn` must return a tensor with one element. Received: {loss!r}."
                    )
                output = scaled(loss.reshape(()), 1.0)
            roots = [known[id(p)] for p in trained]
            found = examined(watch, [(output, torch.full_like(output, scale))], roots, scale)
            if found.is_finite and not _depend([output], set(map(id, roots))):
                why = "the loss is finite, and no trained parameter has a gradient of it"
                found = Facts(why_not=why)
    except UnrepeatableError as error:
        found = Facts(why_not=str(error))
    return explained(found)


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


Pair: TypeAlias = tuple[Tensor, Tensor]
"""A tensor, with its gradient."""


class CallRecorder:
    """Holds what is needed to repeat the calls of a model since the last step.

    Args:
        model: The model; with `DistributedDataParallel` and compiled models the module in it.
        limit: The most bytes of tensors that are held.
    """

    def __init__(self, model: Module, limit: int) -> None:
        self._model, self._limit = innermost(model), limit
        self._parameters = list(self._model.parameters())
        # Whether the last call drew from Python's or NumPy's generator.
        self._draws = True
        self._handles = [
            handle
            for each in _called_ones(self._model)
            for handle in (
                each.register_forward_pre_hook(Hook(self._called), with_kwargs=True),
                each.register_forward_hook(Hook(self._returned)),
            )
        ]
        self.reset()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self.reset()

    def reset(self) -> None:
        """Forgets the calls, whose step is over."""
        self._calls: list[_Call] = []
        self._now: _Call | None = None
        self._made = self._held = self._weights = 0

    # Neither may raise in a program that runs without it.
    def _called(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._now = None
        if torch.is_grad_enabled():
            self._made += 1
            with contextlib.suppress(Exception):
                call = _Call(model, args, kwargs, self._draws)
                if call.repeats(self._calls):
                    self._made -= 1
                elif self._has_room(_STATE_BYTES + sum(map(_size, call.given))):
                    self._now = call

    def _returned(self, model: Module, args: object, output: object) -> None:
        call, self._now = self._now, None
        if call is None:
            return
        # A forward pass may change weights, too, such as those that `max_norm` limits.
        self._weights = self._versions()
        self._calls.append(call)
        if self._draws:
            self._draws = pickle.dumps(call.random[2]) != pickle.dumps(random_states()[2])
        with contextlib.suppress(Exception):
            # A hook of a leaf, such as a parameter that is returned, would stay for later steps.
            found = enumerate(tensors_in(output))
            outputs = {id(t): (n, t) for n, t in found if t.grad_fn is not None}
            # The small ones first: one may be the loss.
            for number, tensor in sorted(outputs.values(), key=lambda each: _size(each[1])):
                # The gradient needs the same room.
                if self._has_room(2 * _size(tensor)):
                    call.outputs[number] = tensor.detach()
                    tensor.register_hook(functools.partial(_keep, call.gradients, number))

    def _has_room(self, size: int) -> bool:
        self._held += size
        return self._held <= self._limit

    def _versions(self) -> int:
        return sum(map(_VERSION, self._parameters))

    def explain(self, scale: float, parameters: Iterable[Tensor], is_broken: bool = False) -> Facts:
        """Repeats the step that is about to be applied or skipped, and returns what is not finite.

        Changes nothing that training depends on.

        Args:
            scale: The loss scale of the step.
            parameters: The parameters of the optimizer that has decided.
            is_broken: Whether the loss is not finite: outputs without gradients count then, too.
        """
        worst, found = (False, 0, False), Facts(is_repeated=True)
        try:
            if why := _refusal(self._model) or self._why_not(is_broken):
                return Facts(why_not=why)
            trained = set(map(id, parameters))
            for number, call in enumerate(self._calls, start=1):
                if not (call.gradients or is_broken):
                    continue
                one = _repeated(self._model, call, scale, trained, is_broken)
                if one.is_finite:
                    continue
                one = one._replace(call=number, calls=self._made)
                if not one.in_backward:
                    return one
                # What this call takes may have got NaN from it, as the state of a recurrence.
                from_here = one.failed and any(t.grad_fn is not None for t in call.given)
                # How many halvings outputs in float16 need is not known.
                rank = not one.is_scaled, one.halvings or 0, not one.failed
                if rank > worst or (from_here and not found.failed):
                    worst, found = rank, one
        except UnrepeatableError as error:
            return Facts(why_not=str(error))
        except KeyboardInterrupt:
            raise
        # A model may raise anything, and training has to continue.
        except BaseException as error:
            line = first_line(error, 200)
            why = f"the pass cannot be repeated ({type(error).__name__}: {line})"
            return Facts(why_not=why)
        finally:
            torch.clear_autocast_cache()
        if found.is_finite and not self._has_room(0):
            return Facts(why_not=f"{self._too_large()}, and the others are finite")
        return found

    def _too_large(self) -> str:
        return f"the calls of the model need more than explain_bytes={self._limit} of Monitor"

    def _why_not(self, is_broken: bool) -> str:
        if not any(is_broken or each.gradients for each in self._calls):
            if not self._has_room(0):
                return self._too_large()
            return (
                "the model that Monitor has was not called in this step as model(...), outside of "
                "compiled code, or no gradient reached what it returned. It must be what the loop "
                "calls"
            )
        if self._weights != self._versions():
            return "another optimizer has changed the weights since the forward pass"
        if any(each.versions != list(map(_VERSION, each.given)) for each in self._calls):
            return "the arguments of the model were written to after its call"
        return ""


class _Call:
    """A call of the model, or of a module in it."""

    def __init__(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], draws: bool
    ) -> None:
        self.module = module
        if not all(map(torch.is_tensor, (*args, *kwargs.values()))):
            # The program may change its containers.
            args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))
        self.args, self.kwargs = args, kwargs
        self.given = list(tensors_in((self.args, self.kwargs)))
        self.versions = list(map(_VERSION, self.given))
        # Those of the host only if need be: it takes as long as the rest.
        self.random = random_states(of_host=draws)
        devices = {"cpu", *(t.device.type for t in self.given)}
        self.casting = [
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices
        ]
        self.outputs: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}

    def repeats(self, calls: list[_Call]) -> bool:
        """Whether a checkpoint repeats one of the calls, in the backward pass."""
        if torch._C._current_graph_task_id() == -1:
            return False
        here = [self.module, *self.given]
        return any(list(map(id, here)) == list(map(id, [e.module, *e.given])) for e in calls)


def _called_ones(model: Module) -> list[Module]:
    """The outermost modules in a model that can be called: itself, unless it has no `forward`."""
    owner = getattr(type(model).forward, "__module__", "")
    if owner.startswith(("torch.nn.modules.module", "lightning.", "pytorch_lightning.")):
        return [each for child in model.children() for each in _called_ones(child)]
    return [model]


def _size(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _keep(gradients: dict[int, Tensor], number: int, gradient: Tensor) -> None:
    """Keeps the gradient of an output; holds neither the output nor its graph."""
    # One of several outputs of an operation may get none, and a gradient within `vmap` is refused.
    with contextlib.suppress(Exception):
        before, gradient = gradients.get(number), gradient.detach()
        gradients[number] = gradient if before is None else before + gradient


def _refusal(model: Module) -> str:
    """Returns why a model cannot be repeated; "" if it can be tried."""
    names = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in names or any(map(is_spread, model.parameters())):
        return "the model is sharded, and its processes communicate in the forward pass"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "a part of the model is a ScriptModule, whose operations have no modules"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "the step is captured in a CUDA graph"
    return ""


# --- The repeated pass --------------------------------------------------------------------------


def _repeated(
    model: Module, call: _Call, scale: float, trained: set[int], is_broken: bool = False
) -> Facts:
    """Repeats a call, and returns what is not finite in it.

    Args:
        model: The model.
        call: The call, of which an output has got a gradient.
        scale: The loss scale.
        trained: The ids of the parameters of the optimizer.
        is_broken: As for `CallRecorder.explain`.
    """
    leaves = {id(t): t for t in (*model.parameters(), *call.given) if t.requires_grad}
    of_optimizer = [key for key, leaf in leaves.items() if _depend([leaf], trained)]
    with isolated(model, _named(call.module, call.args, call.kwargs)) as (watch, known):
        args, kwargs = copied((call.args, call.kwargs), known, "an argument")
        # It may have copies of the parameters in another precision.
        roots = [known[key] for key in of_optimizer or leaves]
        set_random_states(call.random)
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in call.casting:
                stack.enter_context(torch.autocast(device, dtype, enabled=enabled))
            torch.clear_autocast_cache()
            stack.enter_context(watch.forward())
            returned = list(tensors_in(call.module(*args, **kwargs)))
        pairs = {n: (returned[n], call.gradients[n]) for n in call.outputs if n in call.gradients}
        depends = _depend([output for output, _ in pairs.values()], set(map(id, roots)))
        if not (depends or is_broken):
            return Facts()
        # Those that another output was computed from, such as the logits of a loss.
        edges = _edges(output for output, _ in pairs.values())
        inner: list[Pair] = []
        outer: list[Pair] = []
        for pair in pairs.values():
            is_inner = (pair[0].grad_fn, pair[0].output_nr) in edges
            (inner if is_inner else outer).append(pair)
        # A NaN of the program makes the loss NaN, and an infinity may be a mask.
        outputs = [output for output, _ in outer]
        masks = any(bool(output.isnan().any()) for output in outputs)
        origin = watch.origin(outputs, masks=masks)
        if any(_differ(returned[n], call.outputs[n]) for n in pairs):
            raise UnrepeatableError(
                "the model returns something else when the pass is repeated. It draws random "
                "numbers of its own, keeps a state, or has hooks that change results"
            )
        if is_broken:
            # Such as a penalty without gradients.
            masks = any(bool(each.isnan().any()) for each in returned)
            if (origin := watch.origin(returned, masks=masks)) or not depends:
                return explain_pass(lambda _: watch.evaluation.watched(returned, origin), scale)
        of_outputs = None
        if origin is None and not all(is_finite(gradient) for _, gradient in outer):
            counts, hidden = _counted(outer), watch.evaluation.hidden_in(outputs)
            of_outputs = Facts(gradients=counts, hidden=hidden, scale=scale, halvings=1)
            if not of_outputs.is_scaled:
                return of_outputs
            # At a lower scale they are finite, and something else may not be.
            outer = [(output, torch.nan_to_num(gradient)) for output, gradient in outer]
        finite = [pair for pair in inner if is_finite(pair[1])]
        found = examined(watch, outer, roots, scale, masks=masks, inner=finite)
        if found.is_finite and len(finite) < len(inner):
            return Facts(gradients=_counted(inner), scale=scale, halvings=1)
        never_finite = found.in_backward and not found.is_scaled
        return found if of_outputs is None or never_finite else of_outputs


def examined(
    watch: Watch,
    outer: Sequence[Pair],
    roots: Sequence[Tensor],
    scale: float,
    *,
    masks: bool = True,
    inner: Sequence[Pair] = (),
    in_float32: Callable[[float], Watched] | None = None,
) -> Facts:
    """Returns what is not finite in outputs, or in their gradients.

    Args:
        watch: Has watched the forward pass.
        outer: The outputs, each with its gradient.
        roots: The tensors to differentiate by.
        scale: The loss scale.
        masks: As for `Watch.origin`: a mask makes no loss infinite.
        inner: What they were computed from, each with the sum of its gradients.
        in_float32: As for `explain_pass`.
    """
    outputs = [output for output, _ in outer]
    pairs = [pair for pair in (*outer, *inner) if pair[0].requires_grad]

    def watched(lower: float) -> Watched:
        origin = watch.origin(outputs, masks=masks)
        if origin is not None or not pairs or not roots:
            return watch.evaluation.watched(outputs, origin)
        derived, by = zip(*((out, total * (lower / scale)) for out, total in pairs), strict=True)
        watch.in_backward = True
        with contextlib.ExitStack() as stack:
            for out, total in zip(derived, by, strict=True):
                # In place of the sum of it and of what comes from other outputs.
                stack.enter_context(out.register_hook(lambda _, total=total: total))
            # It would raise what is to be explained.
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            stack.enter_context(watch)
            watch.evaluation.first = None
            try:
                found = torch.autograd.grad(
                    derived, roots, by, retain_graph=True, allow_unused=True
                )
            except Exception as error:
                return watch.evaluation.watched_until(error)
            first = watch.origin(g for g in found if g is not None)
            return watch.evaluation.watched(outputs, None, first)

    return explain_pass(watched, scale, in_float32)


def _counted(pairs: Iterable[Pair]) -> GradientCounts:
    """The gradients that reach finite outputs and are not finite."""
    bad = [pair for pair in pairs if not is_finite(pair[1])]
    infs, nans = (sum(int(test(g).sum()) for _, g in bad) for test in (torch.isinf, torch.isnan))
    are_float16 = all(gradient.dtype == torch.float16 for _, gradient in bad)
    return GradientCounts(infs, nans, are_float16, max(largest(output) for output, _ in bad))


def _edges(tensors: Iterable[Tensor]) -> set[tuple[torch.autograd.graph.Node | None, int]]:
    """What tensors were computed from: the nodes of their graphs, and the numbers of outputs."""
    found, left = set(), [t.grad_fn for t in tensors if t.grad_fn is not None]
    while left:
        for edge in left.pop().next_functions:
            if edge[0] is not None and edge not in found:
                found.add(edge)
                left.append(edge[0])
    return found


def _depend(tensors: Sequence[Tensor], leaves: set[int]) -> bool:
    """Whether one of some tensors is one of some leaves, or was computed from one."""
    used = (getattr(node, "variable", None) for node, _ in _edges(tensors))
    return any(id(leaf) in leaves for leaf in (*tensors, *used))


def _named(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    try:
        return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{str(n): value for n, value in enumerate(args)}, **kwargs}


def _differ(now: Tensor, before: Tensor) -> bool:
    """Whether an output is not what it was in training."""
    # A spectral norm has made a step since, so that the numbers differ a little.
    is_alike = now.shape == before.shape and now.dtype == before.dtype
    return not is_alike or is_finite(now) != is_finite(before)
