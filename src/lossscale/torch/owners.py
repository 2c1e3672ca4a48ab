"""Whose a parameter is: the records of the optimizers that have it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lossscale.torch.ranks import ParameterInfo

if TYPE_CHECKING:
    from lossscale.torch.gradient_record import GradientRecord

lock = threading.RLock()
"""Held while gradients join or leave a set: autograd runs hooks in a thread for each device."""

_living: dict[weakref.ref[GradientRecord], bool] = {}
"""The records, and whether their parameters are sharded."""
_owners: dict[int, tuple[weakref.ref[GradientRecord], ...]] = {}
"""The records that have a parameter, by its id, which lives as long as one of them."""
_changes = [0]
"""The number of times that a record came, went or got other parameters."""


def register(record: GradientRecord, info: ParameterInfo) -> Callable[[], None]:
    """Remembers whose parameters those of a record are; returns what forgets it."""
    ids, sets = info.ids, record.sets

    def forget(ref: weakref.ref[GradientRecord]) -> None:
        with lock:
            _changes[0] += 1
            _living.pop(ref, None)
            for key in ids:
                rest = tuple(other for other in _owners.get(key, ()) if other is not ref)
                if rest:
                    _owners[key] = rest
                else:
                    _owners.pop(key, None)

    def died(ref: weakref.ref[GradientRecord]) -> None:
        if lock is None:
            # Python is ending, and has cleared this module.
            return  # type: ignore[unreachable]
        forget(ref)
        # An optimizer in its place knows what multiplies their gradients.
        for scaled in sets:
            for other in owners(scaled.info):
                if scaled not in other.sets:
                    other.sets.append(scaled)

    with lock:
        _changes[0] += 1
        ref = weakref.ref(record, died)
        _living[ref] = info.is_sharded
        for key in ids:
            _owners[key] = (*_owners.get(key, ()), ref)
    return lambda: forget(ref)


def owners(info: ParameterInfo) -> list[GradientRecord]:
    """The records that have some of these parameters."""
    if info.owners is None or info.owners[0] != _changes[0]:
        info.owners = _changes[0], _references(info.ids)
    return [record for ref in info.owners[1] if (record := ref()) is not None]


def owners_of(ids: Iterable[int]) -> list[GradientRecord]:
    """The records that have some of the parameters with these ids."""
    return [record for ref in _references(ids) if (record := ref()) is not None]


def _references(ids: Iterable[int]) -> list[weakref.ref[GradientRecord]]:
    with lock:
        return list({ref: None for key in ids for ref in _owners.get(key, ())})


def all_records(*, sharded: bool = False) -> list[GradientRecord]:
    """The records of all optimizers, or of those with sharded parameters."""
    with lock:
        refs = [ref for ref, is_sharded in _living.items() if is_sharded or not sharded]
    return [record for ref in refs if (record := ref()) is not None]


def is_only_record() -> bool:
    """Whether there is one optimizer with loss scaling, which each loss concerns."""
    return len(_living) <= 1
