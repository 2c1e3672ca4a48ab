"""Two processes that train together over gloo, are killed, and go on from a checkpoint.

Processes of their own, since those that train together are made known to JAX when it starts.
"""

import json

from forks import Program
from two_workers import free_ports

PROGRAM = """
import sys
from frameworks.jax.process import main
from compile_options import compiling_quickly

with compiling_quickly():
    main(*sys.argv[1:])
"""


def both(folder, run_name):
    """What the two processes print."""
    (port,) = free_ports(1)
    workers = [
        Program(
            PROGRAM,
            index,
            port,
            folder,
            run_name,
            environment={"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
            module="frameworks.jax.process",
        )
        for index in range(2)
    ]
    found = [worker.finished() for worker in workers]
    for each in found:
        assert each.stdout.strip(), each.stderr[-3000:]
    return [json.loads(each.stdout.splitlines()[-1]) for each in found]


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
