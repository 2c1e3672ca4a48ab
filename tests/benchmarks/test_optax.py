"""The benchmark of the Optax transformation: that it runs, and what it writes."""

import json

from benchmarks import optax


def test_a_row_is_measured_and_its_table_goes_into_the_page(tmp_path, capsys):
    page, output = tmp_path / "page.md", tmp_path / "new" / "optax.json"
    page.write_text(f"before\n{optax.BEGIN}\nold\n{optax.END}\nafter\n")
    arguments = ["--rows", "in 1 array", "--methods", "bare,lossscale", "--quick"]
    assert optax.main([*arguments, "--output", str(output), "--page", str(page)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["methods"]["bare"]["ratio"]["median"] == 1.0
    assert row["methods"]["lossscale"]["ratio"]["median"] > 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| adam, 10M in 1 array |" in text
    assert capsys.readouterr().out.strip() in text


def test_a_row_that_is_not_compiled_has_times_alone(tmp_path):
    output = tmp_path / "optax.json"
    arguments = ["--rows", "not compiled", "--methods", "bare,read,lossscale", "--quick"]
    assert optax.main([*arguments, "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert {name: set(found) for name, found in row["methods"].items()} == {
        name: {"seconds", "ratio"} for name in ("bare", "lossscale")
    }


def test_peers_that_compile_for_minutes_are_left_out():
    most, more = optax.ROWS[0], optax.ROWS[3]
    assert (most.leaves, more.leaves) == (100, 200)
    assert [name for name in optax.METHODS if not optax._runs(more, name)] == ["jmp", "flax"]
    assert all(optax._runs(most, name) for name in optax.METHODS)
