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
from torch.utils.hooks import RemovableHandle

from lossscale.checks import checked_parameters, checked_scale
from lossscale.errors import ArgumentTypeError, first_line
from lossscale.monitoring.explanation import Explanation, Facts, GradientCounts, explained
from lossscale.monitoring.origins import UnrepeatableError, Watched, explain_pass
from lossscale.torch.buffers import Hook, innermost
from lossscale.torch.isolation import Known, copied, isolated, random_states, set_random_states
from lossscale.torch.ranks import is_spread
from lossscale.torch.scaling import scaled
from lossscale.torch.watch import Watch, is_finite, largest, tensors_in

DEFAULT_BYTES = 2**28
"""The limit for what is held of a step."""
_STATE_BYTES = 2**15
"""About the size of the random state that is held for each call of the model."""
_VERSION = operator.attrgetter("_version")
_NOT_CALLED = (
    "the model that Monitor has was not called in this step as model(...), outside of compiled "
    "code, or no gradient reached what it returned. It must be what the loop calls"
)
"""A part of an explanation, which says at length what to check."""


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
    device = next((p.device.type for p in model.parameters()), "cpu")
    casts = needs_autocast(model)
    all_trained = (p for p in model.parameters() if p.requires_grad)
    try:
        _check_repeatable(model)
        trained = checked_parameters(parameters, all_trained)
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
            facts = examined(watch, [(output, torch.full_like(output, scale))], roots, scale)
            if facts.is_finite and not _depend([output], set(map(id, roots))):
                why = "the loss is finite, and no trained parameter has a gradient of it"
                facts = Facts(why_not=why)
    except UnrepeatableError as error:
        facts = Facts(why_not=str(error))
    return explained(facts)


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
        self._handles: list[RemovableHandle] = []
        for module in _called_ones(self._model):
            before = module.register_forward_pre_hook(Hook(self._called), with_kwargs=True)
            self._handles += before, module.register_forward_hook(Hook(self._returned))
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
                in_backward = torch._C._current_graph_task_id() != -1
                if in_backward and any(call.ids == other.ids for other in self._calls):
                    # A checkpoint repeats a call.
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
            returned = enumerate(tensors_in(output))
            outputs = {id(t): (_size(t), n, t) for n, t in returned if t.grad_fn is not None}
            # The small ones first: one may be the loss.
            for size, number, tensor in sorted(outputs.values(), key=operator.itemgetter(0)):
                # The gradient needs the same room.
                if self._has_room(2 * size):
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
        try:
            _check_repeatable(self._model)
            self._check_calls(is_broken)
            return self._worst(scale, set(map(id, parameters)), is_broken)
        except UnrepeatableError as error:
            return Facts(why_not=str(error))
        except KeyboardInterrupt:
            raise
        # A model may raise anything, and training has to continue.
        except BaseException as error:
            what = f"{type(error).__name__}: {first_line(error, 200)}"
            return Facts(why_not=f"the pass cannot be repeated ({what})")
        finally:
            torch.clear_autocast_cache()

    def _check_calls(self, is_broken: bool) -> None:
        if not any(is_broken or call.gradients for call in self._calls):
            self._check_room()
            raise UnrepeatableError(_NOT_CALLED)
        if self._weights != self._versions():
            raise UnrepeatableError(
                "another optimizer has changed the weights since the forward pass"
            )
        if any(call.versions != list(map(_VERSION, call.given)) for call in self._calls):
            raise UnrepeatableError("the arguments of the model were written to after its call")

    def _check_room(self, besides: str = "") -> None:
        if not self._has_room(0):
            raise UnrepeatableError(
                f"the calls of the model need more than explain_bytes={self._limit} of Monitor"
                f"{besides}"
            )

    def _worst(self, scale: float, trained: set[int], is_broken: bool) -> Facts:
        """Repeats the calls; the first that fails explains the step, or else the worst gradient."""
        worst, worst_rank = Facts(is_repeated=True), (False, 0, False)
        for number, call in enumerate(self._calls, start=1):
            if not (call.gradients or is_broken):
                continue
            facts = _repeated(self._model, call, scale, trained, is_broken)
            if facts.is_finite:
                continue
            facts = facts._replace(call=number, calls=self._made)
            if not facts.in_backward:
                return facts
            # What this call takes may have got NaN from it, as the state of a recurrence.
            from_here = facts.failed and any(t.grad_fn is not None for t in call.given)
            # How many halvings outputs in float16 need is not known.
            rank = not facts.is_scaled, facts.halvings or 0, not facts.failed
            if rank > worst_rank or (from_here and not worst.failed):
                worst, worst_rank = facts, rank
        if worst.is_finite:
            self._check_room(", and the others are finite")
        return worst


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
        self.ids = list(map(id, (module, *self.given)))
        self.versions = list(map(_VERSION, self.given))
        # Those of the host only if need be: it takes as long as the rest.
        self.random = random_states(of_host=draws)
        devices = {"cpu", *(t.device.type for t in self.given)}
        self.casting = [
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices
        ]
        self.outputs: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}

    def repeated(self, watch: Watch, known: Known) -> list[Tensor]:
        """Repeats its forward pass, and returns the tensors that it returns.

        Args:
            watch: Watches it.
            known: What is in place of the objects that it uses.
        """
        args, kwargs = copied((self.args, self.kwargs), known, "an argument")
        set_random_states(self.random)
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.casting:
                stack.enter_context(torch.autocast(device, dtype, enabled=enabled))
            torch.clear_autocast_cache()
            stack.enter_context(watch.forward())
            return list(tensors_in(self.module(*args, **kwargs)))


