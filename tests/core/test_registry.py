"""The table of frameworks."""

import pytest

from core.source_tree import PACKAGE
from lossscale import registry
from lossscale.packages import BACKENDS, PACKAGES


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_is_a_package_and_has_a_module(backend):
    assert backend in PACKAGES
    assert (PACKAGE / "keras" / "backends" / f"{backend}.py").exists()


def test_rows_differ():
    for column in ("root", "title", "package"):
        rows = {getattr(row, column) for row in registry.FRAMEWORKS}
        assert len(rows) == len(registry.FRAMEWORKS)
    assert {row.root for row in registry.FRAMEWORKS} <= set(PACKAGES)


def test_a_list_of_optimizers_is_of_the_framework_of_the_first():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for given in (optimizer, [optimizer], (optimizer, optimizer)):
        assert registry.framework_of(given).root == "torch"
    for given in ([], (), None, "sgd", torch.optim.SGD, [None]):
        with pytest.raises(TypeError, match="must be an optimizer to wrap"):
            registry.framework_of(given)
