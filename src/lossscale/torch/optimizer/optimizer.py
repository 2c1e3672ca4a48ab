"""The loss scale optimizer for PyTorch: what it is made of, and what can be read from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from lossscale import registry
from lossscale.arguments import rule_from_arguments
from lossscale.checks import checked_above_zero
from lossscale.common.checks import check_not_wrapped, remember_wrapper
from lossscale.errors import AlreadyWrappedError, ArgumentError, ArgumentTypeError, UnsupportedError
from lossscale.optimizer import LossScaleOptimizer, public
from lossscale.torch.layout import Layout
from lossscale.torch.optimizer import handing
from lossscale.torch.optimizer.judging import is_ordinary
from lossscale.torch.optimizer.marks import Marks
from lossscale.torch.optimizer.saving import Saving
from lossscale.torch.optimizer.scales import Counts, DeviceScales, HostScales
from lossscale.torch.optimizer.settings import InnerSettings
from lossscale.torch.optimizer.verbs import Verbs


@public("lossscale.torch", "LossScaleOptimizer")
class TorchLossScaleOptimizer(
    InnerSettings,
    Verbs,
    Saving,
    LossScaleOptimizer,
    torch.optim.Optimizer,
):
    """A PyTorch optimizer around another one, which trains in float16 with a loss scale.

    It is a `torch.optim.Optimizer`, with the parameter groups, the state and the hooks of the one
    inside. `step` divides the gradients, looks at them, applies them or skips the step, and moves
    the loss scale.

    Args:
        inner_optimizer: The `torch.optim.Optimizer` to wrap, an instance.
        dynamic: Whether the scale moves by itself. If False, `initial_scale` is the fixed scale
            and, unless a rule says otherwise, gradients are not checked.
        initial_scale: The first (or the fixed) loss scale, a dimensionless number from 2**-126
            to 2**126. None stands for 2**15.
        dynamic_growth_steps: How many finite steps in a row double the scale, in steps. None
            stands for 2000.
        rule: A `DynamicScale`, a `FixedScale` or a rule of your own, instead of the three
            arguments above.
        clip_norm: The largest 2-norm of all unscaled gradients together; larger ones are scaled
            down to it, as by `torch.nn.utils.clip_grad_norm_`. None for no clipping.
        process_group: A `torch.distributed.ProcessGroup`, or a list of them, whose processes skip
            a step together. None derives the groups from parameters that are DTensors; with
            `DistributedDataParallel` none is needed.
        decide: "host" or "device". On the host the verdict is waited for, so that a step that is
            skipped is not made, and nobody is told otherwise. On the device nothing is waited for:
            a fused optimizer is handed the verdict and skips by itself.
        name: The optimizer's name.

    Raises:
        TypeError: If `inner_optimizer` is no optimizer or already has loss scaling, `dynamic`
            is not a bool, or `rule` is no rule.
        ValueError: If a value cannot be used.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> inner = torch.optim.AdamW(model.parameters(), fused=True)
        >>> optimizer = lossscale.torch.LossScaleOptimizer(inner)
        >>> with torch.autocast("cpu", torch.float16):
        ...     loss = model(torch.ones(2, 3)).float().mean()
        >>> optimizer.scale_loss(loss).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> optimizer.loss_scale, optimizer.steps_skipped
        (tensor(32768.), 0)

    Source: `tf.keras.mixed_precision.LossScaleOptimizer`, TensorFlow 2.4 to 2.15, and
    `torch.amp.GradScaler`.
    """

    _framework: ClassVar[str | None] = "torch"

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: Any = True,
        initial_scale: Any = None,
        dynamic_growth_steps: Any = None,
        *,
        rule: Any = None,
        clip_norm: float | None = None,
        process_group: Any = None,
        decide: str = "host",
        name: str | None = None,
    ) -> None:
        # `Optimizer.__init__` is not called: groups, state and hooks are those of the one inside.
        rule = rule_from_arguments(dynamic, initial_scale, dynamic_growth_steps, rule)
        _check_inner(inner_optimizer)
        clip_norm = _checked_clip_norm(clip_norm, process_group)
        _check_decide(decide, inner_optimizer)
        layout = Layout(inner_optimizer.param_groups, process_group)
        self.inner_optimizer = inner_optimizer
        self.name = name or "loss_scale_optimizer"
        self._rule = rule
        self._clip_norm = clip_norm
        self._process_group = process_group
        self._layout = layout
        self._marks = Marks()
        self._scales = (DeviceScales if decide == "device" else HostScales)(rule, layout.devices)
        self._is_ordinary = is_ordinary(inner_optimizer, rule, self._scales, clip_norm)
        remember_wrapper(inner_optimizer, self)

    def __repr__(self) -> str:
        inner = type(self.inner_optimizer).__name__
        return f"<LossScaleOptimizer {self.name!r} around {inner}, {self._rule}>"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the gradients of the scaled loss, or skips the step; then moves the loss scale.

        Gradients that `unscale_` has divided are applied as they are. So are those of a loss that
        nobody scaled; then the loss scale does not move. A step without any gradient is no step.

        Args:
            closure: A callable that evaluates the model, calls `scale_loss(loss).backward()` and
                returns the loss, which is not scaled. LBFGS evaluates it several times; where the
                gradients overflow, once more at a lower scale.

        Returns:
            What the step of the optimizer inside returns, or the loss of the closure.

        Raises:
            GradientsError: If a gradient is of float16, like its parameter. It is a `ValueError`.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = lossscale.torch.LossScaleOptimizer(torch.optim.SGD([weight], lr=0.5))
            >>> optimizer.scale_loss(weight.sum()).backward()
            >>> optimizer.step()
            >>> weight.detach()
            tensor([0.5000, 0.5000])
        """
        # Compiled, it would be compiled anew for each number that it reads. The decorator alone
        # would do, and would take its time in every step that is not compiled.
        if torch.compiler.is_compiling():
            return self._step_uncompiled(closure)
        return self._take_step() if closure is None else self._step_with(closure)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step_uncompiled(self, closure: Callable[[], Any] | None) -> Any:
        return self._take_step() if closure is None else self._step_with(closure)

    # PyTorch's own wrapper around a `step` would call global hooks for the one inside and for
    # this one.
    step.hooked = True  # type: ignore[attr-defined]

    # --- What can be read ---------------------------------------------------------------------

    @property
    def loss_scale(self) -> Any:
        return self._scales.tensor

    @property
    def dynamic_counter(self) -> Any:
        if not self._rule.moves:
            return None
        return _own(getattr(self._scales.state, "good_steps", None))

    @property
    def steps_skipped(self) -> Any:
        return _own(self._scales.counts.steps_skipped)

    @property
    def last_step_skipped(self) -> Any:
        return _own(self._scales.counts.last_step_skipped)

    @property
    def iterations(self) -> Any:
        return _own(self._scales.counts.iterations)

    @iterations.setter
    def iterations(self, value: Any) -> None:
        scales = self._scales
        values = scales.values()
        state = type(scales.first)(*(values[field] for field in scales.first._fields))
        counts = [values[name] for name in Counts._fields]
        scales.restore(state, Counts(int(value), *counts[1:]))

    @property
    def clip_norm(self) -> float | None:
        """The largest 2-norm of the unscaled gradients; None for no clipping. It can be set."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        checked = _checked_clip_norm(value, self._process_group)
        inner, rule, scales = self.inner_optimizer, self._rule, self._scales
        self._clip_norm = checked
        self._is_ordinary = is_ordinary(inner, rule, scales, checked)
        self._marks.clips = self._marks.clips and checked is not None

    @property
    def process_group(self) -> Any:
        """The process group that was given, or None."""
        return self._process_group

    @property
    def decide(self) -> str:
        """Who decides on a step, "host" or "device"."""
        return "device" if isinstance(self._scales, DeviceScales) else "host"

    @property
    def variables(self) -> Any:
        # `hasattr` is answered, where the error of a member that is not offered would not be.
        raise AttributeError

    weights = variables

    # --- Making it again ----------------------------------------------------------------------

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        raise UnsupportedError(
            "Optimizers of PyTorch have no configuration. Save `state_dict()`, and load it into an "
            "optimizer that is made as this one was."
        )

    @staticmethod
    def _register(combined: type[Any], written: type[Any]) -> None:
        """Files name no optimizers here."""

    def __reduce__(self) -> Any:
        cls = type(self)
        # A class that was combined with this one is not to be found by its name.
        written = cls.__mro__[1] if vars(cls).get("_is_combined") else cls
        return _blank, (written,), self.__getstate__()


def _blank(cls: type[Any]) -> Any:
    """Returns an optimizer of a class that still has to be given its state."""
    if cls._framework is None:
        cls = registry.combined(cls, TorchLossScaleOptimizer)
    return object.__new__(cls)


def _own(value: Any) -> Any:
    """A number, or a tensor that is nobody else's."""
    return value.clone() if torch.is_tensor(value) else value


