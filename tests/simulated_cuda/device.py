"""A simulated CUDA device with numbers, in a CPU build of PyTorch.

Tensors on "cuda:0" and "cuda:1" are ordinary tensors of PyTorch, and PyTorch's kernels for CPUs
compute their numbers. As on a GPU are dispatch, autograd's device threads, errors where devices
mix, waits of the host, the capture of CUDA graphs, and streams, with a detector of races.
`device.cpp` is the device; it is compiled at its first use, once for each release of PyTorch.

    import simulated_cuda.device  # before torch
    simulated_cuda.device.start()
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

RELEASE = "2.13"
"""The release of PyTorch whose private interfaces `device.cpp` uses."""

CANNOT = {
    "test_a_compiled_forward_pass": "inductor generates kernels of Triton, for a real GPU",
    "test_two_ranks_on_one_device": "other processes have no simulated device",
    **{
        f"test_a_block_is_named[{name}]": "a softmax of float16 in float32 has no kernel on CPUs"
        for name in (
            "a masked row",
            "a mask beyond float16",
            "the entropy of a sure answer",
            "scores of large activations",
            "a temperature that float16 rounds to 0",
        )
    },
}
"""Tests of what the device cannot do, and why.

It knows nothing of time, of a GPU's rounding, of NCCL, of a `torch.Generator` on the device (which
Keras' initializers ask for), and of memory that the allocator gives to another stream.
"""


ON_EACH_GPU = ("test_capture.py", "test_devices_and_streams.py", "test_threads.py")
"""Of the files beside this one those that run on a real GPU, too; tools.gpu asks for them."""

_driver: Any = None


def why_not() -> str:
    """Returns why there cannot be a device here; an empty string if there can."""
    found = importlib.metadata.version("torch")
    if not found.startswith(f"{RELEASE}."):
        return f"the simulated CUDA device is written for PyTorch {RELEASE}, not {found}"
    if not compiler():
        return "the simulated CUDA device needs a C++ compiler (g++, clang++ or $CXX)"
    return ""


def compiler() -> str | None:
    """Returns a C++ compiler, or None."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def compiled() -> pathlib.Path:
    """Returns the compiled device, in the environment of the interpreter."""
    source = pathlib.Path(__file__).with_name("device.cpp")
    torch_folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    named = hashlib.sha256(source.read_bytes() + str(torch_folder).encode()).hexdigest()[:16]
    library = pathlib.Path(sys.prefix, "simulated_cuda", f"{named}.so")
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole: several processes may compile at a time.
        part = library.with_suffix(f".{os.getpid()}")
        includes = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include")
        command = [compiler(), "-O1", "-shared", "-fPIC", "-std=c++20", "-w"]
        command += [f"-I{folder}" for folder in includes]
        command += [source, "-o", part, f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
        part.replace(library)
    return library


def start() -> None:
    """Makes "cuda" the simulated device, in this process and from now on."""
    global _driver
    if _driver is not None:
        return
    # PyTorch asks for a driver while it is imported.
    assert "torch" not in sys.modules, "start the simulated device before torch is imported"
    _driver = ctypes.CDLL(str(compiled()))
    _driver.simulated_take.restype = ctypes.c_int64
    _driver.simulated_take.argtypes = [ctypes.c_bool, ctypes.c_char_p, ctypes.c_int64]
    import torch

    _driver.simulated_start()
    cuda = torch.cuda
    for name, value in _replaced(torch).items():
        if hasattr(cuda, name):
            setattr(cuda, name, value)
    cuda.amp.common.amp_definitely_not_available = lambda: False
    make = torch.UntypedStorage.__new__

    def made(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """A storage: a build for CPUs does not know those of "cuda", as files and copies need."""
        if device is None or torch.device(device).type != "cuda":
            more = {} if device is None else {"device": device}
            return make(cls, *args, **more, **kwargs)
        return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = made
    # A pickle holds a file in PyTorch's old format.
    write, read = torch.UntypedStorage._write_file, torch.UntypedStorage._set_from_file

    def read_on_host(storage: Any, file: Any, *args: Any) -> Any:
        if storage.device.type == "cpu":
            return read(storage, file, *args)
        return storage.copy_(read(torch.UntypedStorage(storage.nbytes()), file, *args))

    torch.UntypedStorage._write_file = lambda storage, *args: write(storage.cpu(), *args)
    torch.UntypedStorage._set_from_file = read_on_host


def _replaced(torch: Any) -> dict[str, Any]:
    """What replaces functions and classes of `torch.cuda`, which ask a real driver."""

    def index(device: Any) -> int:
        given = device if isinstance(device, int) else torch.device(device or "cuda").index
        return exchange(-1) if given is None else given

    def exchange(device: int) -> int:
        return int(_driver.simulated_exchange_device(device))

    class Stream:
        """A class, because annotations name it."""

        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return torch.Stream(torch.device("cuda", index(device)))

    class Event:
        """A class, because annotations name it."""

        def __new__(cls, *_: Any, **__: Any) -> Any:
            return torch.Event("cuda")

    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(index(device))

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: exchange(-1),
        "set_device": lambda device: exchange(index(device)),
        "_exchange_device": exchange,
        # One function under two names confuses PyTorch's compiler.
        "_maybe_exchange_device": lambda device: exchange(device),
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name="simulated", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
        ),
        "is_bf16_supported": lambda including_emulation=True: True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "synchronize": synchronize,
        "set_sync_debug_mode": lambda mode: _driver.simulated_waits_raise(mode in (2, "error")),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda given: given or contextlib.nullcontext(),
        "current_stream": lambda device=None: torch.accelerator.current_stream(index(device)),
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=index(device), device_type=1
        ),
        "is_current_stream_capturing": lambda: _graphs_open > 0,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }


_graphs_open = 0


class CUDAGraph:
    """Operators that are recorded and run again."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.number: int | None = None

    def replay(self) -> None:
        _driver.simulated_replay(self.number)

    def reset(self) -> None:
        if self.number is not None:
            _driver.simulated_forget(self.number)

    __del__ = reset


@contextlib.contextmanager
def graph(into: CUDAGraph, *_: Any, **__: Any) -> Iterator[None]:
    """Captures the operators of a block. While they are captured, no number changes."""
    global _graphs_open
    into.number = _driver.simulated_capture_begin()
    _graphs_open += 1
    try:
        yield
    finally:
        _graphs_open -= 1
        _driver.simulated_capture_end()


def taken(of_races: bool = False) -> list[str]:
    """Returns the waits of the host since the last call, or the races; a real GPU tells none."""
    if _driver is None:
        return []
    buffer = ctypes.create_string_buffer(1 << 16)
    size = _driver.simulated_take(of_races, buffer, len(buffer))
    if size >= len(buffer):
        buffer = ctypes.create_string_buffer(size + 1)
        _driver.simulated_take(of_races, buffer, len(buffer))
    return buffer.value.decode().splitlines()
