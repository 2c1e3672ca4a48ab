"""The programs that a page shows, those in tabs included."""

import pathlib
import re
import textwrap

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def programs(page):
    """Returns the sources of the Python blocks of a page, from top to bottom.

    Args:
        page: A path; a relative one starts in docs/.
    """
    # A block in a tab is indented, and ends at the indentation that it starts with.
    blocks = re.finditer(
        r"^( *)```python\n(.*?)^\1```", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M
    )
    return [textwrap.dedent(block[2]) for block in blocks]
