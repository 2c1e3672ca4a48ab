"""The extractor that takes the code out of documentation pages."""

import ast

import pytest

from documents.pages import blocks, signature_of


def test_fenced_blocks_are_found_with_their_lines():
    page = "Prose.\n\n``` python\na = 1\n```\n\nMore.\n\n```\n>>> a\n1\n```\n"
    assert [(b.text, b.kind, b.line) for b in blocks(page)] == [
        ("a = 1\n", "code", 4),
        (">>> a\n1\n", "doctest", 10),
    ]


def test_the_space_that_a_crawl_put_before_the_first_line_goes():
    (block,) = blocks("```\n a = 1\nif a:\n  a = 2\n \n```\n")
    assert block.text == "a = 1\nif a:\n  a = 2\n"


def test_a_fence_that_is_never_closed_is_an_error():
    with pytest.raises(ValueError, match="line 2 is never closed"):
        blocks("```\na = 1\n")


def test_paragraphs_of_code_are_found_where_the_fences_were_lost():
    page = "pkg.Name\n\nMethods\n\nReturns the sum.\n\na = 1\nb = a + 1\nb\n2\n\n0.5\n\nname text\n"
    assert [(b.text, b.line) for b in blocks(page)] == [("a = 1\nb = a + 1\nb\n2\n", 7)]


def test_a_signature_is_told_from_code():
    assert signature_of("f()") == ("f", [], {})
    name, parameters, defaults = signature_of("@classmethod\nmake(\n    cls,\n    a,\n    b=2\n)\n")
    assert (name, parameters) == ("make", ["a", "b"])
    assert {key: ast.unparse(value) for key, value in defaults.items()} == {"b": "2"}


@pytest.mark.parametrize("code", ["f(1)", "a.f(b)", "a = f(b)", "f(b)\nf(c)", "f(", "f(b, ...)"])
def test_other_code_is_no_signature(code):
    assert signature_of(code) is None
