"""The table of frameworks."""

import pytest

from lossscale import registry


def test_a_list_of_optimizers_is_of_the_framework_of_the_first():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for given in (optimizer, [optimizer], (optimizer, optimizer)):
        assert registry.framework_of(given).root == "torch"
    for given in ([], (), None, "sgd", torch.optim.SGD, [None]):
        with pytest.raises(TypeError, match="must be an optimizer to wrap"):
            registry.framework_of(given)
