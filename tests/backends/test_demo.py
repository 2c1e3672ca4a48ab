import os
import subprocess
import sys

from backends.support import BACKEND


def test_the_demo_runs_on_this_backend(tmp_path):
    picture = tmp_path / "demo.png"
    arguments = ["demo", "--backend", BACKEND, "--epochs", "1", "--output", str(picture)]
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-m", "lossscale.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Keras on {BACKEND}" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
