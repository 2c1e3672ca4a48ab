"""Runs the tests of Optax that are about what we do too, with ours in its place.

They come with the package, so these are the tests of the version that is installed. What ours does
otherwise on purpose is listed with the reason, and must really be otherwise.

    python -m tools.peers.jax_libraries

It takes some minutes, and needs the test environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
import re
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# Before JAX looks: the tests of shardings want eight devices.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax

import lossscale
import lossscale.optax

SCALE = 8.0
RULE = lossscale.FixedScale(SCALE, skip_nonfinite=True)


def around(inner: Any) -> Any:
    """Loss scaling around a transformation, for a caller that knows nothing of it."""
    tx = lossscale.optax.loss_scaled(inner, rule=RULE)

    def scaled(gradient: Any) -> Any:
        inexact = jnp.issubdtype(jnp.result_type(gradient), jnp.inexact)
        return gradient * SCALE if inexact else gradient

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return tx.update(jax.tree.map(scaled, updates), state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def wrapping(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory of transformations, with loss scaling around each."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(factory(*args, **kwargs))

    # Optax reads the signatures of factories.
    wrapped.__wrapped__ = factory
    return wrapped


def our_apply_if_finite(inner: Any, max_consecutive_errors: int) -> Any:
    """Ours in the place of `apply_if_finite`, giving in after so many skips as that does."""
    inner = optax.with_extra_args_support(inner)
    tx = lossscale.optax.loss_scaled(inner, rule=lossscale.FixedScale(1.0, skip_nonfinite=True))

    def named(state: Any) -> Any:
        finite = jnp.logical_not(state.last_step_skipped)
        counts = state.consecutive_skips, finite, state.steps_skipped
        return optax.ApplyIfFiniteState(*counts, inner_state=state)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        ours = state.inner_state
        given_in, _ = inner.update(updates, ours.inner_state, params, **extra_args)
        ours, after = tx.update(updates, ours, params, **extra_args)
        too_many = after.consecutive_skips > max_consecutive_errors
        result = jax.tree.map(lambda a, b: jnp.where(too_many, a, b), given_in, ours)
        return result, named(after)

    return optax.GradientTransformationExtraArgs(lambda params: named(tx.init(params)), update)


@contextlib.contextmanager
def our_aliases() -> Iterator[None]:
    """Every optimizer that the tests of optimizers make."""
    tests = importlib.import_module("optax._src.alias_test")
    get = tests._get_opt

    def got(self: Any, opt_name: str) -> Any:
        return wrapping(get(self, opt_name))

    with mock.patch.object(tests, "_get_opt", got):
        yield


@contextlib.contextmanager
def wrapping_in(module_name: str, *names: str) -> Iterator[None]:
    """Puts ours around what some functions of a module make."""
    module = importlib.import_module(module_name)
    made = {name: wrapping(getattr(module, name)) for name in names}
    with mock.patch.multiple(module, **made):
        yield


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of another package.

    Attributes:
        name: For the reader.
        module: Where they are.
        cases: The names of their classes.
        ours: Puts ours in the place of theirs.
        otherwise: Patterns of the names of tests that ours does not pass, and why it does not.
        imported_with_ours: Whether the module makes what it tests while it is imported.
    """

    name: str
    module: str
    cases: tuple[str, ...]
    ours: contextlib.AbstractContextManager[Any]
    otherwise: dict[str, str] = dataclasses.field(default_factory=dict)
    imported_with_ours: bool = False


_MOMENTS = "the state of narrower parameters is float32, as the gradients that it gets are"
_LBFGS = "without loss scaling it does not pass either"
_INSIDE = "looks at the state of the transformation, which is the `inner_state` of ours"

SUITES = (
    Suite(
        "optax apply_if_finite",
        "optax.transforms._conditionality_test",
        ("ConditionalityTest",),
        mock.patch("optax.transforms._conditionality.apply_if_finite", our_apply_if_finite),
    ),
    Suite(
        "optax optimizers",
        "optax._src.alias_test",
        ("AliasTest",),
        our_aliases(),
        {
            # Adam and AdamW with parameters in bfloat16, and no dtype for their moments.
            r"test_explicit_dtype(10|11)(_.*)?": _MOMENTS
        },
    ),
    Suite(
        "optax masked",
        "optax.transforms._masking_test",
        ("MaskedTest",),
        wrapping_in("optax.transforms._masking", "masked"),
        {
            r"test_masked_state_structure\d*(_.*)?": _INSIDE,
            r"test_tree_map_params\d*(_.*)?": _INSIDE,
            r"test_nested_mask\d*(_.*)?": "a mask in a mask would be loss scaling twice",
        },
    ),
    Suite(
        "optax chain, partition",
        "optax.transforms._combining_test",
        ("CombiningTest", "ExtraArgsTest", "PartitionTest"),
        wrapping_in("optax.transforms._combining", "chain", "partition"),
    ),
    Suite(
        "optax shardings",
        "optax._src.sharding_test",
        ("ShardingTest",),
        wrapping_in("optax", "adam", "sgd", "adamw", "rmsprop", "adafactor", "lamb"),
        {r"test_state_sharding_type_(init_match_update|preserved_with_jit)_lbfgs(_.*)?": _LBFGS},
        imported_with_ours=True,
    ),
    Suite(
        "optax float64",
        "optax._src.float64_test",
        ("Float64Test",),
        wrapping_in("optax._src.alias", "adagrad", "adam", "adamw", "lamb", "rmsprop", "sgd"),
        imported_with_ours=True,
    ),
)


def tests_of(suite: Suite) -> unittest.TestSuite:
    module, loader = importlib.import_module(suite.module), unittest.TestLoader()
    cases = (loader.loadTestsFromTestCase(getattr(module, case)) for case in suite.cases)
    return unittest.TestSuite(itertools.chain.from_iterable(cases))


def name_of(test: Any) -> str:
    """The name of a test without its parameters."""
    return str(test.id()).partition(" ")[0]


def run(suite: Suite) -> bool:
    """Runs a suite and reports; returns whether all is as it should be."""
    start = time.process_time()
    outcome = unittest.TestResult()
    with contextlib.ExitStack() as stack:
        # Some compare versions as texts, and take 0.10 to be older than 0.7.
        stack.enter_context(mock.patch.object(jax, "__version__", "0.9.0"))
        if not suite.imported_with_ours:
            importlib.import_module(suite.module)
        stack.enter_context(suite.ours)
        tests = tests_of(suite)
        names = [name_of(test) for test in tests]
        tests.run(outcome)
    failed = {name_of(test): text for test, text in outcome.failures + outcome.errors}
    skipped = {name_of(test) for test, _ in outcome.skipped}
    pattern = "|".join(suite.otherwise)
    meant = {name for name in names if re.fullmatch(pattern, name.rpartition(".")[2])}
    alike, wrong = meant - {*failed, *skipped}, failed.keys() - meant
    for name in wrong:
        print(f"--- {name}: FAILED\n{failed[name]}")
    for name in alike:
        print(f"--- {name}: is listed as otherwise, and passes")
    print(
        f"{suite.name}: {outcome.testsRun - len(failed) - len(skipped)} passed, "
        f"{len(skipped)} skipped by themselves, {len(failed) - len(wrong)} otherwise on "
        f"purpose, {len(wrong)} failed ({time.process_time() - start:.0f} s)",
        flush=True,
    )
    return not wrong and not alike


def main() -> int:
    results = [run(suite) for suite in SUITES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
