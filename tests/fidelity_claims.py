"""What `diagnose` claims of the models of `fidelity_cases`, the same on every framework."""

import json
import warnings

import numpy as np
import pytest

import fidelity_cases as cases
import lossscale
from fidelity_cases import variable
from lossscale.diagnostics import (
    GradientReport,
    TrainingHistory,
    Verdict,
    deviation,
    diagnose,
)


def a_token_that_repeats_has_one_gradient(library):
    for factor, verdict in ((1.0, Verdict.NOT_NEEDED), (cases.LOST, Verdict.REQUIRED)):
        model, x, y, expected = cases.repeated_token(library, factor)
        report = diagnose(model, x, y)
        found = next(each for each in report.ranges if "embedding" in each.name)
        # The rows are summed as the step sums them: not the largest row of a sample counts.
        assert found.histogram.size == expected.size
        assert found.histogram.amax == pytest.approx(np.abs(expected).max(), rel=1e-4)
        assert found.histogram.mass == pytest.approx(np.abs(expected).sum(), rel=1e-4)
        measured = variable(report, found.name).unscaled
        assert measured.mass == pytest.approx(np.abs(expected).sum(), rel=1e-4)
        assert report.verdict is verdict


def what_is_lost_inside_shows_in_the_kernel(library):
    x, y = cases.large_inputs()
    reports = [
        diagnose(build(library), x, y) for build in (cases.lost_inside, cases.subclassed_twin)
    ]
    for report in reports:
        # Of shape (3, 4); tf_keras names it after the layer around it.
        kernel = next(each for each in report.measured_variables if each.unscaled.elements == 12)
        assert kernel.unscaled.lost == kernel.unscaled.error == 1.0
        assert report.verdict is kernel.verdict is Verdict.REQUIRED
        # Of float32 alone it looks as if nothing were lost but inside.
        assert report.prediction.verdict is Verdict.RECOMMENDED
        inside = next(each for each in report.tensors if each.name.startswith("activation:"))
        assert inside.flushed_mass == 1.0
        assert report.untapped == ()
    graph, twin = reports
    assert graph.recommended_scale == twin.recommended_scale
    assert kernel.at[twin.recommended_scale].error < 0.05


def a_layer_that_casts_by_itself_is_measured(library):
    x, y = cases.some_inputs()
    for factor, verdict in ((1.0, Verdict.NOT_NEEDED), (cases.LOST, Verdict.REQUIRED)):
        report = diagnose(cases.casting_by_itself(library, factor), x, y)
        assert report.verdict is verdict
    assert variable(report, "cast/kernel").unscaled.lost == 1.0
    assert report.fidelity.reference_scale > 1
    assert "computes in 16 bits whatever it is told to" in str(report)
    assert variable(report, "cast/kernel").at[report.recommended_scale].lost == 0.0


def random_numbers_are_the_same_in_both(library):
    x, y = cases.some_inputs()
    report = diagnose(cases.random_everywhere(library), x, y)
    assert report.verdict is Verdict.NOT_NEEDED
    assert all(each.unscaled.error < 0.01 for each in report.measured_variables)
    assert diagnose(cases.random_everywhere(library, cases.LOST), x, y).verdict is Verdict.REQUIRED


def it_is_what_a_step_computes(library, momentum):
    """The gradients that a training step has given to its optimizer, read from its momentum."""
    x, y = cases.some_inputs()
    gradients = {}
    for policy in ("float32", "mixed_float16"):
        library.set_policy(policy)
        library.keras.utils.set_random_seed(0)
        layers = library.layers
        model = library.keras.Sequential(
            [
                library.keras.Input((3,)),
                layers.Dense(8, activation="relu", name="a"),
                layers.Dense(1, name="b", dtype="float32"),
            ]
        )
        inner = library.keras.optimizers.SGD(1.0, momentum=0.9)
        scaled = lossscale.LossScaleOptimizer(inner, rule=lossscale.FixedScale(4.0))
        cases.compiled(library, model, 2.0**-23, scaled)
        report = diagnose(model, x, y) if policy == "mixed_float16" else None
        model.train_on_batch(x, y)
        gradients[policy] = [np.array(each) for each in momentum(inner)]
    library.set_policy("float32")
    measured = {each.name: each.at[4.0] for each in report.measured_variables}
    names = ["a/kernel", "a/bias", "b/kernel", "b/bias"]
    for name, g, h in zip(names, gradients["float32"], gradients["mixed_float16"], strict=True):
        expected = deviation(g, h)
        found = next(value for key, value in measured.items() if key.endswith(name))
        assert found.elements == expected.elements
        assert found.lost == pytest.approx(expected.lost, abs=0.01)
        assert found.error == pytest.approx(expected.error, rel=0.05, abs=1e-3)
    # It is a case where something is lost, and not all.
    assert 0.05 < max(each.error for each in measured.values()) < 1
    assert report.fidelity.in_use == 4.0
    assert "at 4 (in use)" in str(report)


