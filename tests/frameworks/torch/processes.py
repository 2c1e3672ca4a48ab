"""Runs the cases of `cases_of_processes.py` in processes that talk to each other over gloo.

One interpreter imports PyTorch and forks sets of processes: four that run all cases in a row, of
which one is killed at the end, then two that go on from the checkpoint, then one. It prints what
each process says of each case, as JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import signal
import sys
import time
import traceback

import torch
from torch import distributed

from frameworks.torch import cases_of_processes as cases

PATIENCE = datetime.timedelta(seconds=60)


def work(rank: int, size: int, folder: pathlib.Path, chosen) -> None:
    """What one process of a set does."""
    torch.set_num_threads(1)
    said: dict[str, object] = {}
    if size > 1:
        store = distributed.FileStore(str(folder / f"store-{size}"), size)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE
        )
    report = folder / f"{size}-{rank}.json"
    for name, case in chosen.items():
        start = time.process_time()
        try:
            said[name] = case(folder)
        except BaseException:  # that of a checkpoint is no Exception
            said[name] = {"error": traceback.format_exc()}
        said[f"seconds of {name}"] = round(time.process_time() - start, 2)
        report.write_text(json.dumps(said))
        # The others would wait for it in vain.
        if isinstance(said[name], dict) and "error" in said[name]:
            break


def run_set(size: int, folder: pathlib.Path, chosen) -> list[dict[str, object]]:
    """Forks a set of processes and waits for all; returns what each of them said."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            try:
                work(rank, size, folder, chosen)
            finally:
                # No clean-up of what belongs to the parent, and none that waits for the others.
                os._exit(0)
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            # Those that wait for a process that was killed give up.
            for other in children:
                try:
                    os.kill(other, signal.SIGKILL)
                except ProcessLookupError:
                    continue
    reports = [folder / f"{size}-{rank}.json" for rank in range(size)]
    return [json.loads(report.read_text()) for report in reports]


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    said = {
        str(len(chosen_set)): chosen_set
        for chosen_set in (
            run_set(4, folder, cases.OF_FOUR),
            run_set(2, folder, cases.OF_TWO),
            run_set(1, folder, cases.OF_ONE),
        )
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
