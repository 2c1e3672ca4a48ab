"""One table of frameworks and one list of backends."""

import pytest

from core.source_tree import PACKAGE
from lossscale import registry
from lossscale.packages import BACKENDS, PACKAGES


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_has_a_row_and_a_module(backend):
    assert registry.named(backend).root in PACKAGES
    assert (PACKAGE / "keras" / "backends" / f"{backend}.py").exists()


def test_rows_differ():
    rows = registry.frameworks()
    for column in ("name", "title", "root", "package"):
        assert len({getattr(row, column) for row in rows}) == len(rows)
    assert {row.root for row in rows} <= set(PACKAGES)
