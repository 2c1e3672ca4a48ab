"""The list of mutants keeps up with the sources, and its edits find their places."""

import pathlib

import pytest

from tools.mutants import mutants

ROOT = pathlib.Path(__file__).parents[2]
BACKENDS = {mutants.TENSORFLOW, mutants.TF_KERAS, mutants.JAX, mutants.TORCH}


def test_there_are_mutants_of_every_kind():
    of_rules = [mutant for mutant in mutants.ALL if mutant.part == "rules"]
    assert len(of_rules) >= 8
    assert {mutant.backend for mutant in mutants.ALL} == BACKENDS
    for backend in BACKENDS:
        assert len([mutant for mutant in mutants.ALL if mutant.backend == backend]) >= 5, backend


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: f"{mutant.place}: {mutant.old}")
def test_a_mutant_fits_the_sources(mutant):
    # What does not fit in one place, or changes nothing, is an `EditError`.
    path, text = mutant.apply(ROOT)
    assert text != path.read_text(encoding="utf-8")
    files = [argument for argument in mutant.tests if "tests/" in argument]
    assert files
    for file in files:
        assert (ROOT / file).exists(), file
    # Of several pytest takes the last.
    assert mutant.tests.count("-k") <= 1
