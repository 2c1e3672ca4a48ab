"""Fidelity during training: measured now and then on one batch, at the scale in use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lossscale.checks import checked_count
from lossscale.errors import ArgumentError

if TYPE_CHECKING:
    from lossscale.diagnosis.batches import Batch
    from lossscale.diagnostics.deviation import Deviation

Probe = Callable[[float], dict[str, dict[str, float]]]
"""Given a loss scale, returns what float16 makes of each variable's gradient, for a record."""

_AROUND = ("Exception encountered", "in user code", "File ", "Arguments received", "Call arguments")


def batch_of(data: Sequence[Any]) -> Batch:
    """Returns the batch that a monitor was given.

    Raises:
        ArgumentError: If it holds no arrays. It is a `ValueError`.
    """
    # Not at the top: it needs NumPy, which the callbacks do without until they are used.
    from lossscale.diagnosis.batches import batches_of

    return next(iter(batches_of(iter([tuple(data)]), None, None, batches=1, batch_size=1)))


def checked_fidelity(
    fidelity_every: Any, loss_fn: Any, fidelity_data: Any, sampled_every: int
) -> int | None:
    """Returns after how many steps to measure fidelity in a loop of the user's, None for never.

    Args:
        fidelity_every, loss_fn, fidelity_data: As the user gave them.
        sampled_every: At which multiples of the number of a step the monitor reads.

    Raises:
        ArgumentError: If one is missing, or it is no number of steps on which the monitor reads.
            It is a `ValueError`.
    """
    given = (fidelity_every, loss_fn, fidelity_data)
    if all(each is None for each in given):
        return None
    if any(each is None for each in given):
        raise ArgumentError(
            "`fidelity_every`, `loss_fn` and `fidelity_data` belong together: every how many steps "
            "to measure fidelity, the loss of a model and a batch, and the batch."
        )
    every = checked_count("fidelity_every", fidelity_every)
    if every % sampled_every:
        raise ArgumentError(
            "Fidelity is measured on steps that are sampled: `fidelity_every` must be a multiple "
            f"of `every`. Received: fidelity_every={every}, every={sampled_every}."
        )
    return every


def probe_of(run: Any, batch: Any) -> Probe:
    """Returns what measures a batch with the passes of a model."""
    from lossscale.diagnosis.measurement import wrong_at

    def probe(scale: float) -> dict[str, dict[str, float]]:
        return {
            variable: {"lost": min(wrong, 1.0), "error": wrong, "share": 1.0}
            for variable, wrong in wrong_at(run, batch, scale).values()
        }

    return probe


def described(
    found: Mapping[str, Deviation], layers: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Returns what was found of each variable, for a record.

    Args:
        found: The deviation of each variable.
        layers: The name of each variable to that of its layer.
    """
    largest: dict[str, float] = {}
    for name, layer in layers.items():
        largest[layer] = max(largest.get(layer, 0.0), found[name].largest)
    return {
        name: {
            "lost": found[name].lost,
            "error": found[name].error,
            "cosine": found[name].cosine,
            "nonfinite": found[name].nonfinite,
            "share": found[name].largest / (largest[layer] or 1.0),
        }
        for name, layer in layers.items()
    }


def said_by(error: BaseException) -> str:
    """The line of an error that says what is wrong, and not where."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # What AutoGraph and Keras put around an error of a layer.
    inner = [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    plain = [line for line in lines if not line.startswith(_AROUND)]
    said = (inner[-1:] or plain[:1] or [type(error).__name__])[0][:200]
    return said if said.endswith(".") else f"{said}."
