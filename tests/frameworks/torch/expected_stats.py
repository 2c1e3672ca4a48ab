"""What a rule that notes is to see of PyTorch's gradients, and what it saw."""

import torch

from recording_rule import EDGES, RecordedStats


def expected(gradients, scale):
    """What is to be seen of unscaled gradients: the largest, two counts, the elements."""
    flat = torch.cat([gradient.detach().flatten().abs() for gradient in gradients])
    finite = bool(flat.isfinite().all())
    counts = [float((flat * scale >= edge).sum()) for edge in EDGES]
    return [float(flat.max()) if finite else torch.inf, *counts, float(flat.numel())]


def noted(saved):
    """The same from the state dictionary of a wrapper or of a scaler."""
    if "rule_state" in saved:
        found = saved["rule_state"]
    else:
        first = saved["param_groups"][0]
        found = {name: first[f"loss_scale_{name}"] for name in RecordedStats._fields[1:]}
    return [found[name] for name in ("largest", "low", "high", "elements")]
