"""Writes the tables into pages: `python -m benchmarks.pages RESULTS README DOCUMENT`."""

from __future__ import annotations

import json
import pathlib
import sys

from benchmarks import tables

BEGIN, END = "<!-- bench: make bench -->", "<!-- end of bench -->"


def insert(page: pathlib.Path, text: str, begins: str = BEGIN, ends: str = END) -> None:
    """Replaces what stands between two markers of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(begins)
    _, end, after = rest.partition(ends)
    if not begin or not end:
        print(f"{page} has no markers {begins} and {ends}; it stays as it is", file=sys.stderr)
        return
    page.write_text(f"{before}{begins}\n{text}\n{ends}{after}", encoding="utf-8")


def main(results: str, readme: str, document: str) -> None:
    """Writes the short table into the README and all tables into the document."""
    found = json.loads(pathlib.Path(results).read_text(encoding="utf-8"))
    insert(pathlib.Path(readme), tables.short(found))
    insert(pathlib.Path(document), tables.page(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
