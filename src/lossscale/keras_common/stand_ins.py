"""Optimizers that take gradients and apply none, in the places of those of a model.

A `train_step` of a user's own calls whatever verbs an optimizer has. Its stand-in is taken for a
`LossScaleOptimizer`, scales with the scale that is measured, and notes what it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lossscale import registry
from lossscale.common.user_code import as_written
from lossscale.diagnostics.tapping import replaced
from lossscale.optimizer import LossScaleOptimizer


class Ways(NamedTuple):
    """What stand-ins need of a library.

    Attributes:
        is_optimizer: Whether something is an optimizer of it.
        scaled: Multiplies a loss by a scale, in float32 or wider.
        unscaled: Divides gradients by a scale, in float32 or wider; always makes new ones.
        differentiate: Given a loss, variables, what scales a loss, and `tape=`, returns the
            gradients and the variables they belong to.
    """

    is_optimizer: Callable[[Any], bool]
    scaled: Callable[[Any, Any], Any]
    unscaled: Callable[[Sequence[Any], Any, bool], list[Any]]
    differentiate: Callable[..., tuple[list[Any], list[Any]]]


class Recorder:
    """What the optimizers of a model are given in one run of its `train_step`.

    Args:
        ways: Those of the library.
        variables: The variables that are trained.
        scale: The loss scale, a power of two: a number, or a scalar of the function being traced.
        values: The values of the variables, where a step is given these instead.

    Attributes:
        given: For each variable its gradients, multiplied by the scale. A step that trains a
            variable several times has given several, each of which counts.
        scales: Whether the step has scaled a loss in any way.
        forgotten: The names of the optimizers that were given gradients of a loss that nobody
            scaled, and the verb that took them.
        helped: How often gradients were taken of a loss that was scaled for the step.
        optimizers: The optimizers that were given gradients.
    """

    def __init__(
        self, ways: Ways, variables: Sequence[Any], scale: Any, values: Sequence[Any] = ()
    ) -> None:
        self.ways, self.scale, self.variables = ways, scale, list(variables)
        self.given: list[list[Any]] = [[] for _ in self.variables]
        self.scales, self.helped = False, 0
        self.forgotten: dict[str, str] = {}
        self.optimizers: list[Any] = []
        self._values = list(values)
        self._places = {
            id(each): place
            for several in (self.variables, self._values)
            for place, each in enumerate(several)
        }

    def keep(self, gradients: Iterable[Any], variables: Iterable[Any], *, scaled: bool) -> None:
        """Notes gradients.

        Args:
            gradients: The gradients; None where there is none.
            variables: What they belong to; those of other models are not noted.
            scaled: Whether they are multiplied by the scale already.
        """
        for gradient, variable in zip(gradients, variables, strict=True):
            place = self._places.get(id(variable))
            if gradient is not None and place is not None:
                divisor = 1.0 if scaled else 1.0 / self.scale
                self.given[place] += self.ways.unscaled([gradient], divisor, True)

    def let_go(self) -> None:
        """Lets go of tensors, once the run is over."""
        self.given, self._values, self._places, self.scale = [], [], {}, None

    def known(self, gradients: Sequence[Any], values: Any, optimizer: Any) -> Sequence[Any]:
        """Returns the variables, or values of them, that gradients belong to.

        Args:
            gradients: The gradients.
            values: What came with them; None for all that the optimizer trains.
            optimizer: The optimizer that they were given to.

        Raises:
            ValueError: If it cannot be told.
        """
        given = [] if values is None else list(values)
        if any(id(value) in self._places or hasattr(value, "assign") for value in given):
            return given
        # A step has made something of the values; their order is that of the variables.
        built_with = list(getattr(optimizer, "_trainable_variables", None) or ())
        for found in (built_with, self.variables):
            if len(found) == len(gradients):
                return found
        raise ValueError("It cannot be told which variables its gradients belong to.")

    @contextlib.contextmanager
    def installed(self, owners: Iterable[Any]) -> Iterator[None]:
        """Within it stand-ins are in the places of all optimizers.

        Args:
            owners: What has optimizers as attributes: the model and its layers.
        """
        made: dict[int, StandIn] = {}

        def stand_in(value: Any, name: str) -> Any:
            if self.ways.is_optimizer(value):
                return made.setdefault(id(value), StandIn(value, name, self))
            if isinstance(value, (list, tuple)) and any(map(self.ways.is_optimizer, value)):
                return [stand_in(each, name) for each in value]
            if isinstance(value, dict) and any(map(self.ways.is_optimizer, value.values())):
                return {key: stand_in(each, name) for key, each in value.items()}
            return value

        with contextlib.ExitStack() as stack:
            for owner in owners:
                # What is public first: it says what the optimizer is called.
                for name in sorted(vars(owner), key=lambda name: name.startswith("_")):
                    value = vars(owner)[name]
                    found = stand_in(value, name)
                    if found is not value:
                        stack.enter_context(replaced(owner, name, found))
            yield


class StandIn:
    """Takes what a `train_step` gives to an optimizer.

    Args:
        optimizer: The optimizer, whose settings can be read.
        name: What the model calls it.
        recorder: What notes the gradients.
        inner: Whether it stands for the optimizer inside of one that scales: what that is given
            is not scaled any more.
    """

    def __init__(
        self, optimizer: Any, name: str, recorder: Recorder, *, inner: bool = False
    ) -> None:
        self._optimizer, self._name, self._recorder, self._inner = optimizer, name, recorder, inner
        # What the next gradients are: "scaled" or "unscaled", or "" where nobody said anything.
        self._kind = "unscaled" if inner else ""
        scales = isinstance(optimizer, LossScaleOptimizer) or inner
        self._class = type(optimizer) if scales else registry.wrapper_for(optimizer)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # What `isinstance` asks for: a step may scale only if it is given a LossScaleOptimizer.
        return self._class

    def __getattr__(self, name: str) -> Any:
        # Optimizers of tf_keras have none.
        if name == "scale_loss" and hasattr(self._class, name):
            return self._scale_loss
        return getattr(self._optimizer, name)

    @property
    def inner_optimizer(self) -> Any:
        """The stand-in of the optimizer inside."""
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        return StandIn(inner, self._name, self._recorder, inner=True)

    @property
    def loss_scale(self) -> Any:
        """The scale; whoever reads it divides by it too."""
        self._recorder.scales, self._kind = True, "unscaled"
        return self._recorder.scale

    dynamic_scale = loss_scale

    @as_written
    def _scale_loss(self, loss: Any) -> Any:
        """Scales a loss, whose gradients are expected as they are."""
        return loss if self._inner else self._scaled(loss, "scaled")

    @as_written
    def get_scaled_loss(self, loss: Any) -> Any:
        """Scales a loss, whose gradients are expected divided."""
        return self._scaled(loss, "unscaled")

    def _scaled(self, loss: Any, kind: str) -> Any:
        self._recorder.scales, self._kind = True, kind
        if callable(loss):
            return lambda: self._scaled(loss(), kind)
        return self._recorder.ways.scaled(loss, self._recorder.scale)

    @as_written
    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Divides gradients by the scale."""
        self._kind = "unscaled"
        return self._recorder.ways.unscaled(list(grads), self._recorder.scale, True)

    @as_written
    def apply_gradients(self, grads_and_vars: Iterable[Any], *_: Any, **__: Any) -> Any:
        """Notes gradients."""
        pairs = list(grads_and_vars)
        self._take("apply_gradients", [each[0] for each in pairs], [each[1] for each in pairs])
        return self._optimizer.iterations

    @as_written
    def apply(self, grads: Iterable[Any], trainable_variables: Any = None, **_: Any) -> None:
        """Notes gradients."""
        gradients = list(grads)
        known = self._recorder.known(gradients, trainable_variables, self._optimizer)
        self._take("apply", gradients, known)

    @as_written
    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[Any, Any]:
        """Notes gradients, and returns the values as they are."""
        gradients = list(grads)
        known = self._recorder.known(gradients, trainable_variables, self._optimizer)
        self._take("apply", gradients, known)
        return trainable_variables, optimizer_variables

    @as_written
    def minimize(self, loss: Any, var_list: Any = None, *given: Any, **named: Any) -> Any:
        """Notes the gradients of a loss, which it scales."""
        pairs = self.compute_gradients(loss, var_list, *given, **named)
        return self.apply_gradients(pairs)

    @as_written
    def compute_gradients(
        self, loss: Any, var_list: Any = None, *given: Any, **named: Any
    ) -> list[tuple[Any, Any]]:
        """Returns the gradients of a loss, scaled and divided."""
        # Each generation has the tape in another place.
        tape = next((each for each in (*given, *named.values()) if hasattr(each, "watch")), None)
        gradients, variables = self._recorder.ways.differentiate(
            loss, var_list, self.get_scaled_loss, tape=tape
        )
        return list(zip(self.get_unscaled_gradients(gradients), variables, strict=True))

    def build(self, *_: Any) -> None:
        """Does nothing: without slots there is nothing to build."""

    def _take(self, verb: str, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        self._recorder.optimizers.append(self._optimizer)
        if not self._kind:
            self._recorder.forgotten[self._name] = verb
        self._recorder.keep(gradients, variables, scaled=self._kind == "scaled")
