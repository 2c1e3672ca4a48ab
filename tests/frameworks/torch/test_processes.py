"""Several processes take every decision alike; they run once for all tests."""

import itertools
import json

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from forks import Program
from frameworks.torch import cases_of_processes as cases
from frameworks.torch.support import parameter, sgd, wrapped
from lossscale.errors import ArgumentTypeError
from lossscale.torch import GradScaler
from lossscale.torch.ranks import groups_of, local

LIKE_ONE = {"clipped": 1e-5}
"""What one process without the others has, too, and how closely."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process of each set found in each case, by the size of the set."""
    run = f"import sys; from {cases.__name__} import main; main(*sys.argv[1:])"
    folder, sets = tmp_path_factory.mktemp("processes"), {}
    for size in cases.CASES:
        programs = [
            Program(run, number, size, folder, module=cases.__name__) for number in range(size)
        ]
        for program in programs:
            done = program.finished()
            assert done.returncode == 0, done.stderr[-3000:]
        sets[size] = [json.loads((folder / f"{size}-{n}.json").read_text()) for n in range(size)]
    return sets


def flat(value):
    """The numbers in nested lists and dictionaries."""
    parts = value.values() if isinstance(value, dict) else value
    return [n for part in parts for n in flat(part)] if isinstance(value, (dict, list)) else [value]


@pytest.mark.parametrize(
    ("size", "case"), [(size, each.__name__) for size, some in cases.CASES.items() for each in some]
)
def test_several_processes(found, size, case):
    results = []
    for process in found[size]:
        error, result = process[case]
        assert error is None, error
        results.append(result)
    if case.startswith("pipeline"):
        # The stages have different parts, which `pipeline_on_one` puts together.
        return
    assert all(result == results[0] for result in results)
    if case in LIKE_ONE:
        of_one = pytest.approx(flat(found[1][0][case][1]), rel=LIKE_ONE[case], abs=1e-9)
        assert flat(results[0]) == of_one


# Which processes have to agree: process 1 of 4, in this process.

PLACEMENTS = {"R": Replicate(), "S": Shard(0), "P": Partial()}


@pytest.fixture(scope="module")
def mesh():
    """Process 1 of 4 in a mesh of 2 x 2; nothing that is sent arrives anywhere."""
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    finally:
        distributed.destroy_process_group()


def spread(mesh, placements):
    return DTensor.from_local(torch.ones(2), mesh, [PLACEMENTS[p] for p in placements])


def test_one_group_for_each_dimension_that_a_tensor_is_spread_over_in_order(mesh):
    a, b, world = mesh.get_group("a"), mesh.get_group("b"), distributed.group.WORLD
    first, second, thin = spread(mesh, "RS"), spread(mesh, "SR"), init_device_mesh("cpu", (4, 1))
    for tensors, given, expected in (
        ([torch.ones(1), None, spread(mesh, "RR")], None, ()),
        ([first, second], None, (b, a)),
        ([second, first], None, (a, b)),
        ([spread(mesh, "SS"), first], None, (a, b)),
        ([spread(mesh, "RP")], None, (b,)),
        # A given group comes first, and what is derived is left out if it is inside of it.
        ([first], a, (a, b)),
        ([first], [world, a], (world, a)),
        ([], a, (a,)),
        ([first], [], ()),
        # A process that is not in the group has nothing to send, nor one that is alone along it.
        ([], distributed.GroupMember.NON_GROUP_MEMBER, ()),
        ([spread(thin, "SS")], None, (thin.get_group(0),)),
        ([spread(thin, "RS")], None, ()),
    ):
        assert groups_of(tensors, given) == expected


def test_optimizers_that_step_together_agree_over_the_groups_of_all(mesh, monkeypatch):
    asked = []
    monkeypatch.setattr(distributed, "all_reduce", lambda *_, group, **__: asked.append(group))
    weights = [torch.nn.Parameter(spread(mesh, placements)) for placements in ("RS", "SR")]
    for weight in weights:
        weight.grad = weight.detach().clone()
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(1))
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    for each in optimizers:
        scaler.unscale_(each)
    asked.clear()
    for each in optimizers:
        scaler.step(each)
    assert set(asked) == {*mesh.get_all_groups()}


def test_something_else_than_a_group_is_refused(mesh):
    for wrong in ("world", 1, True, [None]):
        with pytest.raises(ArgumentTypeError, match=r"ProcessGroup.*Received.*None derives"):
            groups_of([], wrong)
    with pytest.raises(ArgumentTypeError, match=r"mesh\.get_group"):
        groups_of([], mesh)


def test_what_is_local(mesh):
    plain = torch.ones(3)
    assert local(plain) is plain
    assert local(None) is None
    for placements in itertools.product(PLACEMENTS, repeat=2):
        part = local(spread(mesh, placements))
        assert (type(part), part.tolist()) == (torch.Tensor, [1, 1])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("has_group", [False, True])
@pytest.mark.usefixtures("mesh")
def test_an_overflow_whose_gradients_were_cleared_is_a_step_of_the_loss_that_scaled(has_group, own):
    """The generator's loss reaches the critic, which has had none of its own."""
    ours, theirs = parameter(), parameter()
    settings = {"process_group": distributed.group.WORLD if has_group else None}
    generator, critic = wrapped(sgd(ours), **settings), wrapped(sgd(theirs), **settings)
    (critic if own else generator).backward((ours * theirs).sum() * torch.inf)
    theirs.grad = None
    critic.step()
    assert (critic.steps_skipped, critic.iterations) == (own, own)
