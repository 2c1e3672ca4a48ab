"""What `diagnose` and the monitor say of models with a `train_step` of their own."""

import functools
import warnings

import numpy as np
import pytest

import fidelity_cases
import lossscale
import own_step_cases as cases
from fidelity_cases import variable
from lossscale.callbacks import LossScaleMonitor
from lossscale.diagnostics import TrainingHistory, Verdict, deviation, diagnose
from own_step_cases import LIBRARY, SCALES, Contrastive, Gan, Vae, made

LOST = fidelity_cases.LOST
KINDS = [Vae, Contrastive] + ([Gan] if LIBRARY.backend != "jax" else [])
SCALE = 4.0


pytestmark = pytest.mark.usefixtures("compiled_quickly")


def sgd(rate=2.0**-40):
    # After a first step with momentum its slots are the gradients times the rate, and a rate that
    # small leaves the weights as they are for a second network in the same step.
    return LIBRARY.keras.optimizers.SGD(rate, momentum=0.5)


def wrapped(scale=SCALE):
    return lossscale.LossScaleOptimizer(sgd(), rule=lossscale.FixedScale(scale))


def optimizers(kind, make):
    return (make(), make()) if issubclass(kind, Gan) else make()


def trained(model, x, y):
    """The gradients that one real step gives to the optimizers, in the order of the variables."""
    # For one step a graph of TensorFlow is not worth its while.
    model.run_eagerly = LIBRARY.backend == "tensorflow"
    model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    several = (
        [model.g_optimizer, model.d_optimizer] if isinstance(model, Gan) else [model.optimizer]
    )
    inner = [getattr(each, "inner_optimizer", each) for each in several]
    slots = [LIBRARY.numpy(each) for one in inner for each in one.momentums]
    return [np.array(each, np.float64) * -(2.0**40) for each in slots]


def measured(report):
    return [variable(report, each.name) for each in report.fidelity.variables]


@pytest.mark.parametrize(
    ("kind", "scales"),
    [*((kind, SCALES[0]) for kind in KINDS), *((Contrastive, scales) for scales in SCALES[1:])],
)
def test_it_is_what_a_step_gives_to_its_optimizers(kind, scales):
    """The oracle is training itself: one real step in float32, and one in mixed_float16."""
    factor = 2.0**-22
    steps = {}
    for policy in ("float32", "mixed_float16"):
        model, x, y = made(
            kind, factor, policy=policy, optimizer=optimizers(kind, wrapped), scales=scales
        )
        # Of a float32 model the tests below have one for each kind.
        report = diagnose(model, x, y, batch_size=16) if policy == "mixed_float16" else None
        steps[policy] = trained(model, x, y)
    assert report.caveats == ()
    assert report.fidelity.in_use == SCALE
    assert f"by {kind.__name__}.train_step" in str(report)
    found = measured(report)
    assert len(found) == len(steps["float32"])
    for each, g, h in zip(found, *steps.values(), strict=True):
        expected = deviation(np.float32(g), np.float32(h))
        at = each.at[SCALE]
        assert at.elements == expected.elements
        assert at.mass == pytest.approx(expected.mass, rel=1e-3)
        assert at.lost == pytest.approx(expected.lost, abs=0.01)
        assert at.error == pytest.approx(expected.error, rel=0.05, abs=1e-3)
    # It is a case where something is lost, and not all.
    assert 0.01 < max(each.at[SCALE].error for each in found) < 1


@functools.cache
def scaling(kind, factor):
    """The report on a step that scales its loss."""
    return diagnose(*made(kind, factor, optimizer=optimizers(kind, wrapped)))


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_mends_what_is_lost(kind):
    for factor, verdict in ((1.0, Verdict.NOT_NEEDED), (LOST, Verdict.REQUIRED)):
        report = scaling(kind, factor)
        assert report.verdict is report.prediction.verdict is verdict
        # Without a loss of `compile`: all is from the step.
        assert report.caveats == ()
    assert {each.at[report.recommended_scale].lost for each in report.measured_variables} == {0.0}
    assert all(each.kind.value == "variable" for each in report.tensors)


