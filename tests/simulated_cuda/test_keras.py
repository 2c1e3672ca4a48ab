"""A step of Keras 3 on PyTorch: no wait and no launch more than Keras' own class."""

import keras
import pytest
import torch

import lossscale
from benchmarks.gpu_torch import Recorder

WAYS = {
    "bare": lambda inner: inner,
    "ours": lambda inner: lossscale.LossScaleOptimizer(inner, initial_scale=2.0**10),
    "Keras": lambda inner: keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=2.0**10),
}
INNERS = {
    "adam": lambda: keras.optimizers.Adam(1e-4),
    "sgd": lambda: keras.optimizers.SGD(1e-4, momentum=0.9),
}


def counted(way, inner):
    """The third call of `apply`, and the variables after it."""
    optimizer = WAYS[way](INNERS[inner]())
    variables = [keras.Variable(torch.ones(100)) for _ in range(10)]
    optimizer.build(variables)
    for _ in range(3):
        loss = torch.full((), 0.01, device="cuda")
        scaled = loss if way == "bare" else optimizer.scale_loss(loss)
        gradients = [scaled.repeat(100) for _ in variables]
        with Recorder() as recorder:
            optimizer.apply(gradients, variables)
    return recorder, [variable.numpy().tolist() for variable in variables]


@pytest.mark.parametrize("inner", INNERS)
def test_a_step_costs_at_most_what_that_of_keras_own_class_costs(inner):
    found = {way: counted(way, inner) for way in WAYS}
    (bare, expected), (ours, numbers), (theirs, _) = found.values()
    assert numbers == expected
    assert len(ours.waits) == len(bare.waits) + 1 <= len(theirs.waits), ours.waits
    more = ours.launches - bare.launches
    # One copy, one check of the copies, and some numbers.
    assert more.total() <= 12, more
    assert ours.launches.total() <= theirs.launches.total(), more
    assert ours.bytes <= theirs.bytes
    assert ours.allocations <= theirs.allocations
