"""What PyTorch does not document, or documents as a beta, and is used here.

Objects that may be missing are taken here. `torch._foreach_*` stand in PyTorch's documentation,
as a beta, and are called by their names. Of attributes there is a list; the tests hold each
release to it, and hold the sources to the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lossscale.frameworks.common.private_names import private_name


def _check_and_unscale_(tensors: Sequence[Any], found: Any, factor: Any) -> None:
    for tensor in tensors:
        found.copy_(torch.maximum(found, (~torch.isfinite(tensor).all()).to(found.dtype)))
        tensor.mul_(factor)


check_and_unscale_: Any = private_name(
    "torch",
    "_amp_foreach_non_finite_check_and_unscale_",
    "look at each gradient and multiply it in one pass",
    # In two passes.
    fallback=_check_and_unscale_,
)

OF_TORCH = {
    "_foreach_copy_": "many tensors in one call",
    "_foreach_div_": "many tensors in one call",
    "_foreach_mul": "many tensors in one call",
    "_foreach_mul_": "many tensors in one call",
    "_foreach_norm": "many tensors in one call",
}
OF_TENSORS = {"_version": "whether a tensor was written to since"}
OF_AUTOCASTS = {"_enabled": "whether the model casts by itself, set aside for a run in float32"}
OF_OPTIMIZERS = {
    "_optimizer_step_pre_hooks": "the hooks of the optimizer inside",
    "_optimizer_step_post_hooks": "the hooks of the optimizer inside",
    "_optimizer_state_dict_pre_hooks": "the hooks of the optimizer inside",
    "_optimizer_state_dict_post_hooks": "the hooks of the optimizer inside",
    "_optimizer_load_state_dict_pre_hooks": "the hooks of the optimizer inside",
    "_optimizer_load_state_dict_post_hooks": "the hooks of the optimizer inside",
    "_zero_grad_profile_name": "the name of `zero_grad` in profiles",
    "_warned_capturable_if_run_uncaptured": "that it has warned once",
}
OF_SCALERS = {
    "_check_inf_per_device": "what torch's own GradScaler finds for an optimizer",
    "_growth_factor": "what other libraries read of a GradScaler",
    "_backoff_factor": "what other libraries read of a GradScaler",
    "_growth_interval": "what other libraries read of a GradScaler",
}
OF_SOME = {
    "_step_supports_amp_scaling": "of fused optimizers: that they skip by themselves",
    "_device_types": "of process groups: what they can reduce",
    "_local_tensor": "of DTensors: the part of this process",
    "_is_view": "of tensors: whether they are part of another",
    "_orig_mod": "of compiled modules: the module that was compiled",
    "_schema": "of operations: their name, and which arguments they take",
    "_values": "of sparse tensors: the numbers, uncoalesced",
}
