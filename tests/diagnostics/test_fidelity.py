"""Fidelity without a framework: gradients that are made up, so that the right verdict is known."""

import json
import math

import numpy as np
import pytest

from lossscale.diagnostics import (
    Deviation,
    Fidelity,
    FidelityMeter,
    Thresholds,
    Verdict,
    deviation,
    fidelity_at,
)
from lossscale.diagnostics.fidelity_meter import MOST_RUNS_OF_SEARCH, RUNS_OF_A_BATCH
from lossscale.errors import ArgumentError

RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal(500)


def to_float16(values):
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(np.float16)


class Program:
    """Gradients that are rounded to float16 once, and what else goes wrong."""

    def __init__(self, *, forward_error=0.0, own_casts=False):
        self.runs, self.forward_error, self.own_casts = [], forward_error, own_casts

    def __call__(self, batch, scale, *, reference):
        self.runs.append((scale, reference))
        found = {}
        for name, gradient in batch.items():
            exact = np.asarray(gradient, np.float64) * scale
            if not reference:
                # The way forward is the same at every scale, and so is its error.
                noise = np.random.default_rng(1).standard_normal(exact.shape)
                exact = exact * (1 + self.forward_error * noise)
            narrow = self.own_casts or not reference
            found[name] = to_float16(exact) if narrow else exact.astype(np.float32)
        return found


def measured(*batches, predicted=None, in_use=None, **program):
    gradients = Program(**program)
    meter = FidelityMeter(gradients, {name: name[0] for name in batches[0]}, in_use=in_use)
    for number, batch in enumerate(batches):
        meter.add(batch, None if number else predicted)
    found = meter.result()
    assert found.runs == len(gradients.runs)
    return found


def test_a_deviation_is_what_its_words_say():
    g = np.array([3.0, -4.0, 1.0, 0.0, 2.0])
    h = np.array([3.0, 0.0, np.inf, 1.0, 0.0])
    found = deviation(g, h * 8, scale=8.0)
    assert (found.elements, found.nonfinite, found.largest) == (5, 1, 4.0)
    assert found.lost == 6 / 9
    assert found.error == pytest.approx(math.sqrt(16 + 1 + 4) / math.sqrt(9 + 16 + 4))
    assert found.cosine == pytest.approx(9 / math.sqrt(29 * 10))
    assert deviation(g, None).lost == 1.0
    assert deviation(None, h) == Deviation()
    assert deviation([np.nan, 1.0], [0.0, 1.0]).reference_nonfinite == 1
    assert deviation([1j + 1], [1j]).lost == 0.5
    with pytest.raises(ArgumentError, match="shape of its reference"):
        deviation(g, h[:2])