def forgetting(kind, factor):
    """The report on a step that does not scale its loss, and what it says of that."""
    model, x, y = made(kind, factor, optimizer=optimizers(kind, wrapped), scales="")
    report = diagnose(model, x, y)
    name = "d_optimizer" if issubclass(kind, Gan) else "optimizer"
    (said,) = report.caveats
    assert said.startswith(f"{kind.__name__}.train_step does not scale its loss")
    assert f"self.{name}." in said
    assert ("too small" in said) == (LIBRARY.backend != "tensorflow")
    assert said in str(report)
    # Whatever the optimizer's scale is, these gradients are without one.
    assert report.fidelity.in_use == 1.0
    return report


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_forgets_to_scale_is_told_so(kind):
    # What scaling would do is the same as in the step that does scale.
    report, other = forgetting(kind, LOST), scaling(kind, LOST)
    assert report.verdict is Verdict.REQUIRED
    assert report.recommended_scale == other.recommended_scale
    scale = report.recommended_scale
    for one, with_a_scale in zip(measured(report), measured(other), strict=True):
        assert one.at[scale].error == pytest.approx(with_a_scale.at[scale].error, rel=0.2)


def test_a_step_that_forgets_to_scale_is_told_so_where_it_does_no_harm():
    assert forgetting(Contrastive, 1.0).verdict is Verdict.NOT_NEEDED


# Of the second kind of three there is nothing to be kept that the others have not.
@pytest.mark.parametrize(("kind", "eager"), [(KINDS[0], True), (KINDS[-1], False)])
def test_the_model_is_left_as_it_was(kind, eager):
    def state(model):
        several = (
            [model.g_optimizer, model.d_optimizer] if issubclass(kind, Gan) else [model.optimizer]
        )
        arrays = [*model.variables, *model.tracker.variables]
        arrays += [each for one in several for each in one.variables]
        return {
            "arrays": [np.array(LIBRARY.numpy(each)) for each in arrays],
            "optimizers": several,
            "steps": model.steps,
            "attributes": [sorted(vars(layer)) for layer in model._flatten_layers()],
            "policies": [layer.dtype_policy for layer in model._flatten_layers()],
        }

    def same(one, other):
        assert one.keys() == other.keys()
        for key in one.keys() - {"arrays"}:
            assert one[key] == other[key], key
        for a, b in zip(one["arrays"], other["arrays"], strict=True):
            assert np.array_equal(a, b)

    rates = functools.partial(wrapped_at, 0.1)
    model, x, y = made(kind, optimizer=optimizers(kind, rates))
    untouched, *_ = made(kind, optimizer=optimizers(kind, rates))
    for each in (model, untouched):
        each.run_eagerly = eager
        each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    before = state(model)
    diagnose(model, x, y, batch_size=8, batches=2)
    same(before, state(model))
    # The states that nobody thought of show in what comes next.
    for each in (model, untouched):
        each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    one, other = state(model), state(untouched)
    same({"arrays": one["arrays"]}, {"arrays": other["arrays"]})


def wrapped_at(rate):
    inner = LIBRARY.keras.optimizers.SGD(rate, momentum=0.5)
    return lossscale.LossScaleOptimizer(inner, rule=lossscale.FixedScale(SCALE))


@pytest.mark.skipif(LIBRARY.backend == "jax", reason="its step has no place to clip")
def test_clipping_in_the_step_is_seen():
    model, x, y = made(Contrastive, optimizer=wrapped(), scales="get_scaled_loss", clips=2.0**-10)
    report = diagnose(model, x, y, batch_size=16, quick=True)
    assert report.total.amax == 2.0**-10


def test_a_gradient_by_the_formula():
    model, x, y = made(Contrastive, optimizer=sgd())
    kernel = np.array(LIBRARY.numpy(model.trainable_variables[0]), np.float64)
    report = diagnose(model, x, y, batch_size=16)
    if LIBRARY.backend == "jax":
        expected = 2 / 64 * x.T @ (x @ kernel - 1)
    else:
        apart = (x - y).astype(np.float64)
        expected = 2 / 64 * apart.T @ (apart @ kernel)
    (found,) = report.measured_variables
    assert found.unscaled.mass == pytest.approx(np.abs(expected).sum(), rel=1e-4)
    assert found.unscaled.largest == pytest.approx(np.abs(expected).max(), rel=1e-4)


def test_a_step_that_calls_that_of_keras_is_measured_as_that():
    x, y = fidelity_cases.some_inputs()
    own, plain = (
        diagnose(cases.compiled(kind, 2.0**-24), x, y, batch_size=16)
        for kind in (cases.Through, LIBRARY.keras.Model)
    )
    assert own.caveats == ()
    assert own.verdict is plain.verdict
    assert own.recommended_scale == plain.recommended_scale
    for one, other in zip(own.fidelity.variables, plain.fidelity.variables, strict=True):
        assert one.at[1.0].lost == pytest.approx(other.at[1.0].lost, abs=0.01)
        assert one.at[1.0].mass == pytest.approx(other.at[1.0].mass, rel=1e-3)


