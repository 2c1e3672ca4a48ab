"""Counts what a training step asks of a GPU, on a machine without one.

    python -m benchmarks.gpu_counts

writes benchmarks/gpu_counts.json and the tables of the pages that are made of it. They are counts
and no times, so two runs write the same text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks import pages


def counted(framework: str) -> list[pages.Row]:
    """Returns the rows of "torch" or "jax", counted in a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.gpu_{framework}"]
    environment = {**os.environ, "KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    pages.write(pages.COUNTS, {name: counted(name) for name in ("torch", "jax")})
    pages.main()
