"""Several processes take every decision alike; they run once for all tests."""

import json

import pytest

from forks import Program
from frameworks.torch import cases_of_processes as cases

LIKE_ONE = {"seen": 0.0, "clipped": 1e-5, "minimized": 1e-4}
"""What one process without the others has, too, and how closely."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process of each set found in each case, by the size of the set."""
    run = f"import sys; from {cases.__name__} import main; main(*sys.argv[1:])"
    folder, sets = tmp_path_factory.mktemp("processes"), {}
    for size in cases.CASES:
        programs = [
            Program(run, number, size, folder, module=cases.__name__) for number in range(size)
        ]
        for program in programs:
            done = program.finished()
            assert done.returncode == 0, done.stderr[-3000:]
        sets[size] = [json.loads((folder / f"{size}-{n}.json").read_text()) for n in range(size)]
    return sets


def flat(value):
    """The numbers and names in nested lists and dictionaries."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return [each for part in value for each in flat(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("size", "case"), [(size, each.__name__) for size, some in cases.CASES.items() for each in some]
)
def test_several_processes(found, size, case):
    results = []
    for process in found[size]:
        error, result = process[case]
        assert error is None, error
        results.append(result)
    if case.startswith("pipeline"):
        # The stages have different parts, which `pipeline_on_one` puts together.
        return
    assert all(result == results[0] for result in results)
    if case in LIKE_ONE:
        of_one, rel = flat(found[1][0][case][1]), LIKE_ONE[case]
        for ours, expected in zip(flat(results[0]), of_one, strict=True):
            is_number = not isinstance(expected, str) and rel
            assert ours == (pytest.approx(expected, rel=rel, abs=1e-9) if is_number else expected)
