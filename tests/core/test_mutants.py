"""The list of mutants is up to date: `make mutants` takes minutes, so this is looked at here."""

import pathlib

import pytest

from mutants.mutants import ALL

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.file)
def test_the_text_of_a_mutant_stands_in_its_file_once(mutant):
    text = (ROOT / "src" / "lossscale" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    for name in mutant.tests:
        assert (ROOT / name).exists() or not name.startswith("tests/"), name


def test_there_are_mutants_of_every_kind():
    assert len(ALL) >= 40
    assert len({mutant.backend for mutant in ALL}) == 4
