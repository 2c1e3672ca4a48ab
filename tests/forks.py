"""Programs in processes of their own that find their framework imported.

Importing a framework takes longer than most programs. So one process imports it and computes
nothing, and each program runs in a fork of it, with a `__main__`, a standard output and an
environment of its own. What has to see the import itself starts an interpreter.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import linecache
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings

# Read while a framework is imported, so that each value needs a server.
_READ_AT_IMPORT = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS")


class Program:
    """A program that runs.

    Args:
        source: What it does.
        arguments: What it finds in `sys.argv[1:]`.
        environment: What its environment has besides that of this process.
        module: What is imported before it starts.
    """

    def __init__(
        self,
        source: str,
        *arguments: object,
        environment: dict[str, str] | None = None,
        module: str = "keras",
    ) -> None:
        environment = {**os.environ, **(environment or {})}
        self._server = _server(module, *map(environment.get, _READ_AT_IMPORT))
        self._folder = tempfile.TemporaryDirectory(prefix="lossscale-program-")
        self._pid = self._ask(
            source=source,
            arguments=[str(argument) for argument in arguments],
            environment=environment,
            path=sys.path,
            folder=self._folder.name,
        )

    def finished(self, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Waits for the end of the program; one that takes longer is killed."""
        status = self._ask(pid=self._pid, timeout=timeout)
        folder = pathlib.Path(self._folder.name)
        written = [(folder / name).read_text() for name in ("stdout", "stderr")]
        self._folder.cleanup()
        return subprocess.CompletedProcess([], status, *written)

    def _ask(self, **request: object) -> int:
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


@functools.cache
def _server(module: str, *read_at_import: str | None) -> subprocess.Popen[str]:
    environment = {**os.environ, **dict(zip(_READ_AT_IMPORT, read_at_import, strict=True))}
    server = subprocess.Popen(
        [sys.executable, __file__, module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in environment.items() if value is not None},
        text=True,
    )
    atexit.register(server.kill)
    return server


def _started(source: str, arguments: list, environment: dict, path: list, folder: str) -> int:
    """Returns the number of the process that runs a program; in that process it does not return."""
    if pid := os.fork():
        return pid
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    sys.argv = ["-c", *arguments]
    # AutoGraph reads the source of what it translates.
    name = "<program>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(source, name, "exec"), vars(sys.modules["__main__"]))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _ended(pid: int, timeout: float) -> int:
    """Waits for a process; returns its exit status, which is below 0 for a signal."""
    killing = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
    killing.start()
    _, status = os.waitpid(pid, 0)
    killing.cancel()
    # No thread is there when the next program forks.
    killing.join()
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        print(_ended(**request) if "pid" in request else _started(**request), flush=True)
