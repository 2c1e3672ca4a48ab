"""`lossscale demo` on the backends that tests/cli/ does not run it on."""

import pytest

from backends.support import BACKEND
from lossscale.cli import demo
from lossscale.cli.main import main


@pytest.mark.skipif(BACKEND == "tensorflow", reason="tests/cli/test_demo.py runs it there")
@pytest.mark.usefixtures("compiled_quickly")
def test_the_demo_runs_on_this_backend(tmp_path, capsys, monkeypatch):
    # What a backend reads as it is imported comes too late here.
    monkeypatch.setattr(demo, "_ENVIRONMENT", {})
    picture = tmp_path / "demo.png"
    assert main(["demo", "--backend", BACKEND, "--epochs", "1", "--output", str(picture)]) == 0
    assert f"Keras on {BACKEND}" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
