"""The monitor of every front records the same of the same steps, and fails in the same way.

A step's gradient is the batch times the loss scale, and its loss is 0 or NaN. What is recorded is
compared with the rule in plain Python (tests/core/oracle.py).
"""

import importlib
import json
import math
import warnings

import pytest

import lossscale
from conformance.wrappers import BACKEND, KERAS
from core import oracle
from lossscale.errors import ArgumentError, LossScaleWarning
from records import column, read

RULE = lossscale.DynamicScale(8.0, growth_interval=2, min_scale=2.0)
HUGE, NAN = 3e38, math.nan
FINITE, OVERFLOWS = [1.0] * 3, [1.0, HUGE, HUGE, HUGE, 1.0, HUGE, 1.0]


class KerasFit:
    """`fit`, on the backend of this process."""

    name = "net/out/kernel" if KERAS == "keras" else "out/kernel"

    def __init__(self):
        keras = importlib.import_module(KERAS)
        ops = keras.ops if KERAS == "keras" else importlib.import_module("tensorflow")
        mean = ops.mean if KERAS == "keras" else ops.reduce_mean
        out = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="out")
        self.model = keras.Sequential([keras.layers.Input((2,)), out], name="net")
        optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.0), rule=RULE)
        # Where a graph is not the subject, a step runs eagerly.
        eager = {"run_eagerly": BACKEND == "tensorflow", "jit_compile": BACKEND == "jax"}
        self.model.compile(optimizer, lambda y, out: mean(out), **eager)

    def run(self, batches, *args, **settings):
        import numpy as np

        module = importlib.import_module(f"lossscale.{KERAS}")
        monitor = module.LossScaleMonitor(*args, **settings)
        x = np.float32(batches)[:, None] * np.ones(2, np.float32)
        options = {"batch_size": 1, "shuffle": False, "verbose": 0}
        self.model.fit(x, x[:, :1], callbacks=[monitor], **options)
        return monitor

    @property
    def made(self):
        return int(self.model.optimizer.iterations)


class TorchLoop:
    """A loop of PyTorch with the wrapper."""

    name, made, by, fused, settings = "weight", 0, "wrapper", False, {}

    def __init__(self):
        self.returned = []
        import torch

        from frameworks.torch.support import OURS

        self.model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.0, fused=self.fused)
        self.loop = OURS[self.by](inner, rule=RULE, **self.settings)

    def run(self, batches, *args, **settings):
        import torch

        from frameworks.torch.support import train_step, watched

        with lossscale.torch.Monitor(watched(self.loop), self.model, *args, **settings) as monitor:
            for batch in batches:
                train_step(self.loop, loss := self.model(torch.full((1, 2), batch)).mean())
                self.made += 1
                self.returned.append(monitor.step(loss))
                assert monitor.last_record is self.returned[-1] or self.returned[-1] is None
        return monitor


def of_torch(kind, **settings):
    """A loop of PyTorch with other settings, or with the drop-in."""
    by = "scaler" if "scaler" in kind else "wrapper"
    return type(kind, (TorchLoop,), {"by": by, "fused": "fused" in kind, "settings": settings})


OF_TORCH = [
    TorchLoop,
    of_torch("clipping", clip_norm=1e3),
    of_torch("fused"),
    of_torch("fused, device", decide="device"),
    of_torch("scaler"),
    of_torch("scaler, fused"),
]


class OptaxLoop:
    """A loop with Optax, whose steps track overflows."""

    name, made = "w", 0

    def __init__(self):
        self.returned = []
        import jax.numpy as jnp
        import optax

        self.tx = lossscale.optax.loss_scaled(optax.sgd(0.0), rule=RULE, track_overflows=True)
        self.params = {"w": jnp.zeros(2)}
        self.state = self.tx.init(self.params)

    def run(self, batches, *args, **settings):
        import jax
        import jax.numpy as jnp

        @jax.jit
        def step(state, x):
            loss, grads = lossscale.optax.value_and_grad(lambda p: jnp.sum(p["w"] * x))(
                state, self.params
            )
            return loss, self.tx.update(grads, state, self.params)[1]

        monitor = lossscale.optax.Monitor(self.tx, self.params, self.state, *args, **settings)
        with monitor:
            for batch in batches:
                loss, self.state = step(self.state, jnp.full(2, batch))
                self.made += 1
                self.returned.append(monitor.step(self.state, loss))
        return monitor


