"""Two processes that train together over gloo, are killed, and go on from a checkpoint.

Processes of their own, since those that train together are made known to JAX when it starts.
"""

import json
import os
import pathlib
import subprocess
import sys

from two_workers import free_ports

PROGRAM = pathlib.Path(__file__).with_name("process.py")


def both(folder, run_name):
    """What the two processes print, and their exit statuses."""
    (port,) = free_ports(1)
    workers = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(index), str(port), folder, run_name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]
    try:
        found = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for output, errors in found:
        assert output.strip(), errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in found]


def test_two_processes_agree_and_go_on_from_a_checkpoint_bit_for_bit(tmp_path):
    first, other = both(str(tmp_path), "first")
    assert first == other
    assert set(first) == {"jit", "pmean", "axis_name"}
    assert all(scales == [8.0, 4.0, 4.0, 8.0] for scales, _ in first.values())
    resumed, other = both(str(tmp_path), "resumed")
    assert resumed == other
    scales, weights = resumed["jit"]
    assert scales == [4.0, 8.0]
    assert weights == first["jit"][1]
