"""Counts what a real GPU is asked for in a step, beside the counts of the simulated one.

    python -m tools.gpu_counts

prints a row for each step and way of `benchmarks.gpu_torch` whose counts differ, and how many are
equal: the waits of the host, and the kernels and copies that PyTorch's profiler has seen on the
device. benchmarks/gpu_counts.json holds those of the simulated device. Needs an NVIDIA GPU, and
takes a minute; the status is 1 if loss scaling adds another count than there.
"""

from __future__ import annotations

import collections
import sys
import warnings
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import pages
from benchmarks.gpu_torch import prepared, steps

Counts = tuple[int, int]
"""Waits and launches of a step."""


def counted(*arguments: Any) -> tuple[Counts, Any]:
    """Counts the fourth step of what `prepared` returns.

    Returns:
        Waits and launches, and what was launched, by name.
    """
    made, loss = prepared(*arguments)
    for _ in range(3):
        made.backward(loss())
        made.step()
    value = loss()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        made.backward(value)
        made.step()
    waits = 0
    launches: collections.Counter[str] = collections.Counter()
    for event in profiler.events():
        # PyTorch marks the step of an optimizer, which is no launch.
        is_mark = event.name.startswith("Optimizer.")
        if event.device_type == torch.autograd.DeviceType.CUDA and not is_mark:
            # The copy that a wait waits for is no launch of its own in the rows.
            launches[event.name] += not event.name.startswith("Memcpy DtoH")
        # The profiler itself waits for the device when it ends.
        waits += event.name in ("cudaStreamSynchronize", "cudaEventSynchronize")
    return (waits, launches.total()), launches


def main() -> int:
    """Prints the rows."""
    warnings.simplefilter("ignore")
    rows = pages.read(pages.COUNTS)["torch"]
    expected = {(row["step"], row["way"]): (row["waits"], row["launches"]) for row in rows}
    bare, known = dict[str, Any](), dict[str, Any]()
    equal, differ = 0, 0
    for step, arguments in steps():
        way, (found, launches) = arguments[0], counted(*arguments)
        if way == "bare":
            bare[step], known[step] = found, launches
        there, adds = expected[step, way], found[1] - bare[step][1]
        if (there[0], there[1] - expected[step, "bare"][1]) == (found[0], adds):
            equal += 1
            if there != found:
                print(f"{step} | {way} | simulated {there} | here {found}: adds as much")
            continue
        differ += 1
        more = {k: n - known[step][k] for k, n in launches.items() if n != known[step][k]}
        print(f"{step} | {way} | simulated {there} | here {found} | adds {adds}: {more}")
    print(f"{torch.cuda.get_device_name()}: {equal} add as many as simulated, {differ} do not")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