def quick_is_a_prediction(library):
    x, y = cases.large_inputs()
    report = diagnose(cases.lost_inside(library), x, y, quick=True)
    assert report.fidelity is None
    assert (report.verdict, report.reason) == report.prediction
    assert report.measured_variables == report.measured_layers == ()
    assert "What float16 made" not in str(report)


def a_report_is_written_and_read(library):
    x, y = cases.some_inputs()
    report = diagnose(cases.compiled(library, _dense(library)), x, y)
    text = report.to_json()
    assert GradientReport.from_json(text) == report
    old = {k: v for k, v in json.loads(text).items() if k not in ("fidelity", "untapped")}
    again = GradientReport.from_json(json.dumps(old))
    assert (again.fidelity, again.ranges) == (None, report.ranges)
    assert again.verdict is report.prediction.verdict


def _dense(library):
    return library.keras.Sequential([library.keras.Input((3,)), library.layers.Dense(1)])


def a_monitor_measures_fidelity(library, monitor, folder):
    """Trains twice: what is lost at the scale in use is in the history, and warned of."""
    x, y = cases.some_inputs()
    path = folder / "run.jsonl"
    records, after = {}, {}
    for measures in (True, False):
        library.keras.utils.set_random_seed(0)
        library.set_policy("mixed_float16")
        model = _dense(library)
        library.set_policy("float32")
        inner = library.keras.optimizers.SGD(1.0)
        # The loss is so small that at this scale nothing is left of it in float16.
        scaled = lossscale.LossScaleOptimizer(inner, rule=lossscale.FixedScale(4.0))
        cases.compiled(library, model, cases.LOST, scaled)
        settings = {"fidelity_every": 3, "fidelity_data": (x, y)} if measures else {}
        callback = monitor(path if measures else None, every=2, **settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", lossscale.LossScaleWarning)
            model.fit(x, y, batch_size=4, epochs=1, verbose=0, shuffle=False, callbacks=[callback])
        said = [str(each.message) for each in caught]
        said = [each for each in said if "lost to zero in float16" in each]
        records[measures], after[measures] = said, [np.array(w) for w in model.get_weights()]
    history = TrainingHistory.read(path)
    measured = {record.step: record.fidelity for record in history.records if record.fidelity}
    assert sorted(measured) == [1, 3, 6]
    for found in measured.values():
        assert len(found) == 2
        assert {each["lost"] for each in found.values()} == {1.0}
    # Once, though it is so each time; and nothing that is trained has changed by it.
    assert len(records[True]) == 1
    assert "100 %" in records[True][0]
    assert records[False] == []
    for one, other in zip(after[True], after[False], strict=True):
        assert np.array_equal(one, other)


def a_monitor_says_what_it_cannot_measure(library, monitor):
    x, y = cases.some_inputs()
    model = _dense(library)
    scaled = lossscale.LossScaleOptimizer(library.keras.optimizers.SGD(0.01))
    cases.compiled(library, model, 1.0, scaled)
    callback = monitor(fidelity_every=1, fidelity_data=(x[:, :2], y))
    with pytest.raises(lossscale.errors.ArgumentError, match="`x` must have the shape"):
        model.fit(x, y, verbose=0, callbacks=[callback])

    class Picky(library.layers.Layer):
        def call(self, x):
            if self.compute_dtype == "float16":
                raise TypeError("No float16, please")
            return x

    model = library.keras.Sequential([library.keras.Input((3,)), Picky(), library.layers.Dense(1)])
    scaled = lossscale.LossScaleOptimizer(library.keras.optimizers.SGD(0.01))
    cases.compiled(library, model, 1.0, scaled)
    callback = monitor(fidelity_every=1, fidelity_data=(x, y))
    with pytest.warns(lossscale.LossScaleWarning, match="No float16, please") as caught:
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[callback])
    assert [str(each.message)[:8] for each in caught].count("Fidelity") == 1


EVERYWHERE = [
    a_token_that_repeats_has_one_gradient,
    what_is_lost_inside_shows_in_the_kernel,
    a_layer_that_casts_by_itself_is_measured,
    random_numbers_are_the_same_in_both,
    quick_is_a_prediction,
    a_report_is_written_and_read,
]
"""What holds of every library, on each of its backends."""
