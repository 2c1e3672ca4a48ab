"""Why a step was skipped: the operation, by name."""

import pytest
import torch

import lossscale
from frameworks.torch.explain_cases import CASES, judged, program


@pytest.fixture(autouse=True)
def _without_onednn():
    """It has no float16 GRU."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def explained_in_training(name):
    """The explanation of a step on a case, and whether the step was skipped."""
    model, (args, kwargs), loss_fn = program(name)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = lossscale.LossScaleOptimizer(inner, initial_scale=CASES[name].scale)
    with lossscale.torch.Monitor(optimizer, model, explain=3) as monitor:
        with torch.autocast("cpu", torch.float16):
            output = model(*args, **kwargs)
        loss = loss_fn(output)
        optimizer.backward(loss)
        optimizer.step()
        monitor.step(loss)
    return optimizer.last_step_skipped, monitor.explanation


@pytest.mark.filterwarnings("ignore:Step 1 was skipped")
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named(name):
    skipped, found = explained_in_training(name)
    assert skipped
    assert judged(name, found) == (True, True, True), f"{found.cause}: {found}"
