"""The Optax transformation as the conformance suite drives it: compiled and eager.

It is a pair of functions. So a harness keeps the parameters and the state that a training loop
would keep, and runs the loop's step: `value_and_grad`, `update`, `apply_updates`.

What Keras' optimizers do to gradients by themselves (clipping, averaging, accumulation, a schedule)
is done by transformations inside.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lossscale.optax
from conformance.harness import Harness, kind_of_device

_momentum = functools.partial(optax.sgd, 0.5, momentum=0.9)
_INNER: dict[str, Callable[[], Any]] = {
    "plain": lambda: optax.sgd(1.0),
    "sgd": lambda: optax.sgd(0.5),
    "momentum": lambda: _momentum(nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw-clipnorm": lambda: optax.chain(
        optax.clip_by_block_rms(1.0), optax.adamw(0.1, weight_decay=0.01)
    ),
    "global_clipnorm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5)),
    "clipvalue": lambda: optax.chain(optax.clip(0.5), optax.rmsprop(0.1)),
    "ema": lambda: optax.chain(_momentum(), optax.ema(0.5)),
    "accumulation": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "schedule": lambda: optax.sgd(optax.exponential_decay(0.5, 1, 0.5)),
    "small-rate": lambda: optax.sgd(2.0**-13),
    "large-rate": lambda: optax.sgd(8.0),
    "small-momentum": lambda: optax.sgd(2.0**-13, momentum=0.5),
    "lion": lambda: optax.lion(2.0**-13, b1=0.5, b2=0.75, weight_decay=0.0),
}


class Applied(NamedTuple):
    """The state of a transformation that counts the steps that it sees."""

    applied_steps: Any


def _counted(inner: Any) -> Any:
    counting = optax.GradientTransformation(
        lambda params: Applied(jnp.zeros((), jnp.int32)),
        lambda updates, state, params=None: (updates, Applied(state.applied_steps + 1)),
    )
    return optax.chain(inner, counting)


class Loop:
    """A training loop, whose compiled step all harnesses of one kind and setting share."""

    def __init__(self, inner: str | Callable[[], Any], rule: Any) -> None:
        self.inner = _counted(inner() if callable(inner) else _INNER[inner]())
        self.tx = optax.with_extra_args_support(self.inner)
        self.scales_loss = rule is not None
        if self.scales_loss:
            self.tx = lossscale.optax.loss_scaled(self.inner, rule=rule)
        self.traces = 0

    def gradients(self, opt_state: Any, params: Any, loss_fn: Any) -> Any:
        """The gradients of a loss as `update` takes them."""
        if not self.scales_loss:
            return jax.grad(loss_fn)(params)
        return lossscale.optax.value_and_grad(loss_fn)(opt_state, params)[1]

    def step(self, params: list[Any], opt_state: Any, given: list[Any], scaled: bool) -> Any:
        """Returns what follows a step with gradients of the loss, or of the scaled loss."""
        self.traces += 1
        # What has no gradient is left out of what is trained, as it is with Equinox.
        trained = [None if g is None else p for p, g in zip(params, given, strict=True)]
        found = given
        if not scaled:
            found = self.gradients(opt_state, trained, lambda values: _linear(values, given))
        updates, opt_state = self.tx.update(found, opt_state, trained)
        new = optax.apply_updates(trained, updates)
        return [p if n is None else n for p, n in zip(params, new, strict=True)], opt_state


def _linear(params: Sequence[Any], gradients: Sequence[Any]) -> Any:
    """A loss that is linear in the parameters, so that the scale arrives in their gradients."""
    parts = [jnp.vdot(p, g) for p, g in zip(params, gradients, strict=True) if g is not None]
    return sum(parts, jnp.zeros(()))


@functools.cache
def _compiled_loop(
    harness: type[OptaxJit], inner: str | Callable[[], Any], rule: Any
) -> tuple[Loop, Any]:
    loop = Loop(inner, rule)
    return loop, harness.compiled(loop)


class OptaxJit(Harness):
    """A transformation in a `jax.jit`. Without a rule it gives the bits of the one `beside` it."""

    is_compiled = True

    def __init__(
        self,
        values: Sequence[Any],
        inner: str | Callable[[], Any],
        rule: Any = None,
        beside: Any = None,
    ) -> None:
        # XLA rounds an update otherwise as soon as a number that it does not know multiplies the
        # gradient. So compiled steps without loss scaling are the same steps, and the number is 1.
        self._scale_is_one = beside is not None and self.is_compiled
        if self._scale_is_one:
            rule = beside
        self._loop, self._compiled = _compiled_loop(type(self), inner, rule)
        self.optimizer, self.inner_optimizer = self._loop.tx, self._loop.inner
        self.params = [jnp.array(value) for value in values]
        self.opt_state = self.optimizer.init(self.params)
        self._traces_before = self._loop.traces

    @staticmethod
    def compiled(loop: Loop) -> Any:
        """Returns the step as it is run here."""
        return jax.jit(loop.step, static_argnums=3, donate_argnums=(0, 1))

    @property
    def traces(self) -> int:  # type: ignore[override]
        return self._loop.traces - self._traces_before

    @staticmethod
    def optimizers() -> Any:
        return types.SimpleNamespace(SGD=optax.sgd)

    @classmethod
    def framework_wrapper(cls) -> Any:
        return lossscale.optax.loss_scaled(optax.sgd(1.0))

    def scale_loss(self, loss: Any) -> Any:
        return np.asarray(lossscale.optax.scale_loss(self.opt_state, jnp.array(loss)))

    def apply_nothing(self) -> None:
        _, self.opt_state = self.optimizer.update([], self.opt_state, [])

    def step(self, gradients: Sequence[Any]) -> None:
        given = [None if g is None else jnp.array(g) for g in gradients]
        if self._scale_is_one:
            self.opt_state = self.opt_state._replace(loss_scale=jnp.ones(()))
        with jax.transfer_guard("disallow" if self.is_compiled else "allow"):
            self.params, self.opt_state = self._compiled(
                self.params, self.opt_state, given, self._scaled_already
            )

    def parameters(self) -> list[Any]:
        return [np.array(value) for value in self.params]

    def device(self) -> str:
        return kind_of_device(self.params[0])

    def inner_state(self) -> list[Any]:
        state = self.opt_state
        inner = state.inner_state if self._loop.scales_loss else state
        return [np.array(leaf) for leaf in jax.tree.leaves(inner)]

    def scale(self) -> Any:
        return np.asarray(self.opt_state.loss_scale)[()]

    def rule_state(self) -> Any:
        state = self.opt_state
        return types.SimpleNamespace(scale=state.loss_scale, **state.rule_state)

    def counters(self) -> tuple[int, int, bool, int]:
        # Iterations are the steps that the transformation inside has seen, and those skipped.
        state = self.opt_state
        applied = int(state.inner_state[-1].applied_steps)
        skipped = int(state.steps_skipped)
        return (
            int(state.rule_state["good_steps"]),
            skipped,
            bool(state.last_step_skipped),
            applied + skipped,
        )

    def set_scale(self, value: float) -> None:
        self.opt_state = self.opt_state._replace(loss_scale=jnp.float32(value))

    def become_a_copy(self) -> None:
        self.params, self.opt_state = copy.deepcopy((self.params, self.opt_state))

    def save(self, path: Any) -> None:
        path.write_bytes(pickle.dumps((self.params, self.opt_state)))

    def load(self, path: Any) -> None:
        self.params, self.opt_state = pickle.loads(path.read_bytes())


class OptaxEager(OptaxJit):
    """Steps that are not compiled. Where they make a number, it has to get to the device."""

    is_compiled = False

    @staticmethod
    def compiled(loop: Loop) -> Any:
        return loop.step