def _check_inner(inner: Any) -> None:
    if isinstance(inner, LossScaleOptimizer):
        raise AlreadyWrappedError(
            "The optimizer to wrap is a LossScaleOptimizer itself; the gradients would be "
            f"divided twice. Wrap the optimizer inside it. Received: {inner!r}."
        )
    if not isinstance(inner, torch.optim.Optimizer):
        raise ArgumentTypeError(registry.not_an_optimizer(inner))
    check_not_wrapped(inner)
    handing.check_signature(inner)


def _checked_clip_norm(value: Any, process_group: Any) -> float | None:
    if value is None:
        return None
    if process_group is not None:
        raise UnsupportedError(
            "`clip_norm` with `process_group`: which processes hold the same parameters is not "
            "known. Leave `clip_norm` out, and clip between unscale_() and step()."
        )
    return checked_above_zero("clip_norm", value)


def _check_decide(decide: Any, inner: Any) -> None:
    if decide not in ("host", "device"):
        raise ArgumentError(f"`decide` must be 'host' or 'device'. Received: decide={decide!r}.")
    if decide == "device" and not handing.takes_scaling(inner):
        fused = ", ".join(cls.__name__ for cls in handing.FUSED)
        raise ArgumentError(
            "decide='device' needs an optimizer that can skip a step by itself: one of "
            f"torch.optim's {fused} with fused=True. Received: {type(inner).__name__}. Make it "
            "with fused=True, or leave `decide` out."
        )
