"""Each wrapper keeps what TensorFlow's pages say, or the page says why it does not."""

import contextlib
import pathlib
import re

import pytest

from conformance import page_cells
from conformance.page_matrix import Program, entries
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


def test_the_page_has_the_number_of_the_sentences_and_each_reason():
    page = (DOCS / "api/documented_api.md").read_text(encoding="utf-8")
    number = sum(map(len, (words for each in ENTRIES.values() for words in each.members.values())))
    assert f"The pages have {number} sentences" in page
    reasons = {entry.because for entry in ENTRIES.values() if entry.lacks}
    assert len(re.findall(r"^\| .*\. \|$", page, re.MULTILINE)) >= len(reasons) == 4
    assert [reason for reason in reasons if f"| {reason} |" not in page] == []
