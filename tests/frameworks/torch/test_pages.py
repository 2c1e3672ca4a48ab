"""The programs on the pages about PyTorch run, here where the libraries are imported already."""

import contextlib
import io
import pathlib
import re
import warnings

import pytest

DOCS = pathlib.Path(__file__).parents[3] / "docs"
PAGES = ("from_gradscaler.md", "pytorch_trainers.md")
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE), 1
    )
]


@pytest.mark.parametrize("source", BLOCKS)
def test_a_program_on_a_page_prints_what_it_says(source):
    expected = re.search(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)[1]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        # Lightning and Accelerate warn of their surroundings; a page must not show our warnings.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="lossscale")
        exec(compile(source, "<page>", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip().splitlines()[-1] == expected


def test_the_pages_have_programs():
    assert len(BLOCKS) >= 11
