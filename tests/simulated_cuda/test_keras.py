"""A step of Keras 3 on PyTorch: no wait and no launch more than Keras' own class."""

import pytest

from benchmarks.gpu_torch import KERAS_INNERS, KERAS_WAYS, of_keras


@pytest.mark.parametrize("inner", KERAS_INNERS)
def test_a_step_costs_at_most_what_that_of_keras_own_class_costs(inner):
    found = {way: of_keras(way, inner) for way in KERAS_WAYS}
    (bare, expected), (ours, variables), (theirs, _) = found.values()
    assert [v.numpy().tolist() for v in variables] == [v.numpy().tolist() for v in expected]
    # The decision, and two numbers of the rule.
    assert len(ours.waits) == len(bare.waits) + 3 <= len(theirs.waits), ours.waits
    more = ours.launches - bare.launches
    assert ours.launches.total() <= theirs.launches.total(), more
    assert ours.bytes <= theirs.bytes
    assert ours.allocations <= theirs.allocations
