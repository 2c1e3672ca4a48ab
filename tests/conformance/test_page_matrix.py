"""Each wrapper keeps what TensorFlow's pages say, or the table says why it does not."""

import contextlib
import pathlib

import pytest

from conformance import page_cells
from conformance.page_matrix import Program, entries, table
from conformance.wrappers import BACKEND, KERAS
from pages import DOCS

ENTRIES = entries()
ROOT = pathlib.Path(__file__).parents[2]

if KERAS == "none":
    pytest.skip("every column is of a Keras", allow_module_level=True)

HERE = {"keras": [f"keras-{BACKEND}"], "tf_keras": ["tf_keras-new", "tf_keras-legacy"]}[KERAS]


@pytest.mark.parametrize(
    ("name", "column", "form", "in_function"),
    [
        pytest.param(name, column, *way, id=f"{column}-{way[0]}{'-function' * way[1]}-{name}")
        for name, entry in ENTRIES.items()
        if not entry.test
        for column in HERE
        for way in entry.ways(column)
    ],
)
def test_what_the_pages_say(name, column, form, in_function):
    entry, ask = ENTRIES[name], getattr(page_cells, name)
    lacks = column in entry.lacks
    raises = pytest.raises(Exception, match=entry.error) if lacks else contextlib.nullcontext()
    with raises:
        ask(Program(column, form, in_function))


def test_the_tests_that_entries_name_are_there():
    for path, name in (each.split("::") for entry in ENTRIES.values() for each in entry.test):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_the_table_on_the_page_is_that_of_the_entries():
    page = (DOCS / "api/documented_api.md").read_text(encoding="utf-8")
    assert f"-->\n{table()}\n<!--" in page, "Run `python -m tools.page_tables`."
