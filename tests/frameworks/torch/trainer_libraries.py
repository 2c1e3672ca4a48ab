"""Libraries in the shape in which docs/trainers.md uses them, for tests without them.

`tools.peers` has the libraries themselves.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class OptimizersContainer(Optimizer, Stateful):
    """An optimizer for each part of a model, which is an optimizer itself, as torchtitan has it."""

    Config = SimpleNamespace

    def __init__(self, config, *, model_parts):
        self.model_parts = model_parts
        [group] = config.param_groups
        make, settings = getattr(torch.optim, group.optimizer_name), group.optimizer_kwargs
        self.optimizers = [make(part.parameters(), **settings) for part in model_parts]
        Optimizer.__init__(self, [p for part in model_parts for p in part.parameters()], settings)

    def __iter__(self):
        return iter(self.optimizers)

    def __len__(self):
        return len(self.optimizers)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        flat = functools.partial(get_optimizer_state_dict, options=FLAT)
        found = {}
        for saved in map(flat, self.model_parts, self.optimizers):
            found.update(saved)
        return found

    def load_state_dict(self, state_dict):
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=FLAT)


class TorchTrainer:
    """Ray's: it runs a function on each worker; here the process is one of them."""

    # Metrics without a checkpoint are not kept.
    kept: dict[str, float] | None = None

    def __init__(self, train_func, *, scaling_config):
        assert scaling_config.num_workers == distributed.get_world_size()
        self._run = train_func

    def fit(self):
        self._run()
        return SimpleNamespace(metrics=TorchTrainer.kept)

    @classmethod
    def report(cls, metrics, checkpoint=None):
        if checkpoint is not None:
            assert os.listdir(checkpoint)
            cls.kept = metrics


def _module(name, **names):
    module = ModuleType(name)
    vars(module).update(names)
    return module


def installed():
    """Within it these are imported in the places of torchtitan and Ray."""
    ray_torch = _module(
        "ray.train.torch",
        TorchTrainer=TorchTrainer,
        get_device=lambda: torch.device("cpu"),
        prepare_model=DistributedDataParallel,
    )
    ray_train = _module(
        "ray.train",
        torch=ray_torch,
        ScalingConfig=SimpleNamespace,
        report=TorchTrainer.report,
        Checkpoint=SimpleNamespace(from_directory=str),
    )
    optimizer = _module(
        "optimizer", OptimizersContainer=OptimizersContainer, ParamGroupConfig=SimpleNamespace
    )
    modules = {
        "ray": _module("ray", train=ray_train),
        "ray.train": ray_train,
        "ray.train.torch": ray_torch,
        "torchtitan": _module("torchtitan"),
        "torchtitan.components": _module("torchtitan.components"),
        "torchtitan.components.optimizer": optimizer,
    }
    return mock.patch.dict(sys.modules, modules)
