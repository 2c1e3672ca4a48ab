"""The list of mutants keeps up with the sources."""

import pathlib

import pytest

import lossscale
from mutants import mutants

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = pathlib.Path(lossscale.__file__).parent


def test_there_are_mutants_of_every_kind():
    assert len(mutants.ALL) >= 70
    assert len({mutant.backend for mutant in mutants.ALL}) == 4
    assert all(
        len(kind) >= 8 for kind in (mutants.RULES, mutants.ARRAYS, mutants.STEPS, mutants.SAVED)
    )


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: f"{mutant.file}: {mutant.old}")
def test_what_a_mutant_replaces_stands_in_its_file_once(mutant):
    source = (SOURCES / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    assert mutant.new != mutant.old
    for name in mutant.tests:
        assert (ROOT / name).exists() or not name.startswith("tests/"), name
