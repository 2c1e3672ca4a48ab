"""The benchmark of the monitor: that it runs, and what it writes."""

import json

import pytest
import tensorflow as tf

from benchmarks import monitoring


@pytest.fixture
def uncompiled():
    """To compile takes most of the time, and is the same wherever a monitor watches."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def found():
    quartiles = {"median": 1.5, "q1": 1.25, "q3": 2.0}
    one = {"seconds_per_step": {"median": 0.002, "q1": 0.001, "q3": 0.003}, "ratio": quartiles}
    return dict.fromkeys(monitoring.VARIANTS, one)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:Even though the .* option is set:UserWarning")
def test_every_variant_trains_and_is_compared_with_no_monitor():
    results = monitoring.measure(rounds=1, steps=2)
    assert list(results) == list(monitoring.VARIANTS)
    assert results["no monitor"]["ratio"]["median"] == 1.0
    assert all(result["ratio"]["median"] > 0 for result in results.values())


def test_the_table_goes_into_the_page_and_the_numbers_into_a_file(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{monitoring.BEGIN}\nold\n{monitoring.END}\nafter\n")
    output = tmp_path / "new" / "monitoring.json"
    asked = []

    def run(backend, rounds, steps):
        asked.append((backend, rounds, steps))
        return found()

    arguments = ["--rounds", "3", "--steps", "4", "--output", str(output), "--page", str(page)]
    assert monitoring.main(arguments, run) == 0
    assert asked == [(backend, 3, 4) for backend in monitoring.BACKENDS]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| jax | 2.00 | 1.50 (1.25-2.00) |" in text
    assert capsys.readouterr().out.strip() in text
    assert set(json.loads(output.read_text())) == set(monitoring.BACKENDS)
