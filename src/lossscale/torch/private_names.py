"""Names of PyTorch that are undocumented, or documented as a beta.

Objects that may be missing are taken here. `torch._foreach_*` stand in PyTorch's documentation,
as a beta, and are called by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lossscale.common.private_names import private_name


def _check_and_unscale_(tensors: Sequence[Any], found: Any, factor: Any) -> None:
    for tensor in tensors:
        found.copy_(torch.maximum(found, (~torch.isfinite(tensor).all()).to(found.dtype)))
        tensor.mul_(factor)


check_and_unscale_: Any = private_name(
    "torch",
    "_amp_foreach_non_finite_check_and_unscale_",
    "look at each gradient and multiply it in one pass",
    # It takes two passes.
    fallback=_check_and_unscale_,
)
