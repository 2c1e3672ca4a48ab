"""Programs in processes of their own that find their framework imported.

Importing a framework takes longer than most programs. So one process imports it and computes
nothing, and each program runs in a fork of it, with a `__main__`, a standard output and an
environment of its own. What has to see the import itself starts an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
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
import time
import traceback
import types
import warnings
from typing import Any

# Read while a framework is imported, so that each value needs a server.
_READ_AT_IMPORT = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS")


@dataclasses.dataclass(frozen=True)
class Finished:
    """What became of a program: its exit status, below 0 for a signal, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


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
        key = tuple((name, environment.get(name)) for name in _READ_AT_IMPORT)
        self._server = _server(module, key)
        self._folder = tempfile.TemporaryDirectory(prefix="lossscale-program-")
        self._pid = self._server.ask(
            {
                "source": source,
                "arguments": [str(argument) for argument in arguments],
                "environment": environment,
                "path": sys.path,
                "folder": self._folder.name,
            }
        )

    def finished(self, timeout: float = 300.0) -> Finished:
        """Waits for the end of the program; one that takes longer is killed."""
        status = self._server.ask({"pid": self._pid, "timeout": timeout})
        folder = pathlib.Path(self._folder.name)
        written = [(folder / name).read_text() for name in ("stdout", "stderr")]
        self._folder.cleanup()
        return Finished(status, *written)


class _Server:
    def __init__(self, module: str, key: tuple[tuple[str, str | None], ...]) -> None:
        given = {name: value for name, value in key if value is not None}
        rest = {name: v for name, v in os.environ.items() if name not in _READ_AT_IMPORT}
        self._process = subprocess.Popen(
            [sys.executable, __file__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**rest, **given},
            text=True,
        )
        atexit.register(self._process.kill)

    def ask(self, request: dict[str, Any]) -> int:
        pipe = self._process
        assert pipe.stdin is not None
        assert pipe.stdout is not None
        pipe.stdin.write(json.dumps(request) + "\n")
        pipe.stdin.flush()
        return int(pipe.stdout.readline())


_server = functools.cache(_Server)


def _fork(request: dict[str, Any]) -> int:
    """Returns the number of the process that runs a program; in that process it does not return."""
    pid = os.fork()
    if pid:
        return pid
    folder = pathlib.Path(request["folder"])
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    sys.argv = ["-c", *request["arguments"]]
    source, name = request["source"], "<program>"
    # AutoGraph reads the source of what it translates.
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(source, name, "exec"), vars(sys.modules["__main__"]))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _ended(pid: int, timeout: float) -> int:
    """Waits for a process and returns its exit status."""
    end = time.monotonic() + timeout
    found, status = os.waitpid(pid, os.WNOHANG)
    while not found:
        if time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            break
        time.sleep(0.01)
        found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status)


def _serve() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        print(_ended(**request) if "pid" in request else _fork(request), flush=True)


if __name__ == "__main__":
    _serve()
