"""Writes the tables into the pages: `python -m benchmarks.pages RESULTS`."""

from __future__ import annotations

import json
import pathlib
import sys

from benchmarks import tables

PAGES = {
    "bench": ("docs/internals/benchmark_results.md", tables.page),
    "optax": ("docs/internals/speed.md", tables.alone),
    "monitoring": ("docs/internals/speed.md", tables.alone),
    "torch_native": ("docs/internals/speed.md", tables.alone),
}
"""Maps the name in markers to the page and the function that writes its tables."""


def markers(name: str) -> tuple[str, str]:
    """Returns the markers before and after tables."""
    return f"<!-- {name}: make bench -->", f"<!-- end of {name} -->"


def insert(page: pathlib.Path, text: str, begins: str, ends: str) -> None:
    """Replaces the text between two markers of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(begins)
    _, end, after = rest.partition(ends)
    if not begin or not end:
        print(f"{page} has no markers {begins} and {ends}; it stays as it is", file=sys.stderr)
        return
    page.write_text(f"{before}{begins}\n{text}\n{ends}{after}", encoding="utf-8")


def main(results: str, root: str = ".") -> None:
    """Writes the tables of all results into the pages of a checkout."""
    found = json.loads(pathlib.Path(results).read_text(encoding="utf-8"))
    for name, (page, text) in PAGES.items():
        if tables.sections(found, name):
            insert(pathlib.Path(root, page), text(found, name), *markers(name))


if __name__ == "__main__":
    main(*sys.argv[1:])
