"""Two processes that train together over gloo.

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


def test_two_processes_agree():
    (port,) = free_ports(1)
    environment = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    module = "frameworks.jax.process"
    workers = [
        Program(PROGRAM, index, port, environment=environment, module=module) for index in range(2)
    ]
    done = [worker.finished() for worker in workers]
    for each in done:
        assert each.stdout.strip(), each.stderr[-3000:]
    first, other = (json.loads(each.stdout.splitlines()[-1]) for each in done)
    assert first == other
    assert set(first) == {"jit", "pmean", "axis_name"}
    assert all(scales == [8.0, 4.0, 4.0, 8.0] for scales, _ in first.values())
