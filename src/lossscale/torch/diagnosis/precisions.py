"""float32 and float16 for one run: automatic casting, and random numbers that are the same in both.

Where a model switches automatic casting on by itself, it is switched off for the reference, and is
that of float16 otherwise. What it switches off stays off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_NARROW = (torch.float16, torch.bfloat16)
_WHOLE_LAYERS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "rnn")
"""Random operations that do more than to draw: in float32 they would not be what they are."""


class Precision(NamedTuple):
    """What a run computes in.

    Attributes:
        device: The type of device of the model.
        dtype: What `torch.autocast` casts to, also where the model enters it by itself; None for
            no casting at all.
        casts: Whether to cast everywhere; otherwise only where the model does.
    """

    device: str
    dtype: torch.dtype | None
    casts: bool

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Within it the model is called."""
        # What was cast before belongs to a graph that is gone.
        torch.clear_autocast_cache()
        with torch.autocast(self.device, self.dtype, enabled=self.casts):
            yield

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Within it the model is called and derived, which may call parts of it again."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_casting_to(self.dtype))
            if self.dtype is not None:
                stack.enter_context(_DrawnInFloat32())
            yield


@contextlib.contextmanager
def _casting_to(dtype: torch.dtype | None) -> Iterator[None]:
    """Within it `torch.autocast` casts to a dtype whatever it was made for; None for not at all."""
    cls: Any = torch.autocast
    enter = cls.__enter__

    def entered(autocast: Any) -> Any:
        before = autocast._enabled, autocast.fast_dtype
        if dtype is None:
            autocast._enabled = False
        else:
            autocast.fast_dtype = dtype
        try:
            return enter(autocast)
        finally:
            # It may be a decorator, which is entered again later.
            autocast._enabled, autocast.fast_dtype = before

    cls.__enter__ = entered
    try:
        yield
    finally:
        cls.__enter__ = enter


class _DrawnInFloat32(TorchDispatchMode):
    """Within it 16-bit random numbers are drawn in float32 and rounded.

    From the same seed other ones would be drawn in float16: dropout on a GPU would hide other
    elements than in the reference, and the two could not be compared.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or any(
            part in func.__name__ for part in _WHOLE_LAYERS
        ):
            return func(*args, **kwargs)
        narrow: list[torch.dtype] = []

        def wide(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
                narrow.append(value.dtype)
                return value.float()
            if isinstance(value, torch.dtype) and value in _NARROW:
                narrow.append(value)
                return torch.float32
            return value

        widened = tree_map(wide, (args, kwargs))
        if not narrow:
            return func(*args, **kwargs)
        drawn = func(*widened[0], **widened[1])
        if func._schema.is_mutable:
            return args[0].copy_(drawn)

        def rounded(value: Any) -> Any:
            is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
            return value.to(narrow[-1]) if is_wide else value

        return tree_map(rounded, drawn)
