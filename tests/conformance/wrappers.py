"""The wrappers that the conformance suite runs on: one row each.

A row is usable in the process whose `KERAS_BACKEND` it names, since Keras fixes its backend when
it is imported; those of tf_keras in one with `LOSSSCALE_TEST_KERAS=tf_keras`. `make test` starts
one process for each. With `LOSSSCALE_TEST_KERAS=none` no Keras is needed, and the rows of PyTorch
and Optax are left. A new wrapper is a new row, and a harness if it is driven in a new way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from conformance.inner_optimizers import FEW, MISSING

BACKEND = os.environ["KERAS_BACKEND"]
KERAS = os.environ.get("LOSSSCALE_TEST_KERAS", "keras")


def loss_scale_of(rule: Any) -> Any:
    """Returns the `LossScale` of TensorFlow 2.1 that moves like a rule; None if there is none."""
    from lossscale import DynamicScale, FixedScale, experimental

    if isinstance(rule, FixedScale) and not rule.skip_nonfinite:
        return experimental.FixedLossScale(rule.scale)
    if not isinstance(rule, DynamicScale):
        return None
    settings = rule.initial_scale, rule.growth_interval, rule.growth_factor
    made = experimental.DynamicLossScale(*settings)
    return made if made._rule == rule else None


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A row of the table.

    Attributes:
        name: What it is called.
        backend: That of the processes that it is usable in.
        driver: The module and the class of what drives it, which import its framework.
        compiles: Whether it compiles steps.
        keras: The Keras of these processes.
        family: Which optimizers it wraps.
        like: The wrapper whose code it runs in another place, so that a part of the tests will do;
            none if it has its own.
    """

    name: str
    backend: str
    driver: str
    compiles: bool
    keras: str = "keras"
    family: str = "keras"
    like: str = ""

    @property
    def harness(self) -> Any:
        """What drives it."""
        module, name = self.driver.split(".")
        return getattr(importlib.import_module(f"conformance.{module}"), name)

    @property
    def is_native(self) -> bool:
        """Whether it is of a framework itself, which says nothing of gradients that are missing."""
        return self.family.startswith(("torch", "optax"))

    @property
    def is_an_object(self) -> bool:
        """Whether an optimizer is an object with a state, and no pair of functions."""
        return self.family != "optax"

    @property
    def takes_loss_scales_only(self) -> bool:
        """Whether it has no rules, but only what TensorFlow 2.0 has."""
        return self.name.endswith("experimental")

    @property
    def has_grappler(self) -> bool:
        """Whether TensorFlow's Grappler optimizes its steps."""
        return self.backend == "tensorflow" and self.compiles and not self.name.endswith("xla")

    def wrap(self, optimizer: Any, **arguments: Any) -> Any:
        """Wraps something with loss scaling, as a user does."""
        import lossscale

        wrap = lossscale.LossScaleOptimizer if self.is_an_object else lossscale.optax.loss_scaled
        return wrap(optimizer, **arguments)

    def missing_gradient(self) -> Any:
        """What a step does that has a gradient for some variables only: a context manager."""
        if self.is_native or self.keras == "tf_keras":
            return contextlib.nullcontext()
        return pytest.warns(UserWarning, match="Gradients do not exist")

    def make(self, values: Sequence[Any], inner: str, rule: Any = None) -> Any:
        """Returns an optimizer around new variables, ready to step."""
        if inner in MISSING.get(self.family, {}):
            pytest.skip(MISSING[self.family][inner])
        if self.takes_loss_scales_only and rule is not None and not loss_scale_of(rule):
            pytest.skip("no FixedLossScale or DynamicLossScale has these settings")
        if self.like and inner not in FEW:
            pytest.skip(f"what is inside of it is run as in {self.like}")
        return self.harness(values, inner, rule)

    def make_bare(self, values: Sequence[Any], inner: str, beside: Any) -> Any:
        """Returns the optimizer alone, to be compared with one of the rule `beside`."""
        if self.is_an_object:
            return self.make(values, inner)
        return self.harness(values, inner, beside=beside)


def _of_tf_keras(family: str, harness: str) -> Iterator[Wrapper]:
    row = functools.partial(Wrapper, backend="tensorflow", keras="tf_keras", family=family)
    yield row(f"{family}-eager", driver=f"harness.{harness}Harness", compiles=False)
    yield row(f"{family}-function", driver=f"harness.{harness}Function", compiles=True)
    like = "" if family == "tf_keras-new" else "tf_keras-new-xla"
    yield row(f"{family}-xla", driver=f"harness.{harness}XLA", compiles=True, like=like)
    yield row(
        f"{family}-experimental",
        driver=f"harness.{harness}Experimental",
        compiles=True,
        like=f"{family}-function",
    )


_ON_TENSORFLOW = functools.partial(Wrapper, backend="tensorflow", compiles=True)
_ON_JAX = functools.partial(Wrapper, backend="jax")
_ON_TORCH = functools.partial(Wrapper, backend="torch", compiles=False)
_OPTAX = functools.partial(_ON_JAX, family="optax")

TABLE = (
    _ON_TENSORFLOW("keras-tensorflow-eager", driver="harness.KerasHarness", compiles=False),
    _ON_TENSORFLOW("keras-tensorflow-function", driver="harness.KerasFunction"),
    _ON_TENSORFLOW("keras-tensorflow-xla", driver="harness.KerasXLA"),
    *(
        _ON_TENSORFLOW(
            f"keras-tensorflow-{name}", driver=f"harness.{driver}", like="keras-tensorflow-function"
        )
        for name, driver in (
            ("apply_gradients", "KerasApplyGradients"),
            ("experimental", "KerasExperimental"),
        )
    ),
    _ON_JAX("keras-jax-eager", driver="harness.KerasHarness", compiles=False),
    _ON_JAX("keras-jax-jit", driver="harness.JaxJit", compiles=True),
    _ON_TORCH("keras-torch-eager", driver="harness.KerasHarness"),
    _ON_TORCH("torch-native-host", driver="torch_native.TorchNative", family="torch"),
    _ON_TORCH(
        "torch-native-device", driver="torch_native.TorchNativeDevice", family="torch-device"
    ),
    *(
        _ON_TORCH(
            f"torch-backward-{decide}",
            driver=f"torch_native.TorchVerb{'' if decide == 'host' else 'Device'}",
            family="torch" if decide == "host" else "torch-device",
            like=f"torch-native-{decide}",
        )
        for decide in ("host", "device")
    ),
    _OPTAX("optax-native-jit", driver="optax_native.OptaxJit", compiles=True),
    _OPTAX(
        "optax-native-eager",
        driver="optax_native.OptaxEager",
        compiles=False,
        like="optax-native-jit",
    ),
    *_of_tf_keras("tf_keras-new", "TFKeras"),
    *_of_tf_keras("tf_keras-legacy", "TFKerasLegacy"),
)

WRAPPERS = tuple(
    wrapper
    for wrapper in TABLE
    if wrapper.backend == BACKEND
    and (wrapper.is_native if KERAS == "none" else wrapper.keras == KERAS)
)
