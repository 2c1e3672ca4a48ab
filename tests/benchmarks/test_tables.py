"""From results to pages."""

import json

import pytest

from benchmarks import pages, tables

QUARTILES = {"median": 1.5, "q1": 1.25, "q3": 2.0}


def method(**more):
    """What is found of a method."""
    seconds = {"median": 0.012, "q1": 0.011, "q3": 0.013}
    return {"first_step_seconds": 2.0, "seconds": seconds, "ratio": QUARTILES, **more}


def row(case, methods, **more):
    """A row of results."""
    common = {"point": "", "shell": "keras-jax", "mode": "jit", "device": "cpu"}
    return {"case": case, "optimizer": "Adam", **common, "methods": methods, **more}


def results(*rows, **more):
    """Results of a run."""
    machine = {
        "processor": "Some CPU",
        "cores": 2,
        "memory_bytes": 2**34,
        "system": "Linux",
        "architecture": "x86_64",
        "python": "3.11.0",
        "gpus": {},
    }
    lists = {"collectives": [], "host_syncs": [], "not_run": [], "wrong": []}
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": machine,
        "versions": {"jax": "1.0"},
        "rows": list(rows),
        **lists,
        **more,
    }


def cells(page, beginning):
    """The cells of the line of a page that begins so."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_stand_with_their_quartiles():
    found = results(row("big", {"bare": method(), "ours_dynamic": method()}))
    page = tables.page(found)
    assert cells(page, "keras-jax, jit, big") == ["keras-jax, jit, big", "12", "1.50 (1.25-2.00)"]
    assert cells(page, " | bare") == ["", "bare, ms", "ours, dynamic"]


def test_a_peer_that_does_not_run_says_so():
    failed = {"does_not_run": "TypeError: unsupported operand"}
    page = tables.page(results(row("sparse", {"bare": method(), "peer_fixed": failed})))
    assert cells(page, "keras-jax, jit, sparse")[-1] == "does not run: TypeError"


def test_a_method_that_a_row_does_not_have_is_an_empty_cell():
    rows = (
        row("mlp", {"bare": method(), "peer_fixed": method()}),
        row("cnn", {"bare": method()}),
    )
    page = tables.page(results(*rows))
    assert cells(page, "keras-jax, jit, cnn") == ["keras-jax, jit, cnn", "12", ""]


def test_skips_are_compared_with_applied_steps():
    to_applied = {"median": 0.5, "q1": 0.25, "q3": 0.75}
    skipped = method(ratio_to_applied=to_applied)
    names = ("ours_dynamic", "peer_dynamic")
    methods = {"bare": method()}
    for name in names:
        methods |= {name: method(), f"{name}/skipped": skipped}
    page = tables.page(results(row("skip", methods, point="10 parameters")))
    found = cells(page, "keras-jax, jit, skip, 10 parameters")
    assert found[1:] == ["12", *["1.50 (1.25-2.00)", "1.50 (1.25-2.00)", "0.50 (0.25-0.75)"] * 2]


def test_a_point_without_the_peer_is_a_point():
    one = row("variables", {"bare": method(), "ours_dynamic": method()}, point="1,000")
    page = tables.page(results(one))
    found = ["keras-jax, jit", "1,000 variables", "12", "1.50 (1.25-2.00)", ""]
    assert cells(page, "keras-jax, jit") == found


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0.0 kB"), (2492, "2.5 kB"), (50_016_949, "50.0 MB")]
)
def test_memory_is_readable(number, text):
    methods = {"bare": method(memory_bytes=number, graph_size=4108)}
    page = tables.page(results(row("big", methods)))
    assert f"2.0 s · 4,108 · {text}" in page


def test_the_page_says_what_it_was_measured_with_and_what_was_not_run():
    left = [{"what": "jax on a GPU", "why": "there is no GPU"}]
    page = tables.page(results(not_run=left, wrong=["ours: variable 0 is off"]))
    assert "\n- Wrong, and left out: ours: variable 0 is off\n" in page
    assert "- Some CPU, 2 cores, 16 GiB of memory, Linux x86_64\n" in page
    assert "- Python 3.11.0, jax 1.0\n- 2026-01-02\n" in page
    assert page.endswith("- Not run: jax on a GPU, because there is no GPU")


def test_the_short_table_has_ours_beside_the_peer():
    peer = method(ratio={"median": 2.25, "q1": 2.0, "q3": 3.0})
    methods = {"bare": method(), "ours_dynamic": method(), "peer_dynamic": peer}
    short = tables.short(results(row("big", methods), row("sparse", methods)))
    assert cells(short, "keras-jax, jit") == ["keras-jax, jit", "1.50 / 2.25", *["- / -"] * 3]


def test_tables_go_between_the_markers_of_a_page(tmp_path, capsys):
    page, plain, file = tmp_path / "page.md", tmp_path / "plain.md", tmp_path / "results.json"
    page.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    plain.write_text("no markers\n")
    file.write_text(json.dumps(results(row("big", {"bare": method()}))))
    pages.main(str(file), str(plain), str(page))
    text = page.read_text()
    assert text.startswith(f"before\n{pages.BEGIN}\n### The optimizer alone")
    assert text.endswith(f"{pages.END}\nafter\n")
    assert "old" not in text
    assert plain.read_text() == "no markers\n"
    assert "has no markers" in capsys.readouterr().err
    pages.main(str(file), str(plain), str(page))
    assert page.read_text() == text