# A process with Keras has the loops of its backend's library too, which are the same in each.
FRONTS = [] if KERAS == "none" else [KerasFit]
if KERAS != "tf_keras":
    FRONTS += {"torch": OF_TORCH, "jax": [OptaxLoop]}.get(BACKEND, [])


@pytest.fixture(params=FRONTS, ids=lambda front: front.__name__)
def front(request):
    return request.param()


def expected(front, batches, every=1):
    """The dictionaries of the records, in plain Python."""
    finite = [batch == 1.0 for batch in batches]
    after = [scale for scale, _ in oracle.trace(RULE, finite)]
    before = [RULE.initial_scale, *after]
    rows, last_skip = [], 0
    for step, batch in enumerate(batches, start=1):
        skipped, scale = not finite[step - 1], before[step - 1]
        kinds = {HUGE: (2, 0), NAN: (0, 2)}
        infs, nans = next((v for k, v in kinds.items() if k is batch), (0, 0))
        tensors = [{"name": front.name, "infs": infs, "nans": nans}] if front.name else []
        reason = "loss" if batch is NAN else "floor" if scale == RULE.min_scale else "overflow"
        row = {
            "step": step,
            "scale": scale,
            "skipped": skipped,
            "next_scale": after[step - 1],
            "loss": batch if batch is NAN else 0.0,
            "reason": reason if skipped else None,
            "nonfinite": tensors if skipped else [],
            "steps_skipped": step - sum(finite[:step]),
        }
        if step in (1, len(batches)) or step % every == 0:
            if last_skip and not skipped:
                rows.append(last_skip)
            rows.append(row)
            last_skip = 0
        elif skipped:
            unknown = "floor" if scale == RULE.min_scale else "unknown"
            last_skip = {**row, "next_scale": None, "loss": None, "reason": unknown}
    return rows


def plainly(rows):
    """Rows that can be compared: NaN equals NaN, and a last loss may not have been read."""
    return [{**row, "loss": repr(row["loss"])} for row in rows]


def written(rows):
    """Rows as they are in a file: JSON has no NaN."""
    return [{**row, "loss": "'nan'" if row["loss"] == "nan" else row["loss"]} for row in rows]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("batches", [OVERFLOWS, [1.0, HUGE, NAN]], ids=["overflows", "nan"])
def test_what_is_recorded_logged_and_written_is_what_happened(front, batches, every, tmp_path):
    path, logged = tmp_path / "run.jsonl", []
    with warnings.catch_warnings(action="ignore", category=LossScaleWarning):
        monitor = front.run(batches, path, every=every, log=logged.append)
    wanted = plainly(expected(front, batches, every))
    # Keras reports a mean, whose NaN may be of a step that was not sampled.
    if isinstance(front, KerasFit) and every > 1 and NAN in batches:
        wanted[-1] |= {"loss": "None", "reason": "unknown"}
    assert plainly(logged) == wanted
    assert plainly(read(path)) == written(wanted)
    assert list(logged[0]) == list(json.loads(path.read_text().splitlines()[0]))
    assert plainly([monitor.last_record.to_dict()]) == wanted[-1:]
    if not isinstance(front, KerasFit):
        check_returned(front.returned, wanted, every)


def check_returned(returned, wanted, every):
    """Each call returns the record of its step, and None if that was not read."""
    rows = {row["step"]: row for row in wanted}
    for step, record in enumerate(returned, start=1):
        if step == 1 or step % every == 0:
            assert plainly([record.to_dict()]) == [rows[step]]
        else:
            assert record is None


def test_what_log_raises_ends_training_with_the_record_in_the_file(front, tmp_path):
    path, failure = tmp_path / "run.jsonl", RuntimeError("no network")

    def log(record):
        if record["step"] == 2:
            raise failure

    with pytest.raises(RuntimeError) as raised:
        front.run(FINITE, path, log=log)
    assert raised.value is failure
    assert column(path, "step") == [1, 2]
    assert front.made == 2


@pytest.mark.parametrize("kind", ["int", "folder", "no folder", "exists"])
def test_a_bad_path_is_an_error_before_anything_is_trained(front, kind, tmp_path):
    path = {
        "int": 3,
        "folder": tmp_path,
        "no folder": tmp_path / "no" / "run.jsonl",
        "exists": tmp_path / "run.jsonl",
    }[kind]
    (tmp_path / "run.jsonl").write_text("mine")
    with pytest.raises((TypeError, ArgumentError, OSError)):
        front.run(FINITE, path)
    assert front.made == 0
    assert (tmp_path / "run.jsonl").read_text() == "mine"
