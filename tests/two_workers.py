"""Two worker processes on this machine that train together."""

import json
import os
import socket
import subprocess
import sys


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def on_two_workers(source, *arguments, **environment):
    """Runs a program in two worker processes.

    Returns:
        The last line that each prints, and None for one that failed.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = []
    for index in range(2):
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        workers.append(
            subprocess.Popen(
                [sys.executable, "-c", source, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment, "TF_CONFIG": json.dumps(cluster)},
            )
        )
    lines = []
    try:
        for worker in workers:
            output, errors = worker.communicate(timeout=120)
            failed = worker.returncode != 0
            lines.append(None if failed else output.strip().splitlines()[-1])
            if failed:
                print(errors[-3000:])
    finally:
        for worker in workers:
            worker.kill()
    return lines
