"""Programs of strangers train as they do without loss scaling on the batches that are finite.

That is the oracle, bit for bit: their own loop, with the framework's own optimizer. One batch
overflows in the runs with loss scaling; the others never see it.
"""

import importlib
import os

import numpy as np
import pytest

BACKEND = os.environ["KERAS_BACKEND"]
KERAS = os.environ.get("LOSSSCALE_TEST_KERAS", "keras")
BAD = 2


def batches_of(convert, step_of_batches):
    """Returns batches of which one is spoiled, and those without the step that it is in."""
    random = np.random.default_rng(0)
    batches = [
        (random.normal(size=(4, 3)).astype("f"), random.normal(size=4).astype("f"))
        for _ in range(8)
    ]
    first = BAD - BAD % step_of_batches
    good = [*batches[:first], *batches[first + step_of_batches :]]
    x, y = batches[BAD]
    batches[BAD] = x, y * np.float32(np.inf)
    return [[tuple(map(convert, batch)) for batch in group] for group in (batches, good)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.isfinite(a).all()
        assert a.tobytes() == b.tobytes(), (a, b)


if BACKEND == "tensorflow":
    import tensorflow as tf

    import lossscale
    from strangers.keras_programs import PROGRAMS

    FAMILIES = {"new": importlib.import_module(KERAS).optimizers}
    if KERAS == "tf_keras":
        FAMILIES["legacy"] = FAMILIES["new"].legacy

    def of_2_4(optimizer):
        return lossscale.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=3)

    def of_2_3(optimizer):
        loss_scale = lossscale.experimental.DynamicLossScale(8.0, 3)
        return lossscale.experimental.LossScaleOptimizer(optimizer, loss_scale)

    @pytest.mark.parametrize("wrap", [of_2_4, of_2_3])
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
    def test_a_program_of_tensorflow(program, family, wrap):
        batches, good = batches_of(tf.constant, PROGRAMS[program])
        optimizers = FAMILIES[family]
        expected = program(lambda optimizer: optimizer, optimizers, good)
        found = program(wrap, optimizers, batches)
        assert_same(found, expected)


elif BACKEND == "torch":
    import torch

    import lossscale
    from strangers.torch_programs import PROGRAMS, WITH_THE_WRAPPER

    class Scaling:
        """The drop-in and the wrapper; with `decide=None`, no loss scaling."""

        def __init__(self, decide):
            self.decide = decide

        def scaler(self):
            if self.decide is None:
                return torch.amp.GradScaler("cpu", enabled=False)
            return lossscale.torch.GradScaler("cpu", init_scale=8.0, growth_interval=3)

        def wrapped(self, optimizer):
            if self.decide is None:
                return optimizer
            for each in optimizer if isinstance(optimizer, list) else [optimizer]:
                for group in each.param_groups:
                    # The optimizers that skip by themselves.
                    group["fused"] = self.decide == "device"
            rule = lossscale.DynamicScale(8.0, growth_interval=3)
            return lossscale.torch.LossScaleOptimizer(optimizer, rule=rule, decide=self.decide)

        def scale(self, optimizer, loss):
            return loss if self.decide is None else optimizer.scale_loss(loss)

    @pytest.mark.parametrize(
        ("program", "decide"),
        [
            *((program, "host") for program in PROGRAMS),
            *((program, "device") for program in WITH_THE_WRAPPER),
        ],
        ids=lambda value: getattr(value, "__name__", value),
    )
    def test_a_program_of_pytorch(program, decide):
        batches, good = batches_of(torch.from_numpy, PROGRAMS[program])
        found = program(Scaling(decide), batches)
        expected = program(Scaling(None), good)
        assert_same([p.detach() for p in found], [p.detach() for p in expected])
