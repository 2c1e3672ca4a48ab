"""The wrappers that the conformance suite runs on: one row each.

A row is usable in the process whose `KERAS_BACKEND` it names, since Keras fixes its backend when
it is imported; those of tf_keras in one with `LOSSSCALE_TEST_KERAS=tf_keras`. `make test` starts
one process for each. A new wrapper is a new row, and a harness if it is driven in a new way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from conformance.harness import (
    JaxJit,
    KerasHarness,
    TFKerasHarness,
    TFKerasLegacyHarness,
    by_documented_verbs,
    experimental,
    in_a_function,
)
from conformance.inner_optimizers import FEW, MISSING
from conformance.optax_native import OptaxEager, OptaxJit, OptaxNNX, OptaxScan
from conformance.torch_native import TorchNative, TorchNativeDevice

BACKEND = os.environ["KERAS_BACKEND"]
KERAS = os.environ.get("LOSSSCALE_TEST_KERAS", "keras")


def _has_a_loss_scale(rule: Any) -> bool:
    from lossscale.experimental.loss_scale import from_rule

    try:
        from_rule(rule)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A row of the table.

    Attributes:
        name: What it is called.
        backend: That of the processes that it is usable in.
        harness: What drives it.
        compiles: Whether it compiles steps.
        takes_loss_scales_only: Whether it has no rules, but only what TensorFlow 2.0 has.
        keras: The Keras of these processes.
        family: Which optimizers it wraps.
        like: The wrapper whose code it runs in another place, so that a part of the tests will do;
            none if it has its own.
        needs: What has to be installed besides, which the oldest releases are tested without.
    """

    name: str
    backend: str
    harness: type[Any]
    compiles: bool
    takes_loss_scales_only: bool = False
    keras: str = "keras"
    family: str = "keras"
    like: str = ""
    needs: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        """Whether it is of a framework itself, which says nothing of gradients that are missing."""
        return self.family.startswith(("torch", "optax"))

    @property
    def is_an_object(self) -> bool:
        """Whether an optimizer is an object with a state, and no pair of functions."""
        return self.family != "optax"

    def wrap(self, optimizer: Any) -> Any:
        """Wraps something with loss scaling, as a user does."""
        import lossscale

        if self.is_an_object:
            return lossscale.LossScaleOptimizer(optimizer)
        return lossscale.optax.loss_scaled(optimizer)

    def missing_gradient(self) -> Any:
        """What a step does that has a gradient for some variables only: a context manager."""
        if self.is_native:
            return contextlib.nullcontext()
        return pytest.warns(UserWarning, match="Gradients do not exist")

    def make(self, values: Sequence[Any], inner: str, rule: Any = None) -> Any:
        """Returns an optimizer around new variables, ready to step."""
        if inner in MISSING.get(self.family, {}):
            pytest.skip(MISSING[self.family][inner])
        if self.takes_loss_scales_only and rule is not None and not _has_a_loss_scale(rule):
            pytest.skip("no FixedLossScale or DynamicLossScale has these settings")
        if self.like and inner not in FEW:
            pytest.skip(f"what is inside of it is run as in {self.like}")
        return self.harness(values, inner, rule)

    def make_bare(self, values: Sequence[Any], inner: str, beside: Any) -> Any:
        """Returns the optimizer alone, to be compared with one of the rule `beside`."""
        if self.is_an_object:
            return self.make(values, inner)
        return self.harness(values, inner, beside=beside)


_FUNCTION = in_a_function(KerasHarness)
_OPTAX = "optax-native-jit"


def _of_tf_keras(family: str, harness: type[Any]) -> Iterator[Wrapper]:
    row = functools.partial(Wrapper, backend="tensorflow", keras="tf_keras", family=family)
    function = in_a_function(harness)
    yield row(f"{family}-eager", harness=harness, compiles=False)
    yield row(f"{family}-function", harness=function, compiles=True)
    yield row(f"{family}-xla", harness=in_a_function(harness, jit_compile=True), compiles=True)
    yield row(
        f"{family}-experimental",
        harness=experimental(function),
        compiles=True,
        takes_loss_scales_only=True,
        like=f"{family}-function",
    )


TABLE = (
    Wrapper("keras-tensorflow-eager", "tensorflow", KerasHarness, compiles=False),
    Wrapper("keras-tensorflow-function", "tensorflow", _FUNCTION, compiles=True),
    Wrapper(
        "keras-tensorflow-xla",
        "tensorflow",
        in_a_function(KerasHarness, jit_compile=True),
        compiles=True,
    ),
    Wrapper(
        "keras-tensorflow-apply_gradients",
        "tensorflow",
        by_documented_verbs(_FUNCTION),
        compiles=True,
        like="keras-tensorflow-function",
    ),
    Wrapper(
        "keras-tensorflow-experimental",
        "tensorflow",
        experimental(by_documented_verbs(_FUNCTION)),
        compiles=True,
        takes_loss_scales_only=True,
        like="keras-tensorflow-function",
    ),
    Wrapper("keras-jax-eager", "jax", KerasHarness, compiles=False),
    Wrapper("keras-jax-jit", "jax", JaxJit, compiles=True),
    Wrapper("keras-torch-eager", "torch", KerasHarness, compiles=False),
    Wrapper("torch-native-host", "torch", TorchNative, compiles=False, family="torch"),
    Wrapper(
        "torch-native-device", "torch", TorchNativeDevice, compiles=False, family="torch-device"
    ),
    Wrapper(_OPTAX, "jax", OptaxJit, compiles=True, family="optax"),
    Wrapper("optax-native-eager", "jax", OptaxEager, compiles=False, family="optax", like=_OPTAX),
    Wrapper("optax-native-scan", "jax", OptaxScan, compiles=True, family="optax", like=_OPTAX),
    Wrapper(
        "optax-native-nnx",
        "jax",
        OptaxNNX,
        compiles=True,
        family="optax",
        like=_OPTAX,
        needs=("flax",),
    ),
    *_of_tf_keras("tf_keras-new", TFKerasHarness),
    *_of_tf_keras("tf_keras-legacy", TFKerasLegacyHarness),
)

WRAPPERS = tuple(
    wrapper
    for wrapper in TABLE
    if (wrapper.backend, wrapper.keras) == (BACKEND, KERAS)
    and all(map(importlib.util.find_spec, wrapper.needs))
)
