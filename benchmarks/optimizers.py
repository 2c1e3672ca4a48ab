"""The optimizers that are wrapped, each made from a module `optimizers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": lambda optimizers, **settings: optimizers.Adam(1e-3, **settings),
    "SGD": lambda optimizers, **settings: optimizers.SGD(1e-2, **settings),
    "SGD momentum": lambda optimizers, **settings: optimizers.SGD(1e-2, momentum=0.9, **settings),
    "AdamW clipnorm": lambda optimizers, **settings: optimizers.AdamW(
        1e-3, weight_decay=1e-2, clipnorm=1.0, **settings
    ),
}
