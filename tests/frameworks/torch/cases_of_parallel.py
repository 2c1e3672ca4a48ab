"""Models that are spread over processes: the programs of docs/parallel.md, and who does what when.

`cases_of_processes.main` runs them.
"""

import contextlib
import copy
import functools
import io
import itertools
import json
import os
import re
import sys
import warnings
from types import SimpleNamespace
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

from frameworks.torch.support import OURS, bits, watched, wrapped
from lossscale.torch import gradients, ranks
from pages import programs

# Those before them are lines for a training loop, which cases_of_processes.py has in one.
PIPELINE, CHECKPOINTS, TENSOR_PARALLEL, EXPERTS, *_ = programs("parallel.md")
SAVED = "pipeline"


def names_of(program):
    """Runs a program of the page, and returns its names."""
    names = {"__name__": "page"}
    exec(compile(program, "a page", "exec"), names)
    return names


def spoil(optimizer, parameter):
    """Lets the next step find an infinity in the gradient of a parameter, if one is given."""
    step = type(optimizer).step

    def spoiled(*arguments):
        vars(optimizer).pop("step")
        if parameter is not None:
            parameter.grad.to_local().view(-1)[0] = torch.inf
        return step(optimizer, *arguments)

    optimizer.step = spoiled


def digest(values):
    """Something for JSON that is equal only if each bit is."""
    return {name: repr(bits(value)) for name, value in values.items()}


def whole(part):
    return {name: p.full_tensor() for name, p in part.named_parameters()}


def shown(optimizer):
    return [float(optimizer.loss_scale), int(optimizer.steps_skipped), int(optimizer.iterations)]


def pipeline(folder):
    """Two stages of two shards; in step 4 one shard of one optimizer of one stage overflows."""
    names = names_of(PIPELINE)
    optimizer, part = names["optimizer"], names["part"]
    before = digest(whole(part))
    is_bad = distributed.get_rank() == 1
    spoil(optimizer, optimizer.optimizers[1].param_groups[0]["params"][0] if is_bad else None)
    names["train_step"](4)
    assert digest(whole(part)) == before
    names_of(CHECKPOINTS)["save"](part, optimizer, folder / SAVED)
    for number in (5, 6):
        names["train_step"](number)
    assert shown(optimizer) == [2.0**14, 1, 7]
    return digest(whole(part))


def pipeline_resumed(folder):
    """On two processes, a stage each."""
    names = names_of(PIPELINE.replace("(2, 2)", "(2, 1)"))
    optimizer, part = names["optimizer"], names["part"]
    names_of(CHECKPOINTS)["load"](part, optimizer, folder / SAVED)
    for number in (5, 6):
        names["train_step"](number)
    assert shown(optimizer) == [2.0**14, 1, 7]
    return digest(whole(part))


def one_process():
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
    model = torch.nn.Sequential(*blocks)
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim < 2]
    return model, [
        torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        torch.optim.AdamW(biases, lr=0.01),
    ]


def step_of_one(model, optimizers, number, scale_loss=lambda loss: loss):
    """The step of the pipeline's two micro-batches."""
    generator = torch.Generator().manual_seed(number)
    inputs, targets = (torch.randn(4, 4, generator=generator).chunk(2) for _ in range(2))
    for optimizer in optimizers:
        optimizer.zero_grad()
    for given, target in zip(inputs, targets, strict=True):
        scale_loss(torch.nn.functional.mse_loss(model(given), target)).backward()
    for parameter in model.parameters():
        parameter.grad /= 2
    for optimizer in optimizers:
        optimizer.step()


def pipeline_on_one(folder):
    """Without a pipeline: what was saved, and the plain optimizers from the beginning."""
    model, optimizers = one_process()
    for number in (0, 1, 2, 3, 5, 6):
        step_of_one(model, optimizers, number)
    plain = digest(dict(model.named_parameters()))
    model, optimizers = one_process()
    optimizer = wrapped(optimizers)
    names_of(CHECKPOINTS)["load"](model, optimizer, folder / SAVED)
    for number in (5, 6):
        step_of_one(model, [optimizer], number, optimizer.scale_loss)
    assert shown(optimizer) == [2.0**14, 1, 7]
    assert digest(dict(model.named_parameters())) == plain
    # The processes of one stage have the same, and the stages together the whole model.
    for size, case in ((4, "pipeline"), (2, "pipeline_resumed")):
        files = [folder / f"{size}-{number}.json" for number in range(size)]
        parts = [json.loads(file.read_text())[case][1] for file in files]
        assert {name: value for part in parts for name, value in part.items()} == plain
        assert all(part.items() <= plain.items() for part in parts)


def sharded(program, parameter, plain):
    """Steps of a program of the page; before the second to last one process has an infinity."""
    names = names_of(program)
    optimizer = names["optimizer"]
    spoil(optimizer, parameter(names) if distributed.get_rank() == 1 else None)
    names["train_step"](4)
    assert shown(optimizer) == [2.0**14, 1, 5]
    names["train_step"](5)
    assert shown(optimizer) == [2.0**14, 1, 6]
    # It goes the way of a plain one.
    found = [p.full_tensor().detach() for p in optimizer.param_groups[0]["params"]]
    torch.testing.assert_close(found, [p.detach() for p in plain])


def norms(folder):
    """A norm of the experts' program counts each number once, whatever groups are given."""
    names = names_of(EXPERTS)
    mesh, parameters = names["mesh"], names["optimizer"].param_groups[0]["params"]
    groups = {name: mesh.get_group(name) for name in ("dp", "ep")}
    given = [None, distributed.group.WORLD, *groups.values(), list(groups.values())]
    whole = torch.stack([p.grad.full_tensor().norm() for p in parameters]).norm()
    for group in given:
        info = ranks.ParameterInfo(parameters, group)
        assert abs(gradients.grad_norm(gradients.collect(info), info) / whole - 1) < 1e-6


