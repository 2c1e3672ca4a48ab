"""The list of mutants keeps up with the sources, and its edits find their places."""

import pathlib

import pytest

import lossscale
from mutants import mutants
from mutants.edits import Edit, EditError

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = pathlib.Path(lossscale.__file__).parent
BACKENDS = {mutants.TENSORFLOW, mutants.TF_KERAS, mutants.JAX, mutants.TORCH}


def test_there_are_mutants_of_every_kind():
    of_rules = [mutant for mutant in mutants.ALL if mutant.part == "rules"]
    assert len(of_rules) >= 8
    assert {mutant.backend for mutant in mutants.ALL} == BACKENDS
    for backend in BACKENDS:
        assert len([mutant for mutant in mutants.ALL if mutant.backend == backend]) >= 5, backend


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: f"{mutant.place}: {mutant.old}")
def test_a_mutant_fits_the_sources(mutant):
    mutant.apply(SOURCES)
    files = [argument for argument in mutant.tests if argument.startswith("tests/")]
    assert files
    for file in files:
        assert (ROOT / file).exists(), file
    # Of several pytest takes the last.
    assert mutant.tests.count("-k") <= 1


SOME = '''"""A module — of this part."""

LIMITS = {"low": 0.0, "high": 1.0}


class Counter:
    # A comment that stays.
    def move(self, seen, by=1):
        self.count += by; seen = seen or "µ"; self.note(seen)
        if seen is None:
            self.reset(0, at=by)
        elif seen.finite:
            self.good = max(self.good + by, self.low(by))
            self.show(seen)
        return self.count, -0.0

    @property
    def low(self):
        def inside():
            return 0
        return inside
'''


@pytest.fixture
def package(tmp_path):
    (tmp_path / "part" / "inner").mkdir(parents=True)
    (tmp_path / "part" / "some.py").write_text(SOME, encoding="utf-8")
    for name in ("one", "two"):
        (tmp_path / "part" / "inner" / f"{name}.py").write_text("def twice(x):\n    return x + x\n")
    return tmp_path


MOVE = "Counter.move"


@pytest.mark.parametrize(
    ("function", "old", "new", "was", "became"),
    [
        (MOVE, "seen.finite", "True", "elif seen.finite", "elif (True)"),
        # How it is formatted does not matter.
        (MOVE, "self .low( # low\nby)", "0", "self.low(by)", "(0)"),
        (MOVE, "self.count += by", "pass", "self.count += by", "pass"),
        # Columns count bytes.
        (MOVE, "self.note(seen)", "pass", "self.note(seen)", "pass"),
        (
            MOVE,
            "self.good = ...\nself.show(seen)",
            "self.good = 0\nself.bad = 0",
            "self.good = max(self.good + by, self.low(by))\n            self.show(seen)",
            "self.good = 0\n            self.bad = 0",
        ),
        (MOVE, "self.reset(...)", "pass", "self.reset(0, at=by)", "pass"),
        (MOVE, "self.low(...)", "...", "self.low(by)", "(by)"),
        (MOVE, "... + by", "... - by", "self.good + by", "(self.good - by)"),
        (MOVE, "-0.0", "0.0", "-0.0", "(0.0)"),
        ("Counter.low.inside", "return ...", "return 1", "return 0", "return 1"),
        ("Counter", "1", "2", "by=1", "by=(2)"),
        ("", "1.0", "2.0", '"high": 1.0', '"high": (2.0)'),
    ],
)
def test_an_edit_changes_one_place(package, function, old, new, was, became):
    path, text = Edit("part" if function else "part.some", function, old, new).apply(package)
    assert path == package / "part" / "some.py"
    assert SOME.count(was) == 1
    assert text == SOME.replace(was, became)


def test_the_part_of_an_edit_can_be_one_module(package):
    path, text = Edit("part.inner.two", "twice", "x + x", "x").apply(package)
    assert (path, text) == (package / "part/inner/two.py", "def twice(x):\n    return (x)\n")


@pytest.mark.parametrize(
    ("function", "old", "new", "message"),
    [
        (MOVE, "self.bad", "0", r"`Counter.move` of part must have `self.bad` once.* 0 times"),
        (MOVE, "by", "0", r"Received: 4 times, in lines \[9, 11, 13, 13\] of some.py. Follow"),
        ("absent", "x", "0", "`absent` of part must be in one module. Received: none. Follow"),
        ("twice", "x + x", "x", "Received: part/inner/one.py, part/inner/two.py. .* the part be"),
        (MOVE, "max(..., self.low(...))", "...", "must have one `...` in `max"),
        (MOVE, "seen.finite", "(seen .finite)", "must be changed by"),
        # Its text would begin in the middle of `elif`.
        (
            MOVE,
            "if seen.finite:\n  self.good = ...\n  self.show(seen)",
            "self.show(seen)",
            "cannot have .* replaced. Replace less or more",
        ),
    ],
)
def test_an_edit_that_does_not_fit_says_so(package, function, old, new, message):
    with pytest.raises(EditError, match=f"(?s){message}"):
        Edit("part", function, old, new).apply(package)
