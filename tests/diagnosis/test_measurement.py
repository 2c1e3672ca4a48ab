"""Measuring models whose float16 is written down: each gradient is rounded as numbers are.

And the reports on them.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale import DynamicScale
from lossscale.diagnosis.measurement import (
    MARGIN,
    TARGETS,
    GradientAccuracy,
    Measurement,
    Pass,
    measure,
)
from lossscale.diagnosis.report import Report, Verdict, recommend
from lossscale.explain.text import Failure, Origin, explained

OVERFLOW = Origin(Failure.TOO_LARGE, "square", "norm", largest_result=1e6)
RNG = np.random.default_rng(0)


def spread(low, high, size=200):
    """Gradients of both signs whose magnitudes are spread between two powers of two."""
    rng = np.random.default_rng(0)
    magnitudes = 2.0 ** rng.uniform(low, high, size)
    return (magnitudes * rng.choice([-1, 1], size)).astype(np.float32)


class Model:
    """Gradients that float16 rounds as it rounds numbers, and outputs.

    Args:
        gradients: The gradients by name.
        casts: The names of gradients that are float16 in the reference too.
        wide: The names of those that float16 does not round.
        ends: What is not finite in float16: "the loss", "the targets" or nothing.
    """

    def __init__(self, gradients, loss=1.0, noise=(), casts=(), wide=(), ends=""):
        self.gradients, self.ends = gradients, ends
        self.loss, self.noise, self.casts, self.wide = loss, noise, casts, wide

    def __call__(self, batch, scale, half):
        return Pass(
            math.nan if half and self.ends == "the loss" else self.loss,
            {key: self.rounded(key, g, scale, half, batch) for key, g in self.gradients.items()},
            not half or self.ends != TARGETS,
        )

    def rounded(self, name, gradient, scale, half, batch):
        if gradient is None:
            return None
        whole = gradient.astype(np.float64) * batch
        if name in self.wide or (not half and name not in self.casts):
            return (whole * scale).astype(np.float32)
        if name in self.noise:
            return (whole * scale * RNG.choice([-3, 9], whole.shape)).astype(np.float32)
        with np.errstate(over="ignore"):
            return (whole * scale).astype(np.float16).astype(np.float32)

    def largest(self):
        return max(np.abs(g).max() for g in self.gradients.values())

    def measured(self, *batches, **keywords):
        batches = batches or (1.0, 1.0)
        return measure(self, batches, max_batches=len(batches), **keywords)


@pytest.mark.parametrize(
    ("operation", "derivative"),
    [
        ("div", lambda x: x**-2),
        ("reciprocal", lambda x: x**-2),
        ("rsqrt", lambda x: x**-1.5 / 2),
        ("log", lambda x: 1 / x),
        ("sqrt", lambda x: x**-0.5 / 2),
    ],
)
def test_float16_holds_the_derivative_at_the_epsilon_that_is_advised(operation, derivative):
    found = explained(Origin(Failure.ZERO, operation, "norm"))
    epsilon = float(found.advice.partition("epsilon of ")[2].split()[0])
    assert derivative(epsilon) < 65504


@pytest.mark.parametrize(("low", "verdict"), [(-6, "not needed"), (-30, "needed")])
def test_a_large_gradient_in_float32_limits_no_scale(low, verdict):
    gradients = {"w": spread(low, low + 6), "large": spread(30, 34)}
    alone = Model({"w": gradients["w"]}).measured()
    found = Model(gradients, wide=["large"]).measured()
    assert recommend(found).verdict == verdict
    assert found.lowest_exponent == alone.lowest_exponent
    assert found.highest_exponent == alone.highest_exponent
    assert "to overflow is w" in " ".join(str(Report("model", "", found)).split())


@given(low=st.integers(-60, 0), width=st.integers(1, 18))
@settings(max_examples=60, deadline=None)
def test_bottom_and_top_are_where_float16_begins_and_ends(low, width):
    gradient = spread(low, low + width)
    found = Model({"w": gradient}).measured()
    largest = float(np.abs(gradient).max())
    rounding = np.array(65519.9)
    top = math.floor(math.log2(rounding / largest))

    def error(exponent):
        with np.errstate(over="ignore"):
            scaled = (gradient.astype(np.float64) * 2.0**exponent).astype(np.float16)
        return np.linalg.norm(
            scaled.astype(np.float64) / 2.0**exponent - gradient
        ) / np.linalg.norm(gradient)

    wanted = next((e for e in range(127) if error(e) <= 0.1), 0)
    verdict = recommend(found)
    if top < MARGIN or wanted > 0:
        assert verdict.verdict is Verdict.NEEDED
        assert found.highest_exponent == top
        assert found.lowest_exponent == wanted
        assert found.passes <= 30
        first, lowest = (math.log2(s) for s in (verdict.rule.initial_scale, verdict.rule.min_scale))
        assert lowest <= first <= top
        assert wanted == 0 or (first >= wanted and lowest == wanted)
    else:
        assert verdict.verdict is Verdict.NOT_NEEDED
        assert found.passes <= 6


@pytest.mark.parametrize("inside", [*range(10), 30, 60])
def test_the_highest_scale_is_found_wherever_it_is_below_that_of_the_gradients(inside):
    class Inner(Model):
        """Within the model, gradients are larger, in float16."""

        def rounded(self, name, gradient, scale, half, batch):
            by = 2.0**inside if half else 1.0
            found = super().rounded(name, gradient, scale * by, half, batch)
            return found / np.float32(by)

    found = Inner({"w": spread(-2, 3)}).measured()
    # A second scale of 2**8 that is finite is enough to estimate the highest.
    highest = 13 if inside <= 5 else 13 - inside
    assert found.highest_exponent == highest
    assert (recommend(found).verdict is Verdict.NEEDED) == (highest < MARGIN)


def test_the_worst_batch_counts():
    found = Model({"w": spread(-10, -4)}).measured(1.0, 2.0**-24, 2.0**13)
    alone = Model({"w": spread(-10, -4)})
    assert found.lowest_exponent == alone.measured(2.0**-24).lowest_exponent > 0
    assert found.highest_exponent == alone.measured(2.0**13).highest_exponent
    # The first batch asks for nothing, and is looked at again once the second one does.
    first = Model({"w": spread(0, 8)})
    late = first.measured(1.0, 2.0**-33)
    assert recommend(late).verdict is Verdict.NEEDED
    assert late.highest_exponent == math.floor(math.log2(65520 / first.largest()))


def test_noise_has_no_vote():
    model = Model({"w": spread(-6, 0), "noise": spread(-40, -38)}, noise=("noise",))
    found = model.measured()
    assert recommend(found).verdict is Verdict.NOT_NEEDED
    assert [each.name for each in found.gradients if each.is_wrong] == ["noise"]
    assert found.passes <= 14
    alone = Model({"noise": spread(-6, 0)}, noise=("noise",)).measured()
    assert recommend(alone).verdict is Verdict.UNKNOWN
    assert "wrong at every scale" in alone.unknown
    # It asks for no scale beside a gradient that needs one.
    needy = {"w": spread(-32, -24)}
    right = Model(needy).measured()
    found = Model({**needy, "noise": spread(-40, -38)}, noise=("noise",)).measured()
    assert found.lowest_exponent == right.lowest_exponent
    assert found.highest_exponent == right.highest_exponent


# lowest, top, and the exponents of the advised rule; none where no single scale serves.
RULES = [
    (0, 3, (-1, -21)),
    (0, -30, (-34, -54)),
    (0, -125, (-126, -126)),
    (4, 26, (15, 4)),
    (10, 13, (10, 10)),
    (10, 17, (13, 10)),
    (4, 5, (4, 4)),
    (5, 5, None),
    (6, 5, None),
]


@pytest.mark.parametrize(("lowest", "highest", "exponents"), RULES)
def test_the_rule_follows_from_the_lowest_and_the_highest_scale(lowest, highest, exponents):
    lost = {0: 0.9, 20: 0.001} if lowest else {0: 0.001}
    found = Measurement(
        (GradientAccuracy("w", 1.0, lost),), lowest_exponent=lowest, highest_exponent=highest
    )
    verdict = recommend(found)
    if exponents is None:
        assert (verdict.verdict, verdict.rule) == (Verdict.NO_SINGLE_SCALE, None)
    else:
        assert verdict.verdict is Verdict.NEEDED
        scales = (verdict.rule.initial_scale, verdict.rule.min_scale)
        assert scales == tuple(2.0**exponent for exponent in exponents)


class Explained(Model):
    """With a reason for what is wrong at every scale."""

    def explain(self, batch, scale, half):
        return explained(OVERFLOW)


def test_a_gradient_of_ordinary_size_that_is_wrong_at_every_scale_is_no_noise():
    gradients = {"w": spread(-6, 0), "wrong": spread(-8, -6)}
    found = Model(gradients, noise=("wrong",)).measured()
    assert recommend(found).verdict is Verdict.UNKNOWN
    assert "gradient of wrong is wrong at every scale" in found.unknown
    # What overflows at every scale cannot be helped.
    verdict = recommend(Explained(gradients, noise=("wrong",)).measured())
    assert verdict.verdict is Verdict.CANNOT_HELP
    assert "norm (square) overflows in the forward pass" in verdict.reason
    # It does no harm to gradients that are right.
    assert recommend(Explained({"w": spread(-6, 0)}).measured()).verdict is Verdict.NOT_NEEDED


class Hides(Model):
    """With an overflow that a later operation makes finite."""

    def explain(self, batch, scale, half):
        return explained(None, OVERFLOW)


def test_an_overflow_that_is_made_finite_is_named_beside_inaccurate_gradients_alone():
    gradients = {"w": spread(-6, 0), "wrong": spread(-8, -6)}
    verdict = recommend(Hides(gradients, noise=("wrong",)).measured())
    assert (verdict.verdict, verdict.rule) == (Verdict.UNKNOWN, None)
    assert "norm (square) overflows, and a later operation makes it finite" in verdict.reason
    assert recommend(Hides({"w": spread(-6, 0)}).measured()).verdict is Verdict.NOT_NEEDED


def test_what_scaling_mends_is_no_reason_why_it_cannot_help():
    class OfTheScale(Model):
        def explain(self, batch, scale, half):
            return explained(OVERFLOW._replace(in_backward=True), is_scaled=True)

    verdict = recommend(OfTheScale({"w": spread(-6, 0)}, ends="the loss").measured())
    assert verdict.verdict is Verdict.CANNOT_HELP
    assert "norm" not in verdict.reason + verdict.advice


# Of a model that computes in float16 itself: what is lost without a scale, beside what is not.
CASTS = {
    "all of one": {"lost": spread(-34, -28), "w": spread(-6, 0)},
    "a part of one": {"lost": spread(-28, -22), "w": spread(-6, 0)},
    "all of all": {"lost": spread(-40, -36)},
    "small beside large": {"lost": spread(-27, -26), "w": spread(2, 6)},
}


@pytest.mark.parametrize("case", CASTS)
def test_a_reference_that_loses_too_is_taken_at_a_scale(case):
    right = Model(CASTS[case]).measured()
    found = Model(CASTS[case], casts=("lost", "w")).measured()
    assert recommend(found) == recommend(right)
    assert (found.lowest_exponent, right.reference) == (right.lowest_exponent, 0)
    assert found.reference > 0
    for one, other in zip(found.gradients, right.gradients, strict=True):
        assert one.largest == pytest.approx(other.largest, rel=1e-2)


def test_a_reference_in_float16_that_overflows_at_a_higher_scale_is_unknown():
    class Inner(Model):
        """Between the layers gradients are 2**10 times as large, in float16 in each pass."""

        def rounded(self, name, gradient, scale, half, batch):
            with np.errstate(over="ignore"):
                inner = (gradient.astype(np.float64) * batch * scale * 2.0**10).astype(np.float16)
            return inner.astype(np.float32) / np.float32(2.0**10)

    found = Inner({"lost": spread(-50, -46), "w": spread(-2, 0)}).measured()
    assert "casts to float16 itself, and its float32 gradients change" in found.unknown
    # Where it does not overflow, and is still too coarse to compare with.
    small = {"lost": spread(-40, -36), "w": spread(-6, 0)}
    assert "gradients change" in Model(small, casts=("lost", "w")).measured().unknown


@pytest.mark.parametrize("casts", [(), ("dead", "w")])
def test_a_gradient_that_is_zero_costs_one_pass_and_is_kept(casts):
    dead = {"dead": np.zeros(3, np.float32), "unused": None}
    found = Model({"w": spread(-6, 0), **dead}, casts=casts).measured(1.0)
    assert recommend(found).verdict is Verdict.NOT_NEEDED
    assert [each.name for each in found.ranked] == ["w"]
    assert [each.name for each in found.gradients if not each.errors] == ["dead"]
    assert (found.passes, found.reference) == (5, 0)
    small = Model({"w": spread(-32, -24)}).measured(1.0).passes
    assert Model({"w": spread(-32, -24), "dead": np.zeros(3)}).measured(1.0).passes == small


def test_rounding_that_is_another_in_each_pass_is_no_cast_to_float16():
    class Unordered(Model):
        """Sums in any order, as a GPU has them: what is 0 but for rounding is never the same."""

        def rounded(self, name, gradient, scale, half, batch):
            found = super().rounded(name, gradient, scale, half, batch)
            return found * RNG.choice([-1, 1], found.shape) if name == "noise" else found

    found = Unordered({"w": spread(-6, 0), "noise": spread(-40, -38)}, noise=("noise",)).measured()
    assert (found.unknown, found.reference) == ("", 0)
    assert recommend(found).verdict is Verdict.NOT_NEEDED


def test_a_loss_that_is_another_in_each_pass_is_unknown():
    numbers = iter(range(1, 100))

    class Random(Model):
        def __call__(self, *given, **keywords):
            self.loss = float(next(numbers))
            return super().__call__(*given, **keywords)

    found = Random({"w": spread(-6, 0), "dead": np.zeros(3, np.float32)}).measured()
    assert "draws different random numbers" in recommend(found).reason


class Failing(Model):
    """Raises an error in the pass in float16."""

    def __call__(self, batch, scale, half):
        if half:
            raise NotImplementedError("no kernel for Half\nand more")
        return super().__call__(batch, scale, half)


UNKNOWN = {
    "no kernel": (Failing({"w": spread(-6, 0)}), "does not run in float16 here: no kernel"),
    "NaN": (Model({"w": np.float32([1.0, np.nan])}), "a gradient is not finite in float32"),
    "no gradient": (Model({"w": np.zeros(3, np.float32)}), "every gradient is 0"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_measured_has_a_reason(case):
    model, words = UNKNOWN[case]
    verdict = recommend(model.measured())
    assert verdict.verdict is Verdict.UNKNOWN
    assert words in verdict.reason


# --- The report ---------------------------------------------------------------------------------

LONG = "model/encoder/block_12/attention/self_attention/query_projection/kernel_of_the_layer"
NOISE = ("n", "bias")
MODELS = {
    "not needed": Model({"w": spread(-6, 0), "b": spread(-6, 0)}),
    "needed": Model({"w": spread(-34, -26), "b": spread(-20, -12)}),
    "below 1": Model({"w": spread(8, 14)}),
    "no single scale": Model({"w": spread(-40, -36), "b": spread(8, 12)}),
    "cannot help": Model({"w": spread(-6, 0)}, ends="the loss"),
    "targets": Model({"w": spread(-6, 0)}, ends=TARGETS),
    "unknown": Model({"w": spread(-6, 0)}, loss=math.nan),
    "zero": Model({"w": spread(-6, 0), "dead": np.zeros(3, np.float32)}),
    "casts": Model({"w": spread(-6, 0), "l": spread(-30, -26)}, casts=("w", "l")),
    "long names": Model({f"{LONG}_{n}": spread(-34, -26) for n in range(5)}),
    "noise": Model({"w": spread(-6, 0)} | dict.fromkeys(NOISE, spread(-40, -38)), noise=NOISE),
}


def said(found):
    """The text of a report in one line."""
    return " ".join(str(found).split())


def report(name):
    return Report("Net", "NumPy", MODELS[name].measured())


@pytest.mark.parametrize("name", MODELS)
def test_the_report_begins_with_the_verdict_and_is_short(name):
    found = report(name)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 88
    assert lines[0].startswith("Net")
    titles = [line[:14].strip() for line in lines if line[:2] == "  " and line[2] != " "]
    assert len(titles) <= 12
    assert titles[-1] == "measured"
    assert (found.rule is None) == (found.verdict != "needed")
    if found.rule is not None:
        words = said(found).partition("rule = ")[2].partition(")")[0] + ")"
        assert eval(words, {"DynamicScale": DynamicScale}) == found.rule
    if name in ("not needed", "needed", "no single scale", "cannot help", "unknown"):
        assert found.verdict == name
        assert name in lines[0]


def test_what_the_lines_say():
    for name, words in (
        ("needed", "without scaling, the worst gradient, of w, is wrong by"),
        ("needed", "every gradient is accurate from a loss scale of"),
        ("below 1", "rule = DynamicScale(initial_scale=2.0**-"),
        ("noise", "left out 2 of the gradients: n, bias: wrong in float16 at every scale"),
        ("cannot help", "cannot help: the loss is not finite in float16"),
        ("cannot help", "do cast the model's outputs to float32"),
        ("targets", "cannot help: the targets are beyond the range of float16"),
        ("targets", "do normalize the targets"),
        ("unknown", "unknown: the loss or a gradient is not finite in float32"),
        ("zero", "left out 1 of the gradients: dead: also 0 in float32"),
        ("casts", "reference the model casts to float16 itself"),
    ):
        assert words in said(report(name))


def test_a_gradient_that_no_scale_makes_accurate_is_not_called_accurate():
    for lowest, errors in ((0, {0: 0.3, 8: 0.3}), (4, {0: 0.9, 4: 0.3, 8: 0.3})):
        gradients = (GradientAccuracy("w", 1.0, errors),)
        found = Measurement(gradients, lowest_exponent=lowest, highest_exponent=20)
        text = said(Report("Net", "NumPy", found))
        assert "every gradient is as accurate as at any loss scale" in text
        assert "any scale the gradient of w is wrong by 30% at every loss scale" in text
