"""Programs in processes of their own that find their framework imported.

Importing a framework takes longer than most programs. So one process imports it and computes
nothing, and each program runs in a fork of it, with a `__main__`, a standard output and an
environment of its own. What has to see the import itself starts an interpreter.

All processes of a run of `tests/run.py` ask the same one for their forks, by a socket in the folder
that they share. It ends when the folder is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import linecache
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
import zlib

# Read while a framework is imported, so that each value needs a server.
_READ_AT_IMPORT = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS")
# Read then as well, and the same in all processes; a value from outside wins.
AT_IMPORT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # oneDNN picks summation orders by CPU, so the same test would round differently elsewhere.
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


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
            place=os.getcwd(),
            folder=self._folder.name,
        )

    def finished(self, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Waits for the end of the program; one that takes longer is killed."""
        end = time.monotonic() + timeout
        while (status := self._ask(pid=self._pid)) is None:
            if time.monotonic() > end:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.02)
        folder = pathlib.Path(self._folder.name)
        written = [(folder / name).read_text() for name in ("stdout", "stderr")]
        self._folder.cleanup()
        return subprocess.CompletedProcess([], status, *written)

    def _ask(self, **request: object) -> int | None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self._server))
            with client.makefile("rw") as stream:
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                return json.loads(stream.readline())


@functools.cache
def _folder() -> pathlib.Path:
    if shared := os.environ.get("LOSSSCALE_TEST_SHARED"):
        return pathlib.Path(shared)
    own = tempfile.TemporaryDirectory(prefix="lossscale-forks-", ignore_cleanup_errors=True)
    atexit.register(own.cleanup)
    return pathlib.Path(own.name)


@functools.cache
def _server(module: str, *read_at_import: str | None) -> pathlib.Path:
    """The socket of the process that has imported a module; the first who asks starts it."""
    key = zlib.crc32(repr((module, *read_at_import)).encode())
    # The path of a socket has a hundred characters at most.
    path = _folder() / f"forks-{key:x}"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            given = dict(zip(_READ_AT_IMPORT, read_at_import, strict=True))
            environment = {**AT_IMPORT, **os.environ, **given}
            with open(f"{path}.log", "w") as log:
                server = subprocess.Popen(
                    [sys.executable, __file__, module, path],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={name: value for name, value in environment.items() if value is not None},
                    # What is typed to end the tests does not end it before them.
                    start_new_session=True,
                )
            while not path.exists():
                assert server.poll() is None, pathlib.Path(f"{path}.log").read_text()
                time.sleep(0.02)
            # It is not waited for.
            server.returncode = 0
    return path


def _started(
    source: str, arguments: list, environment: dict, path: list, place: str, folder: str
) -> int:
    """Returns the number of the process that runs a program; in that process it does not return."""
    if pid := os.fork():
        return pid
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    sys.argv = ["-c", *arguments]
    # AutoGraph reads the source of what it translates.
    name = "<program>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    sys.modules["__main__"] = types.ModuleType("__main__")
    status: object = 1
    try:
        exec(compile(source, name, "exec"), vars(sys.modules["__main__"]))
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # To take a framework down in order takes a second, and tests nothing.
    os._exit(status if isinstance(status, int) else 1)


def _ended(pid: int) -> int | None:
    """The exit status of a process, which is below 0 for a signal; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _serve(path: str) -> None:
    """Answers requests one by one, until the folder is gone or nobody has asked for an hour.

    Of a process that has a folder of its own it serves no other, and ends with it.
    """
    asked, parent = time.monotonic(), os.getppid()
    is_shared = "LOSSSCALE_TEST_SHARED" in os.environ
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.part")
        server.listen(64)
        server.settimeout(1.0)
        # Whoever finds it can connect.
        os.rename(f"{path}.part", path)
        while os.path.exists(path) and time.monotonic() - asked < 3600:
            if not is_shared and os.getppid() != parent:
                return
            with contextlib.suppress(TimeoutError):
                client, _ = server.accept()
                asked = time.monotonic()
                with client, client.makefile("rw") as stream:
                    request = json.loads(stream.readline())
                    answer = _ended(**request) if "pid" in request else _started(**request)
                    stream.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module(sys.argv[1])
        if sys.argv[1] == "keras":
            # What Keras imports on each backend as soon as it trains.
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module("tensorflow")
    # What is imported stays: no fork looks through it for garbage.
    gc.collect()
    gc.freeze()
    _serve(sys.argv[2])
