"""From results to pages."""

import json
import pathlib

import pytest

from benchmarks import chart, pages, tables
from benchmarks.methods import MONITORS
from benchmarks.pages import PAGES, markers

REPOSITORY = pathlib.Path(__file__).parents[2]


def method(ratio=1.5, **more):
    """What is found of a method."""
    seconds = {"median": 0.012, "q1": 0.011, "q3": 0.013}
    quartiles = {"median": ratio, "q1": 1.25, "q3": 2.0}
    sizes = {"memory_bytes": 2492, "graph_size": 4108}
    return {"first_step_seconds": 2.0, "seconds": seconds, "ratio": quartiles, **sizes, **more}


def row(case, *names, methods=None, **more):
    """A row of results."""
    methods = {**{name: method() for name in names}, **(methods or {})}
    common = {"point": "", "wrapper": "keras-jax", "mode": "jit", "device": "cpu"}
    return {"case": case, "optimizer": "Adam", **common, "methods": methods} | more


def results(*rows, **more):
    """Results of a run."""
    machine = {"processor": "Some CPU", "cores": 2, "memory_bytes": 2**34, "system": "Linux"}
    machine |= {"architecture": "x86_64", "python": "3.11.0", "gpus": {}}
    about = {"date": "2026-01-02T03:04:05+00:00", "machine": machine, "versions": {"jax": "1.0"}}
    return {**about, "rows": list(rows), "not_run": [], "wrong": []} | more


FAILED = {"peer_fixed": {"does_not_run": "TypeError: unsupported operand"}}
SKIPPED = method(ratio_to_applied={"median": 0.5, "q1": 0.25, "q3": 0.75})
SKIPS = {"ours_dynamic/skipped": SKIPPED, "peer_dynamic/skipped": SKIPPED}
COUNTS = {"host_syncs": 1, "graph_breaks": 4, "operations": 1042}
COUNTS = {f"{part}_{name}": n for name, n in COUNTS.items() for part in ("apply", "train")}
THREE = ("bare", "ours_dynamic", "peer_dynamic")
ROWS = (
    row("big", "bare", "ours_dynamic"),
    row("sparse", "bare", methods=FAILED, optimizer="SGD", device="gpu"),
    row("skip", *THREE, methods=SKIPS, point="10 parameters"),
    row("variables", "bare", "ours_dynamic", point="1,000"),
    row("host_syncs", methods={"ours_dynamic": COUNTS}),
    row("collectives", methods={"bare": {"sums": 1, "bytes": 40_000}}, point="2"),
)
# A method that a row does not have is an empty cell.
LINES = """\
|  | bare, ms | ours, dynamic | peer, fixed |
| keras-jax, jit, big | 12 | 1.50 (1.25-2.00) |  |
| keras-jax, jit, GPU, sparse, SGD | 12 |  | does not run: TypeError |
| keras-jax, jit, skip, 10 parameters | 12 | 1.50 (1.25-2.00) | 1.50 (1.25-2.00) | \
0.50 (0.25-0.75) | 1.50 (1.25-2.00) | 1.50 (1.25-2.00) | 0.50 (0.25-0.75) |
| keras-jax, jit | 1,000 variables | 12 | 1.50 (1.25-2.00) |  |
| ours, dynamic | 1 | 1 | 4 | 4 | 1,042 | 1,042 |
| jax, bare | 2 | 1 | 40,000 |"""


@pytest.mark.parametrize("line", LINES.split("\n"))
def test_a_row_is_a_line(line):
    assert line in tables.page(results(*ROWS)).splitlines()


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0.0 kB"), (2492, "2.5 kB"), (50_016_949, "50.0 MB"), (None, "-")]
)
def test_memory_is_readable(number, text):
    page = tables.page(results(row("big", methods={"bare": method(memory_bytes=number)})))
    assert f"2.0 s · 4,108 · {text}" in page


def test_the_page_says_what_it_was_measured_with_and_what_was_not_run():
    left = [{"what": "jax on a GPU", "why": "there is no GPU"}]
    page = tables.page(results(not_run=left, wrong=["ours: variable 0 is off"]))
    assert "\n- Wrong, and left out: ours: variable 0 is off\n" in page
    assert "- Some CPU, 2 cores, 16 GiB of memory, Linux x86_64\n" in page
    assert "- Python 3.11.0, jax 1.0\n- 2026-01-02\n" in page
    assert page.endswith("- Not run: jax on a GPU, because there is no GPU")


# For each page with one table a row of results, and its line.
OTHERS = {
    "docs/internals/jax_speed.md": (
        row("alone", "bare", "jmp", wrapper="optax", point="adam"),
        "| adam |  |  |  | 1.50 |  |",
    ),
    "docs/internals/speed.md": (
        row("monitor", *MONITORS),
        "| jax | 12.00" + " | 1.50 (1.25-2.00)" * 2 + " |",
    ),
    "docs/internals/pytorch_speed.md": (
        row("alone", "bare", "fixed", wrapper="torch", point="fused, 1"),
        "| fused, 1 | 12.00 | - | - | - | 1.50 | - | - | - | - | - |",
    ),
}


@pytest.mark.parametrize("page", OTHERS)
def test_other_pages_have_one_table(page):
    measured, line = OTHERS[page]
    made = tables.alone(results(measured, row("big", "bare")), PAGES[page][0])
    titles, _, found = made.split("\n")
    assert found == line
    known = (REPOSITORY / page).read_text(encoding="utf-8").replace("| | read", "|  | read")
    assert titles in known.splitlines()


def test_tf_keras_stands_below_keras_among_the_monitors():
    wrappers = ("keras-tensorflow", "tf_keras-new", "keras-torch")
    rows = [row("monitor", *MONITORS, wrapper=wrapper) for wrapper in wrappers]
    lines = tables.alone(results(*rows), "monitoring").splitlines()[2:]
    assert [line.split()[1] for line in lines] == ["tensorflow", "torch", "tf_keras"]


def test_tables_go_between_the_markers_of_the_pages_that_they_are_for(tmp_path, capsys):
    (tmp_path / "docs" / "internals").mkdir(parents=True)
    around = {}
    for page, (name, _) in PAGES.items():
        begins, ends = markers(name)
        assert begins in (REPOSITORY / page).read_text(encoding="utf-8").partition(ends)[0]
        around[page] = f"before\n{begins}\n", f"\n{ends}\nafter\n"
        (tmp_path / page).write_text("old".join(around[page]))
    written = {
        "docs/internals/benchmark_results.md": "### The optimizer alone",
        "docs/internals/pytorch_speed.md": "| AdamW",
    }
    bare, file = "docs/internals/jax_speed.md", tmp_path / "results.json"
    (tmp_path / bare).write_text("no markers\n")
    del around[bare]
    measured = [OTHERS[page][0] for page in ("docs/internals/pytorch_speed.md", bare)]
    file.write_text(json.dumps(results(row("big", "bare"), *measured)))
    for _ in range(2):
        pages.main(str(file), str(tmp_path))
        assert (tmp_path / bare).read_text() == "no markers\n"
        for page, (before, after) in around.items():
            text = (tmp_path / page).read_text()
            # What was not measured keeps its table.
            assert text.startswith(before + written.get(page, "old"))
            assert text.endswith(after)
            assert ("old" in text) == (page not in written)
    assert "has no markers" in capsys.readouterr().err


def test_the_chart_shows_the_tables():
    steps = chart.whole_steps(REPOSITORY / "docs" / "internals")
    assert chart.drawn(steps) == (REPOSITORY / chart.CHART).read_text(encoding="utf-8")
