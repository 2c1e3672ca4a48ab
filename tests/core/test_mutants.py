"""The list of mutants keeps up with the sources and with the names of tests."""

import functools
import pathlib
import re

import pytest

from tools.mutants import mutants

ROOT = pathlib.Path(__file__).parents[2]
BACKENDS = {mutants.TENSORFLOW, mutants.TF_KERAS, mutants.JAX, mutants.TORCH}


@functools.cache
def text_of(folder):
    return "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: f"{mutant.place}: {mutant.old}")
def test_a_mutant_fits_the_sources(mutant):
    # What does not fit in one place, or changes nothing, is an `EditError`.
    path, text = mutant.apply(ROOT)
    assert text != path.read_text(encoding="utf-8")
    files = [argument for argument in mutant.tests if "tests/" in argument]
    assert files
    for file in files:
        assert (ROOT / file).exists(), file
    # Of several pytest takes the last, and what is in no test selects none.
    assert mutant.tests.count("-k") <= 1
    if "-k" in mutant.tests:
        selected = mutant.tests[mutant.tests.index("-k") + 1]
        # Shorter words are in the names of parameters.
        words = re.findall(r"\w+_\w+_\w+", selected)
        assert [word for word in words if word not in text_of((ROOT / files[0]).parent)] == []
