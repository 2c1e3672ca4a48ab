"""Each wrapper runs where it was asked to: `tools.gpu` asks for a GPU."""

import os

from conformance.recordings import GRADIENTS, VALUES
from lossscale import DynamicScale


def test_it_runs_on_the_device_that_was_asked_for(wrapper):
    harness = wrapper.make(VALUES, "sgd", DynamicScale(8.0))
    harness.step(GRADIENTS)
    asked = os.environ.get("LOSSSCALE_TEST_DEVICE", "cpu")
    assert harness.device() == {"cuda": "gpu"}.get(asked, asked)