def test_a_step_is_given_an_optimizer_that_scales():
    report = diagnose(*made(cases.Guarded, LOST, optimizer=sgd(), scales=None))
    assert report.verdict is Verdict.REQUIRED
    assert report.caveats == ()


@pytest.mark.skipif(LIBRARY.backend == "jax", reason="its steps have one optimizer and one loss")
def test_a_loss_that_is_not_scaled_beside_one_that_is():
    report = diagnose(*made(cases.HalfScaled, LOST, optimizer=(sgd(), sgd()), scales=None))
    (said,) = report.caveats
    assert said.startswith("HalfScaled.train_step scales no loss for self.g_optimizer")
    lost = [each.at[report.fidelity.highest].lost for each in report.fidelity.variables]
    # The generator has the first four variables: at no scale is anything left of its gradients.
    assert lost == [1.0] * 4 + [0.0] * 4


@pytest.mark.skipif(LIBRARY.backend == "jax", reason="a layer is no function of its values there")
def test_a_gradient_within_the_loss_is_not_scaled():
    reports = [
        diagnose(*made(cases.Penalized, LOST, optimizer=sgd(), scales=scales), batch_size=16)
        for scales in ("", SCALES[0])
    ]
    for report in reports:
        assert report.verdict is Verdict.REQUIRED
        (found,) = report.measured_variables
        assert found.at[report.recommended_scale].error < 0.01
    assert [len(report.caveats) for report in reports] == [1, 0]


class Twice(Contrastive):
    """Trains the same variables twice in a step: first by a large loss, then by a small one."""

    def parts(self):
        part = self.trainable_variables, self.optimizer
        return [(self.own_loss, *part), (lambda data: self.own_loss(data) * LOST, *part)]


@pytest.mark.skipif(LIBRARY.backend == "jax", reason="its steps have one optimizer and one loss")
def test_each_gradient_of_a_variable_counts():
    report = diagnose(*made(Twice, optimizer=sgd()), batch_size=16, batches=1)
    (found,) = report.measured_variables
    (kernel,) = report.ranges
    assert found.unscaled.elements == kernel.histogram.size == 2 * 12
    exponents = [bin.exponent for bin in kernel.histogram.bins]
    assert exponents[0] < -30 < exponents[-1]


class Failing(Contrastive):
    def train_step(self, *arguments):
        raise RuntimeError("There is no step here")


def test_a_step_that_does_not_run_is_said():
    model, x, y = made(Failing, optimizer=sgd())
    with pytest.raises(lossscale.errors.ArgumentError) as raised:
        diagnose(model, x, y)
    assert any("There is no step here" in note for note in raised.value.__notes__)
    model.compile(sgd(), "mse")
    report = diagnose(model, x, np.zeros((16, 4), np.float32))
    assert report.verdict is Verdict.NOT_NEEDED
    (said,) = report.caveats
    assert said.startswith("Failing has a train_step of its own, which was not run: ")
    assert "There is no step here. Measured is the loss that compile was given" in said
    assert said in str(report)
    assert any(each.kind.value != "variable" for each in report.tensors)


class Elsewhere(Contrastive):
    """Trains with an optimizer that nobody can find."""

    def train_step(self, *arguments):
        return {}


def test_a_step_that_trains_nothing_is_said():
    model, x, _ = made(Elsewhere, optimizer=sgd())
    model.compile(sgd(), "mse")
    (said,) = diagnose(model, x, np.zeros((16, 4), np.float32)).caveats
    assert "it gives no gradient to an optimizer" in said


@pytest.mark.parametrize("scales", [SCALES[0], ""], ids=["scales", "forgets"])
def test_a_monitor_measures_it(scales, tmp_path):
    # So large a scale that nothing is lost by a step that does scale.
    rule = lossscale.FixedScale(2.0**34)
    optimizer = lossscale.LossScaleOptimizer(sgd(), rule=rule)
    model, x, y = made(Vae, LOST, policy="mixed_float16", optimizer=optimizer, scales=scales)
    path = tmp_path / "run.jsonl"
    monitor = LossScaleMonitor(
        path,
        framework="tf_keras" if cases.TF_KERAS else "keras",
        fidelity_every=2,
        fidelity_data=(x, y),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lossscale.LossScaleWarning)
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[monitor])
    records = TrainingHistory.read(path).records
    found = [record.fidelity for record in records if record.fidelity]
    assert len(found) == 3
    # What is done, and not what scaling would do.
    assert {each["lost"] for one in found for each in one.values()} == {0.0 if scales else 1.0}
