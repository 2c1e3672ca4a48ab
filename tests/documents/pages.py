"""Takes the code blocks out of a documentation page, as they stand there.

The crawls kept the text in different ways: some lost the fences and hold code as paragraphs.
"""

from __future__ import annotations

import ast
import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Block:
    """Code of a page, without its fence; `kind` is "signature", "doctest" or "code"."""

    text: str
    kind: str


def blocks(page: str) -> list[Block]:
    """Returns the blocks of a page, in order."""
    found = _fenced(page) if "```" in page else _paragraphs(page)
    return [Block(text, _kind(text)) for text in map(_tidy, found)]


def _fenced(page: str) -> list[str]:
    prose_and_code = re.split(r"^```.*\n", page, flags=re.M)
    if len(prose_and_code) % 2 == 0:
        raise ValueError("A fence is never closed.")
    return prose_and_code[1::2]


def _paragraphs(page: str) -> list[str]:
    return [paragraph for paragraph in re.split(r"\n\s*\n", page) if _is_code(paragraph)]


def _is_code(text: str) -> bool:
    """Whether it is Python that does something; a headline can be a name, with dots or without."""
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    return any(
        not (
            isinstance(s, ast.Expr) and isinstance(s.value, (ast.Name, ast.Attribute, ast.Constant))
        )
        for s in statements
    )


def _tidy(text: str) -> str:
    # A crawl that lost the indentation of a block's first line put one space there.
    return re.sub(r"^ (?! )", "", text).rstrip() + "\n"


def _kind(text: str) -> str:
    if text.startswith(">>> "):
        return "doctest"
    return "signature" if signature_of(text) is not None else "code"


def signature_of(text: str) -> tuple[str, list[str], dict[str, ast.expr]] | None:
    """Returns a signature's name, its parameters in order and its defaults; None for other code.

    A signature is a call of a bare name whose positional arguments are bare names, and nothing
    else but a `@classmethod` before it.
    """
    try:
        statements = ast.parse(text.removeprefix("@classmethod\n")).body
    except SyntaxError:
        return None
    match statements:
        case [ast.Expr(ast.Call(ast.Name(name), positional, keywords))]:
            if not all(isinstance(argument, ast.Name) for argument in positional):
                return None
            parameters = [argument.id for argument in positional if isinstance(argument, ast.Name)]
            defaults = {keyword.arg or "**": keyword.value for keyword in keywords}
            return name, [p for p in (*parameters, *defaults) if p != "cls"], defaults
    return None
