"""Two worker processes on this machine that train together."""

import json
import socket

from fresh import Program


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def on_two_workers(source, *arguments, module="keras", **environment):
    """Runs a program in two worker processes.

    Returns:
        The last line that each prints, and None for one that failed.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = []
    for index in range(2):
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        given = {**environment, "TF_CONFIG": json.dumps(cluster)}
        workers.append(Program(source, *arguments, environment=given, module=module))
    lines = []
    for worker in workers:
        done = worker.finished(timeout=120)
        failed = done.returncode != 0
        lines.append(None if failed else done.stdout.strip().splitlines()[-1])
        if failed:
            print(done.stderr[-3000:])
    return lines