def test_deviations_of_parts_add_up_to_that_of_the_whole():
    g, h = RNG.standard_normal(3 * 2**20 // 2), to_float16(RNG.standard_normal(3 * 2**20 // 2))
    parts = Deviation.total([deviation(g[:100], h[:100]), deviation(g[100:], h[100:])])
    whole = deviation(g, h)
    assert parts == pytest.approx(whole, rel=1e-12)
    assert whole.error == pytest.approx(np.linalg.norm(h - g) / np.linalg.norm(g), rel=1e-12)


def test_gradients_that_fit_need_no_scaling():
    found = measured({"a/w": NORMAL * 1e-2})
    assert found.judge().verdict is Verdict.NOT_NEEDED
    assert found.lowest == 1.0
    # 2**-6.6 times about 3.
    assert found.highest == 2.0 ** math.floor(math.log2(65520 / (np.abs(NORMAL).max() * 1e-2)))


@pytest.mark.parametrize("predicted", [None, 1.0, 2.0**40, 2.0**-40])
@pytest.mark.parametrize("power", [-60, -30, -26, 0, 15, 20])
def test_the_scales_are_found_from_wherever_the_search_begins(power, predicted):
    gradient = np.array([1.0, 1.5, -1.25]) * 2.0**power
    found = measured({"a/w": gradient}, predicted=predicted)
    # 1.5 * 2**15 fits, and 1.5 * 2**16 does not.
    assert found.highest == 2.0 ** min(15 - power, 48)
    assert found.runs <= MOST_RUNS_OF_SEARCH
    expected = {
        -60: Verdict.REQUIRED,
        -30: Verdict.REQUIRED,
        -26: Verdict.REQUIRED,
        20: Verdict.REQUIRED,
    }
    assert found.judge().verdict is expected.get(power, Verdict.NOT_NEEDED)
    assert found.lowest <= found.good <= found.highest
    if power <= -26:
        # 2**-24 is the smallest number; at 2**-22 these three still are exact.
        assert 2.0 ** (-25 - power) <= found.lowest <= 2.0 ** (-22 - power)


def test_between_required_and_not_needed_it_is_recommended():
    # 1 % of the sum of |x| is too small.
    gradient = np.concatenate([np.full(99, 2.0**-10), np.full(2**17, 2.0**-27)])
    found = measured({"a/w": gradient})
    one = found.variables[0].at[1.0]
    assert one.lost == pytest.approx(0.01, rel=0.02)
    verdict, reason = found.judge()
    assert verdict is Verdict.RECOMMENDED
    assert reason.startswith("The gradient of a/w: without scaling 1")
    loose = Thresholds(lost=0.05, required_lost=0.5)
    assert found.judge(loose).verdict is Verdict.NOT_NEEDED
    assert found.judge(Thresholds(required_lost=0.009)).verdict is Verdict.REQUIRED


def test_an_error_of_all_gradients_together_requires_it():
    # Of half the sum of |x|, in numbers just above half of the smallest, all is rounded up to it.
    wrong = NORMAL / np.abs(NORMAL) * 2.0**-24 * 0.52
    alone = measured({"a/w": wrong})
    one = alone.judged()[0].unscaled
    assert (one.lost, one.error > 0.9) == (0.0, True)
    verdict, reason = alone.judge()
    assert verdict is Verdict.REQUIRED
    assert reason.startswith("All gradients together: without scaling 0 % ")
    assert reason.endswith("The worst is that of a/w.")
    # Beside one that is right and larger, it is a matter of one layer.
    assert measured({"a/w": wrong, "b/w": NORMAL * 1e-2}).judge().verdict is Verdict.RECOMMENDED


@pytest.mark.parametrize("error", [0.003, 0.1, 0.4])
def test_an_error_that_no_scale_reduces_is_not_the_scales_fault(error):
    found = measured({"a/w": NORMAL * 1e-2}, forward_error=error)
    one = found.judged()[0].unscaled
    assert one.error == pytest.approx(error, rel=0.3)
    assert found.judge().verdict is Verdict.NOT_NEEDED


def test_rounding_noise_has_no_say():
    found = measured({"a/w": NORMAL * 1e-2, "b/w": NORMAL * 1e-9}, forward_error=2.0)
    assert found.judge().verdict is Verdict.UNKNOWN
    assert "rounding alone" in found.judged()[0].reason


def test_a_gradient_that_is_negligible_in_its_layer_has_no_say():
    found = measured({"a/w": NORMAL, "a/b": NORMAL * 1e-9})
    assert found.judge().verdict is Verdict.NOT_NEEDED
    last = found.judged()[-1]
    assert (last.name, last.has_say, last.unscaled.lost) == ("a/b", False, 1.0)
    assert "negligible" in last.reason
    # Alone in its layer it has one.
    assert measured({"a/w": NORMAL, "b/w": NORMAL * 1e-9}).judge().verdict is Verdict.REQUIRED


def test_no_single_scale_serves_gradients_that_are_too_far_apart():
    found = measured({"large/w": NORMAL * 2.0**10, "small/w": NORMAL * 2.0**-40})
    verdict, reason = found.judge()
    assert verdict is Verdict.INSUFFICIENT
    assert "small/w" in reason
    assert "large/w overflow" in reason
    assert found.judged()[0].name == "small/w"


def test_what_overflows_at_every_scale_is_unknown_and_says_why():
    found = measured({"a/w": np.array([1.0, np.inf]), "b/w": NORMAL})
    assert found.judge().verdict is Verdict.UNKNOWN

    def gradients(batch, scale, *, reference):
        return {"a/w": np.array([1.0, 2.0 if reference else np.nan], np.float32)}

    meter = FidelityMeter(gradients, {"a/w": "a"}, in_use=1024.0)
    meter.add(None)
    meter.add(None)
    found = meter.result()
    verdict, reason = found.judge()
    assert verdict is Verdict.UNKNOWN
    assert "1 of 2 elements are not finite" in reason or "2 of 4" in reason
    assert found.good is found.highest is None
    assert found.runs <= 2 * MOST_RUNS_OF_SEARCH


def test_a_model_that_computes_in_float16_by_itself_has_its_reference_at_a_high_scale():
    tiny = {"a/w": NORMAL * 1e-9}
    found, plain = measured(tiny, own_casts=True), measured(tiny)
    assert (plain.reference_scale, found.reference_scale) == (1.0, found.highest)
    assert found.judge().verdict is plain.judge().verdict is Verdict.REQUIRED
    assert found.variables[0].at[1.0].lost == pytest.approx(1.0)
    assert found.runs <= MOST_RUNS_OF_SEARCH


def test_later_batches_are_measured_at_the_scales_that_are_reported_and_no_other():
    batch = {"a/w": NORMAL * 1e-9}
    first = measured(batch, in_use=2.0**15)
    found = measured(batch, batch, batch, in_use=2.0**15)
    assert found.runs == first.runs + 2 * RUNS_OF_A_BATCH
    at = found.variables[0].at
    for scale in (1.0, found.good, 2.0**15):
        assert at[scale].elements == 3 * NORMAL.size
        assert at[scale].error == pytest.approx(first.variables[0].at[scale].error)


def test_a_later_batch_that_overflows_brings_the_scale_down():
    small, large = {"a/w": NORMAL * 1e-9}, {"a/w": NORMAL * 1e-2}
    found = measured(small, large)
    assert found.good < measured(small).good
    assert found.highest < measured(small).highest
    assert found.variables[0].at[found.good].nonfinite == 0


def test_the_layers_come_with_the_worst_first_and_their_variables_together():
    found = measured({"a/w": NORMAL, "b/w": NORMAL * 1e-9, "b/c": NORMAL * 1e-8})
    worst, other = found.layers()
    assert (worst.name, other.name) == ("b", "a")
    assert [variable.name for variable in worst.variables] == ["b/w", "b/c"]
    both = worst.at(1.0)
    assert both.elements == 2 * NORMAL.size
    by_name = {variable.name: variable.at[1.0] for variable in worst.variables}
    assert both.mass == by_name["b/w"].mass + by_name["b/c"].mass
    assert worst.verdict is Verdict.REQUIRED


def test_it_is_the_same_after_json():
    found = measured({"a/w": NORMAL, "b/w": NORMAL * 1e-9}, in_use=8.0)
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert Fidelity.from_dict(json.loads(text)) == found
    described = found.to_dict()["variables"][1]["at"][0]
    assert (described["scale"], described["lost"], described["error"]) == (1.0, 1.0, 1.0)
    for broken in ({}, {"variables": [1]}, {**found.to_dict(), "color": 1}, None):
        with pytest.raises(ArgumentError, match="fidelity"):
            Fidelity.from_dict(broken)


def test_without_a_measurement_there_is_a_reason():
    meter = FidelityMeter(Program(), {"a/w": "a"})
    assert meter.result().judge() == (Verdict.UNKNOWN, "There was no batch.")
    meter.give_up("It does not run in float16.")
    meter.add({"a/w": NORMAL})
    found = meter.result()
    assert found.judge() == (Verdict.UNKNOWN, "It does not run in float16.")
    assert (found.runs, found.judged(), found.layers()) == (0, (), ())
    assert Fidelity.from_dict(found.to_dict()) == found


def test_one_scale_alone_takes_two_runs():
    gradients = Program()
    found = fidelity_at(gradients, {"a/w": NORMAL * 1e-9}, 2.0**20, {"a/w": "a"})
    assert gradients.runs == [(1.0, True), (2.0**20, False)]
    assert found["a/w"].lost < 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"lost": 0.0},
        {"lost": 0.7},
        {"required_error": 1.5},
        {"insufficient_lost": 0},
        {"noise": 0},
        {"error": "1"},
    ],
)
def test_thresholds_that_cannot_be_used(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong)).removeprefix("required_")):
        Thresholds(**wrong)
