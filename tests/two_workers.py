"""Two worker processes on this machine that train together."""

import contextlib
import json
import socket

from forks import Program


def free_ports(count):
    with contextlib.ExitStack() as stack:
        # All are taken before any is given back, so that they differ.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def on_two_workers(source, *arguments, module="keras"):
    """Runs a program in two worker processes; returns how each ended."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    workers = []
    for index in range(2):
        place = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        environment = {"TF_CONFIG": json.dumps(place)}
        workers.append(Program(source, *arguments, environment=environment, module=module))
    return [worker.finished(timeout=120) for worker in workers]
