"""Every word that another library has for a setting, at everything that takes settings."""

import inspect
import itertools

import pytest

import lossscale
from lossscale import DynamicScale, FixedScale
from lossscale.checks import checks_keywords
from lossscale.keywords import SCALES, SETTING, unknown_keywords

VALUES = {
    "initial_scale": 8.0,
    "growth_interval": 50,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "min_scale": 2.0,
    "max_scale": 2.0**100,
    "overflows_before_backoff": 3,
}


def wrapper(
    inner_optimizer, dynamic=True, initial_scale=None, dynamic_growth_steps=None, rule=None
):
    """Returns the rule that a wrapper makes of its arguments."""
    return lossscale.arguments.rule_from_arguments(
        dynamic, initial_scale, dynamic_growth_steps, rule
    )


def scaler(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=9, rule=None):
    """Returns the rule that a gradient scaler makes of its arguments."""
    return rule or DynamicScale(init_scale, growth_interval, growth_factor, backoff_factor)


@pytest.mark.parametrize("words", [1, 2], ids=["alone", "in pairs"])
@pytest.mark.parametrize(
    "takes", [wrapper, scaler, DynamicScale, FixedScale], ids=lambda t: t.__name__
)
def test_what_is_answered_can_be_written(takes, words):
    taken = list(inspect.signature(takes).parameters)
    context = {"lossscale": lossscale, "takes": takes}
    inner = {"inner_optimizer": None} if takes is wrapper else {}
    for names in itertools.combinations(SETTING, words):
        wanted = {SETTING[name]: VALUES[SETTING[name]] for name in names}
        given = {name: VALUES[SETTING[name]] for name in names}
        if len(wanted) < words or set(names) <= set(taken):
            continue
        said = unknown_keywords("takes", given, taken)
        assert "write " in said, said
        written = said.split("write ")[1].removesuffix(".").split(" without ")[0]
        right = {n: v for n, v in given.items() if n in taken and not written.startswith("rule=")}
        if "in its place" in said or " for a scale that moves so" in said:
            rule = eval(written.split(" for a scale")[0], context)
        else:
            rule = eval(f"takes(**inner, **right, {written})", context | locals())
        if isinstance(rule, FixedScale):
            assert wanted.keys() <= {"initial_scale"}
            assert rule.scale == VALUES["initial_scale"]
        else:
            assert {name: getattr(rule, name) for name in wanted} == wanted, (names, said)


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_is_the_first_one_beside_what_moves_it(name):
    given = {name: 8.0, "period": 50, "factor": 4.0}
    said = unknown_keywords("f", given, ["inner", "rule"])
    assert said.startswith(f"f has no arguments: `{name}`, `period`, `factor`; write rule=")
    assert "initial_scale=8.0" in said
    assert unknown_keywords("f", {name: "dynamic"}, ["initial_scale", "rule"]).endswith(
        "leave it out, the scale moves by itself."
    )


def test_what_takes_no_scale_is_told_of_none():
    assert unknown_keywords("A monitor", {"period": 9}, ["path", "every"]) == (
        "A monitor has no argument `period`: it takes path, every."
    )


def test_the_class_of_the_error_can_be_chosen():
    @checks_keywords("f", error=lossscale.errors.ArgumentError)
    def function(rule=None):
        return rule

    assert function(rule=3) == 3
    with pytest.raises(ValueError, match="f has no argument `rul`: did you mean `rule`"):
        function(rul=3)
