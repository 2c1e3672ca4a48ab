"""The recipes of docs/trainers.md with torchtitan and Ray, and torchao's optimizers.

`python -m tools.peers.large_trainers` takes some minutes. It runs where these are installed, in an
environment of its own (CONTRIBUTING.md has the commands), and says of each what came of it.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import pathlib
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import distributed, multiprocessing

import lossscale

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "trainers.md"
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)


def checked(program: str) -> str:
    """Runs a program, and returns what it printed if that is what it says."""
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, str(PAGE), "exec"), {"__name__": "page"})
    [expected] = re.findall(r"print.*  # (.*)$", program, re.MULTILINE)
    assert printed.getvalue().split() in ([], expected.split()), printed.getvalue()
    return expected


def stage(rank: int, store: str, program: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(store, 2), rank=rank, world_size=2
    )
    checked(program)
    distributed.barrier()
    # No clean-up, which would wait for the other.
    os._exit(0)


def torchtitan() -> str:
    [program] = [each for each in PROGRAMS if "torchtitan" in each]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(stage, (f"{folder}/store", program), nprocs=2)
    return "a pipeline of two stages"


def ray() -> str:
    [program] = [each for each in PROGRAMS if "import ray" in each]
    return checked(program)


def torchao() -> str:
    """Its optimizers of 8 and 4 bits: bit-equal to themselves without loss scaling."""
    from torchao import optim

    makers: dict[str, Callable[[Any], Any]] = {
        "AdamW8bit": lambda p: optim.AdamW8bit(p, lr=0.1),
        "AdamW4bit": lambda p: optim.AdamW4bit(p, lr=0.1),
        "_AdamW": lambda p: optim._AdamW(p, lr=0.1, bf16_stochastic_round=False),
    }
    for name, make in makers.items():
        ends = []
        for wrap in (False, True):
            weight = torch.nn.Parameter(torch.ones(8, 512))
            inner = make([weight])
            optimizer = lossscale.torch.LossScaleOptimizer([inner]) if wrap else inner
            for step in range(4):
                if step == 2 and not wrap:
                    continue
                optimizer.zero_grad()
                targets = torch.randn(8, 512, generator=torch.Generator().manual_seed(step))
                loss = (weight - targets).square().sum() * (torch.inf if step == 2 else 1.0)
                (optimizer.scale_loss(loss) if wrap else loss).backward()
                optimizer.step()
            ends.append(weight.detach())
        assert torch.equal(*ends), name
    return ", ".join(makers)


def main() -> int:
    failed = 0
    for package in (torchtitan, ray, torchao):
        name = package.__name__
        try:
            version = importlib.metadata.version(name)
            print(f"{name} {version}: {package()}", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: {traceback.format_exc()}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
