"""Idioms that stay out of pages, docstrings, comments and messages, with the words to use."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "PACKAGE.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


def test_no_text_has_an_idiom():
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()} -> {instead}"
        for path in (*PAGES, *SOURCES)
        for line in path.read_text(encoding="utf-8").splitlines()
        for idiom, instead in IDIOMS.items()
        if re.search(idiom, line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def as_text(node):
    """A string in the source, with X for each value that it is formatted with."""
    if isinstance(node, ast.JoinedStr):
        return "".join(as_text(part) or "X" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_errors_and_warnings_say_in_15_words_what_is_wrong():
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) and node.args else ""
            if name.endswith(("Error", "warn")):
                found.append(re.split(r"(?<=[.:;!?])\s", as_text(node.args[0]))[0])
    assert len(found) > 200
    assert [first for first in found if len(first.split()) > 15] == []
