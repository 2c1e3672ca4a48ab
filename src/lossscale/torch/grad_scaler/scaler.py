"""`GradScaler`: a drop-in for PyTorch's, without its defects."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from lossscale.checks import checked_truth
from lossscale.errors import (
    CallOrderError,
    GradientsError,
    LossScaleWarning,
    ScalerArgumentError,
    UnsupportedError,
)
from lossscale.rules import Needs, ScaleRule, Seen
from lossscale.torch.grad_scaler import steps as scaler_steps
from lossscale.torch.grad_scaler.arguments import (
    DEFAULTS,
    new_scale_of,
    rule_of_a_scaler,
)
from lossscale.torch.grad_scaler.outputs import first_tensor, held, scaled_nest
from lossscale.torch.grad_scaler.scale import shown
from lossscale.torch.grad_scaler.skips import SkipsOfScaler
from lossscale.torch.gradient_stats import seen_by_all, together, with_verdict
from lossscale.torch.gradients import Gradients, gradients_of, look_and_multiply_
from lossscale.torch.layout import Layout
from lossscale.torch.optimizer.handing import is_dummy_step
from lossscale.torch.overflow_check import all_finite
from lossscale.torch.ranks import agreed, groups_of

_READY, _UNSCALED, _STEPPED = OptState.READY, OptState.UNSCALED, OptState.STEPPED


class GradScaler(SkipsOfScaler):
    """`torch.amp.GradScaler`, mended: the same calls, the same numbers, the same files.

    ```
    scaler.scale(loss).backward()
    scaler.step(optimizer)      # unscales, looks, applies or skips
    scaler.update()             # moves the scale
    ```

    The scale and its reciprocal always are normal float32 numbers, so no sequence of overflows
    destroys the parameters. Whether a step is applied is known before the optimizer is called, for
    fused optimizers too; a skipped step does not call it.

    Args:
        device: The type of device, such as "cuda" or "cpu".
        init_scale: The first loss scale, dimensionless.
        growth_factor: What the scale is multiplied by after `growth_interval` finite steps in a
            row, dimensionless, above 1.
        backoff_factor: What it is multiplied by after a non-finite gradient, dimensionless,
            between 0 and 1.
        growth_interval: In steps, from 1 up.
        enabled: With False, `scale` and `step` pass through and nothing else does anything. With
            "cuda" where there is no CUDA it is False by itself, with a warning.
        rule: A rule of this library instead of these numbers, such as `FixedScale(128)`.
        min_scale: The lowest loss scale, dimensionless; None stands for 2**-126.
        max_scale: The highest, dimensionless; None stands for 2**126.
        process_group: A process group, or a list of them, whose processes have to agree on each
            step. None derives them from the parameters: those of every mesh dimension that a
            DTensor is sharded over, and none otherwise.

    Raises:
        ScalerArgumentError: If a value cannot be used. It is a `ValueError` and an
            `AssertionError`.
        ArgumentTypeError: If `rule` or `process_group` is something else. It is a `TypeError`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=8.0)
        >>> for factor in (1.0, torch.inf):
        ...     optimizer.zero_grad()
        ...     scaler.scale(weight.sum() * factor).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     print(weight.tolist(), scaler.get_scale(), scaler.last_step_skipped)
        [0.5] 8.0 False
        [0.5] 4.0 True

    Source: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = DEFAULTS.initial_scale,
        growth_factor: float = DEFAULTS.growth_factor,
        backoff_factor: float = DEFAULTS.backoff_factor,
        growth_interval: int = DEFAULTS.growth_interval,
        enabled: bool = True,
        *,
        rule: ScaleRule | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        process_group: Any = None,
    ) -> None:
        if not isinstance(device, (str, torch.device)):
            raise ScalerArgumentError(
                '`device` must be the name of a type of device, such as "cuda" or "cpu". The first '
                "argument of torch.cuda.amp.GradScaler is `init_scale`; here that is the second. "
                f"Received: device={device!r}."
            )
        made = rule_of_a_scaler(
            rule,
            initial_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        enabled = checked_truth("enabled", enabled, ScalerArgumentError)
        groups_of((), process_group)
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn(
                "GradScaler is enabled for CUDA, but CUDA is not available. Disabling. To scale on "
                'the processor pass device="cpu".',
                LossScaleWarning,
                stacklevel=2,
            )
            enabled = False
        # Enabled, it would check the numbers by rules of its own.
        super().__init__(device, enabled=False)
        self._enabled = enabled
        self._process_group = process_group
        self._start(made)
        self._start_skips()
        self._per_optimizer_states: Any = defaultdict(_refresh_per_optimizer_state)
        self._scaled_since_update = False

    def scale(self, outputs: Any) -> Any:
        """Multiplies losses by the scale, in float32 or wider.

        Args:
            outputs: A tensor of any shape, or a nest of dictionaries, sequences, named tuples and
                other iterables of tensors.

        Returns:
            The same nest with scaled tensors; an iterator for an iterable that is no sequence.

        Raises:
            ScalerArgumentError: If there is something else in it. It is a `ValueError`.
        """
        if not self._enabled:
            return outputs
        outputs = held(outputs)
        if self._scale is None:
            first = first_tensor(outputs)
            if first is not None:
                self._lazy_init_scale_growth_tracker(first.device)
        self._scaled_since_update = True
        return scaled_nest(outputs, self._scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of an optimizer by the scale, in place, for example to clip them.

        Args:
            optimizer: Its next `step` then takes the gradients as they are.

        Raises:
            CallOrderError: If they are unscaled already, or nothing was scaled. It is a
                `RuntimeError` and an `AssertionError`.
            GradientsError: If a gradient is float16. It is a `ValueError`.
            TypeError: If it is no optimizer, or one that scales by itself.
        """
        if not self._enabled:
            return
        scaler_steps.check_optimizer(optimizer)
        self._check_scale_growth_tracker("unscale_()")
        entry = self._per_optimizer_states[id(optimizer)]
        if entry["stage"] is _UNSCALED:
            raise CallOrderError(
                "unscale_() was called twice on this optimizer since the last update(). Call it "
                "once for each step, after the last backward()."
            )
        if entry["stage"] is _STEPPED:
            raise CallOrderError(
                "unscale_() was called after step(). Call it before, or update() in between."
            )
        inverse = shown(1.0 / self.get_scale(), torch.float32, self._scale.device)
        found = shown(0.0, torch.float32, self._scale.device)
        unscaled = self._unscale_grads_(optimizer, inverse, found, False)
        entry["found_inf_per_device"] = unscaled
        # Of gradients that come later the scale is still to be taken off.
        if unscaled or any(p.grad is not None for p in scaler_steps.flat(optimizer.param_groups)):
            entry["stage"] = _UNSCALED

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
    ) -> dict[Any, Any]:
        layout, parameters = self._layout_of(optimizer)
        with torch.no_grad():
            given = gradients_of(parameters, layout.one_device, allow_float16=allow_fp16)
            self._measure(optimizer, given, layout)
            if not self._rule.checks_gradients:
                for group in given.groups:
                    torch._foreach_mul_(group, inv_scale.to(group[0].device))
                return {}
            on_host = inv_scale.device.type == "cpu"
            above_one = inv_scale.item() > 1 if on_host else self.get_scale() < 1
            by_device = _unscale_(given.groups, found_inf, inv_scale, look_again=above_one)
            groups = layout.ranks
            return self._agreed(found_inf, by_device, groups) if groups else by_device

    def _measure(self, optimizer: Any, given: Gradients, layout: Layout) -> None:
        """Keeps how large scaled gradients are until `update`, for a rule that has to see it."""
        needs = self._rule.needs
        if needs == Needs():
            return
        entry = self._per_optimizer_states[id(optimizer)]
        # Whoever asks again later, asks about gradients that are unscaled.
        if entry["stage"] is _READY:
            scale = shown(self.get_scale(), torch.float32, given.device)
            entry["sizes"] = seen_by_all(needs, given.given, layout, scale, are_scaled=True)

    def _layout_of(self, optimizer: Any) -> tuple[Layout, list[Any]]:
        """What is known of an optimizer's parameters, and the parameters."""
        layout = self._layouts.get(optimizer)
        parameters = None if layout is None else layout.parameters(optimizer.param_groups)
        if layout is None or parameters is None:
            layout = Layout(optimizer.param_groups, self._process_group)
            if isinstance(optimizer, torch.optim.Optimizer):
                self._layouts[optimizer] = layout
            parameters = layout.parameters(optimizer.param_groups)
        return layout, parameters or []

    def _agreed(self, found: Any, by_device: dict[Any, Any], groups: Any) -> dict[Any, Any]:
        """What all processes found, on all of their devices."""
        if by_device:
            for found_there in by_device.values():
                found = torch.maximum(found, found_there.to(found.device))
            return {found.device: agreed(found, groups)}
        # Nothing here to look at. If that is so everywhere, it is no step that counts.
        found = agreed(found - 1, groups)
        return {} if found.item() < 0 else {found.device: found}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales if that is still to be done, and calls `optimizer.step` if all is finite.

        A step without any gradient is applied and moves no scale.

        Args:
            optimizer: One optimizer; several may share the scaler, and each skips for itself.
            *args: Handed to `optimizer.step`.
            **kwargs: Handed to `optimizer.step`. No closure.

        Returns:
            What `optimizer.step` returns, or None if the step was skipped (`last_step_skipped`).

        Raises:
            CallOrderError: If it was called before since `update`, or nothing was scaled, or there
                is a closure. It is a `RuntimeError` and an `AssertionError`.
            GradientsError: If a gradient is float16. It is a `ValueError`.
            TypeError: If it is no optimizer, or one that scales by itself.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        scaler_steps.check_optimizer(optimizer)
        scaler_steps.refuse_closure(args, kwargs)
        entry = self._per_optimizer_states[id(optimizer)]
        if not self._scaled_since_update and is_dummy_step(optimizer):
            # It only makes the optimizer's state, before a checkpoint is loaded into it.
            entry["stage"] = _STEPPED
            return optimizer.step(*args, **kwargs)
        try:
            self._check_scale_growth_tracker("step()")
        except CallOrderError:
            del self._per_optimizer_states[id(optimizer)]
            raise
        if entry["stage"] is _STEPPED:
            raise CallOrderError(
                "step() was called twice on this optimizer since the last update(). Call update() "
                "once after the steps of all optimizers."
            )
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._step_of_its_own(optimizer, entry, args, kwargs)
        else:
            if entry["stage"] is _READY:
                self.unscale_(optimizer)
            result = self._maybe_opt_step(optimizer, entry, *args, **kwargs)
        entry["stage"] = _STEPPED
        return result

    def _step_of_its_own(
        self, optimizer: Any, entry: dict[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """A step of an optimizer that can unscale by itself."""
        if scaler_steps.takes_the_scaler(optimizer):
            warnings.warn(
                "The step of this optimizer has an argument `grad_scaler`, which is deprecated: it "
                "can read the attributes `grad_scale` and `found_inf` instead.",
                FutureWarning,
                stacklevel=3,
            )
            result = optimizer.step(*args, **kwargs, grad_scaler=self)
            found = entry["found_inf_per_device"].values()
            self._note(optimizer, entry, any(bool(number) for number in found))
            return result
        divisor = 1.0
        if entry["stage"] is _READY:
            try:
                self.unscale_(optimizer)
            except GradientsError:
                # It can divide float16 gradients on the way into the update, in float32.
                divisor = self.get_scale()
                self._look(optimizer, entry, divisor)
        if divisor == 1.0 and scaler_steps.needs_no_attributes(optimizer):
            return self._maybe_opt_step(optimizer, entry, *args, **kwargs)
        with scaler_steps.handed_over(optimizer, shown(divisor, torch.float32, self._scale.device)):
            return self._maybe_opt_step(optimizer, entry, *args, **kwargs)

    def _look(self, optimizer: Any, entry: dict[str, Any], scale: float) -> None:
        """Looks at gradients that stay as they are."""
        found = self._check_inf_per_device(optimizer)
        gradients = [p.grad for p in scaler_steps.flat(optimizer.param_groups)]
        if scale < 1 and found and not all_finite(gradients, scale):
            next(iter(found.values())).fill_(1)

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        found = optimizer_state["found_inf_per_device"].values()
        skipped = any(number.item() for number in found)
        self._note(optimizer, optimizer_state, skipped)
        return None if skipped else optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Moves the scale, once after the steps of all optimizers: down if any was not finite.

        Args:
            new_scale: Sets the scale to this instead, dimensionless: a number, or a tensor with
                one element.

        Raises:
            CallOrderError: If neither `step` nor `unscale_` was called since the last one. It is a
                `RuntimeError` and an `AssertionError`.
            ScalerArgumentError: If `new_scale` cannot be used. It is a `ValueError` and an
                `AssertionError`.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            number = new_scale_of(new_scale, self._rule)
            self._put(self._read()._replace(scale=number))
        elif not self._per_optimizer_states:
            raise CallOrderError(
                "update() was called without a step. Call scaler.step(optimizer) before it."
            )
        else:
            self._move_by(self._per_optimizer_states.values())
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._scaled_since_update = False

    def _move_by(self, entries: Collection[dict[str, Any]]) -> None:
        counts = False
        skipped = False
        for entry in entries:
            found = entry["found_inf_per_device"]
            counts = counts or bool(found) or not self._rule.checks_gradients
            # What a step has read is not waited for again.
            known = entry.get("skipped")
            skipped = skipped or (
                any(number.item() for number in found.values()) if known is None else known
            )
        # A step without gradients is neither a good nor a bad one.
        if counts:
            self._move(with_verdict(self._sizes(entries), not skipped))

    def _sizes(self, entries: Collection[dict[str, Any]]) -> Seen:
        """What the rule has to see besides the verdict, of the gradients of all optimizers."""
        if self._rule.needs == Needs():
            return Seen(None)
        measured = [entry["sizes"] for entry in entries if "sizes" in entry]
        if not measured:
            raise UnsupportedError(
                f"The rule {self._rule!r} has to see how large gradients are, and "
                f"{type(self).__name__} replaces `_unscale_grads_`, where that is measured. Call "
                "super()._unscale_grads_() there, or take another rule."
            )
        return together(measured)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise CallOrderError(
                "A GradScaler can be copied or pickled only between steps: before scale(), or "
                "after update()."
            )
        self._read()
        state = {**self.__dict__, "_scale": None, "_growth_tracker": None, "_left": None}
        state["_init_scale"], state["_init_growth_tracker"] = (
            self._number,
            self._get_growth_tracker(),
        )
        del state["_skipped"], state["_names"], state["_layouts"]
        state.pop("_watcher", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        made = type(self).__new__(type(self))
        # Process groups cannot be copied.
        memo[id(self._process_group)] = self._process_group
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


def _unscale_(groups: Any, found: Any, inverse: Any, *, look_again: bool) -> dict[Any, Any]:
    """Multiplies groups of tensors in place; returns what was found, by device.

    PyTorch's kernel looks at a number before it multiplies it. A factor above 1 can make it
    infinite, so then it looks again.
    """
    by_device: dict[Any, Any] = {}
    for group in groups:
        device = group[0].device
        if device not in by_device:
            by_device[device] = found if device == found.device else found.to(device)
        factor = inverse.to(device)
        look_and_multiply_(group, by_device[device], factor)
        if look_again:
            look_and_multiply_(group, by_device[device], torch.ones_like(factor))
    return by_device
