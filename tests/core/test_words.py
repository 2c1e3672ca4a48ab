"""Idioms that stay out of pages, docstrings, comments and messages, with the words to use."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = [
    ROOT / "README.md",
    ROOT / "PACKAGE.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.py")),
]
NOUNS = "rule|optimizer|number|transformation|model|state|loss|gradient|array|tensor|variable|name"
# An idiom, and what to write.
IDIOMS = {
    rf"(?<!there )\bis no ({NOUNS})": "is not a ...",
    r"\banew\b": "again",
    r"\bthe (one|optimizer|transformation) inside\b": "the inner ...",
    r"\blooks at\b": "checks, reads",
    r"\bof one.s own\b": "custom",
    r"\bwhoever\b": "the code that ..., the user who ...",
    r"what it is that": "(name the noun)",
    r"\bdimensionless\b": "(the type says it)",
    r"\bgoes on\b": "continues",
    r"\bIt is an? `\w*(Error|Exception)`": "(docs/api/errors.md says it once)",
}
# Where an idiom is meant: the name of the file, and a part of its line.
MEANT: dict[str, str] = {}


def idioms_in(text):
    """Yields the number of each line with an idiom, the line, and what to write."""
    for number, line in enumerate(text.splitlines(), start=1):
        for idiom, instead in IDIOMS.items():
            if re.search(idiom, line, re.IGNORECASE):
                yield number, line.strip(), instead


def test_an_idiom_is_found():
    text = "If `rule` is no rule.\nThere is no rule.\nMade anew.\n# It looks at `x`.\n"
    assert [number for number, _, _ in idioms_in(text)] == [1, 3, 4]


def test_no_text_has_an_idiom():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line} -> {instead}"
        for path in TEXTS
        for number, line, instead in idioms_in(path.read_text(encoding="utf-8"))
        if MEANT.get(path.name, "\n") not in line
    ]
    assert len(TEXTS) > 150
    assert len(MEANT) <= 10
    assert not found, "\n".join(found)


def as_text(node):
    """A string in the source, with X for each value that it is formatted with; or None."""
    if isinstance(node, ast.JoinedStr):
        return "".join(as_text(part) or "X" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def test_errors_and_warnings_say_in_15_words_what_is_wrong():
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) and node.args else ""
            if name.endswith(("Error", "warn")):
                text = as_text(node.args[0]) or ""
                found.append(re.split(r"(?<=[.:;!?])\s", text)[0])
    assert len(found) > 200
    assert [first for first in found if len(first.split()) > 15] == []
