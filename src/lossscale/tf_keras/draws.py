"""Random numbers of tf_keras' layers that are the same in every run, and in every precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tf_keras

from lossscale.tensorflow.draws import Draws, repeatable_draws
from lossscale.tf_keras.private_names import RandomGenerator


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Within it functions that are traced draw numbers that are the same in every run."""
    generator = RandomGenerator
    with repeatable_draws() as draws:
        stand_ins = {
            "random_normal": _sampler(draws, "normal"),
            "random_uniform": _sampler(draws, "uniform"),
            "truncated_normal": _sampler(draws, "truncated_normal"),
            "dropout": lambda self, inputs, rate, noise_shape=None: draws.dropout(
                inputs, rate, noise_shape
            ),
        }
        before = {name: getattr(generator, name) for name in stand_ins}
        try:
            for name, method in stand_ins.items():
                setattr(generator, name, method)
            yield
        finally:
            for name, method in before.items():
                setattr(generator, name, method)


def _sampler(draws: Draws, name: str) -> Any:
    draw = getattr(draws, name)

    def drawn(
        self: Any, shape: Any, *bounds: Any, dtype: Any = None, nonce: Any = None, **named: Any
    ) -> Any:
        del self, nonce
        return draw(shape, *bounds, dtype=dtype or tf_keras.backend.floatx(), **named)

    return drawn