def _called_ones(model: Module) -> list[Module]:
    """The outermost modules in a model that can be called: itself, unless it has no `forward`."""
    owner = getattr(type(model).forward, "__module__", "")
    if owner.startswith(("torch.nn.modules.module", "lightning.", "pytorch_lightning.")):
        return [module for child in model.children() for module in _called_ones(child)]
    return [model]


def _size(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _keep(gradients: dict[int, Tensor], number: int, gradient: Tensor) -> None:
    """Keeps the gradient of an output; holds neither the output nor its graph."""
    # One of several outputs of an operation may get none, and a gradient within `vmap` is refused.
    with contextlib.suppress(Exception):
        before, gradient = gradients.get(number), gradient.detach()
        gradients[number] = gradient if before is None else before + gradient


def _check_repeatable(model: Module) -> None:
    names = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in names or any(map(is_spread, model.parameters())):
        raise UnrepeatableError(
            "the model is sharded, and its processes communicate in the forward pass"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UnrepeatableError(
            "a part of the model is a ScriptModule, whose operations have no modules"
        )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnrepeatableError("the step is captured in a CUDA graph")


# --- The repeated pass --------------------------------------------------------------------------


def _repeated(
    model: Module, call: _Call, scale: float, trained: set[int], is_broken: bool
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
        # It may have copies of the parameters in another precision.
        roots = [known[key] for key in of_optimizer or leaves]
        returned = call.repeated(watch, known)
        numbers = [number for number in call.outputs if number in call.gradients]
        pairs = [(returned[number], call.gradients[number]) for number in numbers]
        depends = _depend([output for output, _ in pairs], set(map(id, roots)))
        if not (depends or is_broken):
            return Facts()
        if any(_differ(returned[number], call.outputs[number]) for number in numbers):
            raise UnrepeatableError(
                "the model returns something else when the pass is repeated. It draws random "
                "numbers of its own, keeps a state, or has hooks that change results"
            )
        if is_broken:
            # Such as a penalty without gradients.
            origin = watch.origin(returned, masks=_has_nan(returned))
            if origin is not None or not depends:
                return explain_pass(lambda _: watch.evaluation.watched(returned, origin), scale)
        return _examined_backwards(watch, pairs, roots, scale)


def _examined_backwards(
    watch: Watch, pairs: Sequence[Pair], roots: Sequence[Tensor], scale: float
) -> Facts:
    """Returns what is not finite in outputs of a model, in their gradients, or behind them.

    Args:
        watch: Has watched the forward pass.
        pairs: The outputs, each with the sum of its gradients in the step.
        roots: The tensors to differentiate by.
        scale: The loss scale.
    """
    # Another output may have been computed from one, as a loss from the logits.
    edges = _edges(output for output, _ in pairs)
    last = [pair for pair in pairs if (pair[0].grad_fn, pair[0].output_nr) not in edges]
    earlier = [pair for pair in pairs if (pair[0].grad_fn, pair[0].output_nr) in edges]
    outputs = [output for output, _ in last]
    # A NaN of the program makes the loss NaN, and an infinity may be a mask.
    masks = _has_nan(outputs)
    of_outputs = None
    if not watch.origin(outputs, masks=masks) and not all(is_finite(g) for _, g in last):
        hidden = watch.evaluation.hidden_in(outputs)
        of_outputs = Facts(gradients=_counted(last), hidden=hidden, scale=scale, halvings=1)
        if not of_outputs.is_scaled:
            return of_outputs
        # At a lower scale they are finite, and something behind them may not be, at any scale.
        last = [(output, torch.nan_to_num(gradient)) for output, gradient in last]
    finite = [pair for pair in earlier if is_finite(pair[1])]
    facts = examined(watch, last, roots, scale, masks=masks, earlier=finite)
    if facts.is_finite and len(finite) < len(earlier):
        return Facts(gradients=_counted(earlier), scale=scale, halvings=1)
    never_finite = facts.in_backward and not facts.is_scaled
    return facts if of_outputs is None or never_finite else of_outputs


def examined(
    watch: Watch,
    pairs: Sequence[Pair],
    roots: Sequence[Tensor],
    scale: float,
    *,
    masks: bool = True,
    earlier: Sequence[Pair] = (),
    in_float32: Callable[[float], Watched] | None = None,
) -> Facts:
    """Returns what is not finite in outputs, or in their gradients.

    Args:
        watch: Has watched the forward pass.
        pairs: The outputs, each with its gradient.
        roots: The tensors to differentiate by.
        scale: The loss scale.
        masks: As for `Watch.origin`: a mask makes no loss infinite.
        earlier: What they were computed from, each with the sum of its gradients.
        in_float32: As for `explain_pass`.
    """
    outputs = [output for output, _ in pairs]
    differentiable = [pair for pair in (*pairs, *earlier) if pair[0].requires_grad]

    def watched(lower: float) -> Watched:
        origin = watch.origin(outputs, masks=masks)
        if origin is not None or not differentiable or not roots:
            return watch.evaluation.watched(outputs, origin)
        derived = [output for output, _ in differentiable]
        totals = [total * (lower / scale) for _, total in differentiable]
        watch.in_backward = True
        # Anomaly detection would raise what is to be explained.
        with contextlib.ExitStack() as stack, torch.autograd.set_detect_anomaly(False), watch:
            for output, total in zip(derived, totals, strict=True):
                # In place of the sum of it and of what comes from other outputs.
                stack.enter_context(output.register_hook(lambda _, total=total: total))
            watch.evaluation.first = None
            try:
                gradients = torch.autograd.grad(
                    derived, roots, totals, retain_graph=True, allow_unused=True
                )
            except Exception as error:
                return watch.evaluation.watched_until(error)
            first = watch.origin(g for g in gradients if g is not None)
            return watch.evaluation.watched(outputs, None, first)

    return explain_pass(watched, scale, in_float32)


def _has_nan(tensors: Iterable[Tensor]) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in tensors)


def _counted(pairs: Iterable[Pair]) -> GradientCounts:
    """The gradients that reach finite outputs and are not finite."""
    bad = [pair for pair in pairs if not is_finite(pair[1])]
    infs, nans = (sum(int(test(g).sum()) for _, g in bad) for test in (torch.isinf, torch.isnan))
    are_float16 = all(gradient.dtype == torch.float16 for _, gradient in bad)
    return GradientCounts(infs, nans, are_float16, max(largest(output) for output, _ in bad))


def _edges(tensors: Iterable[Tensor]) -> set[tuple[torch.autograd.graph.Node | None, int]]:
    """What tensors were computed from: the nodes of their graphs, and the numbers of outputs."""
    edges, nodes = set(), [t.grad_fn for t in tensors if t.grad_fn is not None]
    while nodes:
        for edge in nodes.pop().next_functions:
            if edge[0] is not None and edge not in edges:
                edges.add(edge)
                nodes.append(edge[0])
    return edges


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