def tensor_parallel(folder):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in (0, 1, 2, 3, 5):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    sharded(TENSOR_PARALLEL, lambda names: names["model"][0].weight, model.parameters())


def experts(folder):
    torch.manual_seed(0)
    dense = torch.nn.Linear(4, 4)
    stacked = torch.nn.Parameter(torch.randn(2, 4, 4))
    parameters = [*dense.parameters(), stacked]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for number in (0, 1, 2, 3, 5):
        optimizer.zero_grad()
        for place in range(4):
            generator = torch.Generator().manual_seed(4 * number + place)
            tokens = torch.randn(3, 4, generator=generator)
            (dense(tokens) @ stacked[place % 2]).square().mean().backward()
        for parameter in dense.parameters():
            parameter.grad /= 4
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    sharded(EXPERTS, lambda names: names["experts"], parameters)


# Libraries in the shape in which docs/trainers.md uses them; `tools.peers` has them themselves.

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


def libraries():
    """Within it these are imported in the places of torchtitan and Ray."""
    ray_torch = SimpleNamespace(
        TorchTrainer=TorchTrainer,
        get_device=lambda: torch.device("cpu"),
        prepare_model=DistributedDataParallel,
    )
    ray_train = SimpleNamespace(
        torch=ray_torch,
        ScalingConfig=SimpleNamespace,
        report=TorchTrainer.report,
        Checkpoint=SimpleNamespace(from_directory=str),
    )
    modules = {
        "ray": SimpleNamespace(train=ray_train),
        "ray.train": ray_train,
        "ray.train.torch": ray_torch,
        "torchtitan": SimpleNamespace(),
        "torchtitan.components": SimpleNamespace(),
        "torchtitan.components.optimizer": SimpleNamespace(
            OptimizersContainer=OptimizersContainer, ParamGroupConfig=SimpleNamespace
        ),
    }
    return mock.patch.dict(sys.modules, modules)


def recipes(folder):
    """The programs of docs/trainers.md that need processes, and a container resumed."""
    with libraries():
        for program in programs("trainers.md"):
            if "import ray" not in program and "torchtitan" not in program:
                continue
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                names = names_of(program)
            [expected] = re.findall(r"print.*  # (.*)$", program, re.M)
            # One of two stages has a loss to speak of.
            is_first = distributed.get_rank() == 0
            assert printed.getvalue().split() in ([expected.split()] + [[]] * is_first)
            if "optimizers" in names:
                optimizer, part = names["optimizers"], names["model_parts"][0]
                saved = copy.deepcopy([optimizer.state_dict(), part.state_dict()])
                other = names_of(program)
                other["optimizers"].load_state_dict(saved[0])
                other["model_parts"][0].load_state_dict(saved[1])
                for each in (names, other):
                    each["train_step"](torch.ones(4, 8), torch.ones(4, 1))
                assert shown(other["optimizers"]) == shown(optimizer) == [32768.0, 0, 21]
                ours, others = (e["model_parts"][0].state_dict() for e in (names, other))
                assert bits(others) == bits(ours)


# What two processes of a group may do in one step, each in its own order.


WAYS = {
    "step": lambda run: run.step(),
    "unscale": lambda run: (run.unscale_(), run.step()),
    "twice": lambda run: (run.unscale_(), run.unscale_(), run.step()),
    "left out": lambda run: run.step() if run.unscale_() else run.zero_grad(),
}
OF_SCALERS = ("step", "unscale")
SCALED_ON = ((0, 1), (0,), (1,), ())


def orders(folder, by="wrapper"):
    """Each way of the one with each way of the other: scale, counts, and what was applied."""
    rank, is_scaler = distributed.get_rank(), by == "scaler"
    ways_of = OF_SCALERS if is_scaler else WAYS
    for ways, scaled_on, overflow_on, lacking, clip_norm in itertools.product(
        itertools.product(ways_of, ways_of), SCALED_ON, (None, 0, 1), (None, 1), (None, 100.0)
    ):
        if is_scaler and (not scaled_on or clip_norm):
            continue
        weight = torch.nn.Parameter(torch.zeros(2))
        clips = {} if is_scaler else {"clip_norm": clip_norm}
        inner = torch.optim.SGD([weight], lr=1.0, fused=lacking is None)
        run = OURS[by](inner, process_group=distributed.group.WORLD, **clips)
        if rank in scaled_on:
            run.scale_loss(torch.ones(()))
        if rank != lacking:
            weight.grad = torch.full((2,), 8.0 if scaled_on else 1.0)
            if overflow_on == rank:
                weight.grad[0] = torch.nan
        # That no loss was scaled.
        with warnings.catch_warnings(action="ignore"):
            WAYS[ways[rank]](run)
        skips = overflow_on is not None and overflow_on != lacking
        case = ways, scaled_on, overflow_on, lacking, clip_norm
        assert run.loss_scale == (4.0 if skips and scaled_on else 8.0), case
        assert watched(run).steps_skipped == skips, case
        assert weight.tolist() == [-1.0 * (not skips and rank != lacking)] * 2, case
        assert is_scaler or run.iterations == 1, case


def orders_of_scalers(folder):
    orders(folder, "scaler")


CASES = {
    4: (pipeline, tensor_parallel, experts, norms),
    2: (pipeline_resumed, recipes, orders, orders_of_scalers),
    1: (pipeline_on_one,),
}
