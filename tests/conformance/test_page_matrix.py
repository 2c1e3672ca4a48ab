"""Each wrapper keeps what TensorFlow's pages say, or the table says why it does not."""

import contextlib
import html
import pathlib
import re

import pytest

from conformance import page_cells, results
from conformance.page_matrix import Program, entries, table
from conformance.wrappers import BACKEND, KERAS
from documents.pages import blocks
from pages import DOCS

ENTRIES = entries()
ROOT = pathlib.Path(__file__).parents[2]
PAGES = ROOT.parent / "shared" / "seeds"

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
    assert page == results.with_table(page, table()), "Run `make table`."


# --- The entries are what the pages say, and all that they say ----------------------------------

# What no wrapper could keep or break.
_SAYS_NOTHING = (
    # Headings and links.
    r"^(\W*(Arguments|Args|Raises|Returns|Example|For example|Methods|Properties):?\s*)+$",
    r"View source|doc for an ?example|Used in the (notebooks|guide)|Learn more$",
    r"^#+ Class `?LossScaleOptimizer|Aliases:$|^(# )?tf[.\w]+$|Initializes this loss scale opt",
    # Advice, and what it costs, which docs/performance.md measures.
    r"reduces ?performance|small performance overhead|Recommended to keep as True",
    r"typically no risk of underflow|See the mixed precision guide",
    # An argument that no signature has.
    r"global_step",
)


def _letters(text):
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _plain(page):
    return html.unescape(re.sub(r"<[^>]*>|\]\(\S*\)|^```.*$", "", page, flags=re.M))


def _prose(page):
    """A page without its programs, which tests/documents/test_pages.py runs."""
    for block in blocks(page):
        if block.kind != "signature":
            page = page.replace(block.text.strip(), "\n\n")
    return _plain(page)


@pytest.mark.skipif(not PAGES.is_dir(), reason="the pages are not beside this checkout")
def test_every_entry_is_on_a_page_and_every_sentence_of_the_pages_is_an_entry():
    pages = [path.read_text("utf-8") for path in sorted(PAGES.glob("*.txt"))]
    said = [
        _letters(words)
        for entry in ENTRIES.values()
        for each in (*entry.members.values(), entry.again)
        for words in each
    ]
    texts = "|".join(_letters(_plain(page)) for page in pages)
    assert [words for words in said if words not in texts] == []
    members = {member for entry in ENTRIES.values() for member in entry.members}
    assert set(re.findall(r'itemprop="property" content="(\w+)"', pages[0])) - members == set()
    sentences = [s for page in pages for s in re.split(r"(?<=[.:])\s+|\n\s*\n", _prose(page))]
    everything, long = "|".join(said), [words for words in said if len(words) > 13]
    missing = {
        " ".join(sentence.split()): None
        for sentence in sentences
        if _letters(sentence) not in everything
        and not any(words in _letters(sentence) for words in long)
        and not re.search("|".join(_SAYS_NOTHING), " ".join(sentence.split()))
    }
    assert list(missing) == []
