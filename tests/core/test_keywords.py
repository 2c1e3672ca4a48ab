"""Words of other libraries for a setting: the answer can be written as it stands."""

import inspect

import pytest

import lossscale
from lossscale import DynamicScale, FixedScale
from lossscale.arguments import rule_from_arguments
from lossscale.checks import KEYWORD_HINTS, SETTING_OF, checks_keywords, unknown_keywords
from lossscale.errors import ArgumentError

VALUES = {
    "initial_scale": 8.0,
    "growth_interval": 50,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "min_scale": 2.0,
    "max_scale": 2.0**100,
    "overflows_before_backoff": 3,
}


def wrapper(dynamic=True, initial_scale=None, dynamic_growth_steps=None, rule=None):
    return rule_from_arguments(dynamic, initial_scale, dynamic_growth_steps, rule)


def scaler(init_scale=8.0, growth_factor=2.0, growth_interval=9, rule=None):
    return rule or DynamicScale(init_scale, growth_interval, growth_factor)


def answered(takes, given):
    """Calls a function with what is answered to its keywords."""
    taken = list(inspect.signature(takes).parameters)
    said = unknown_keywords("takes", given, taken, {})
    written = said.split(": write ")[1].split(". It takes ")[0].split(" without ")[0].split(" for ")
    right = {n: v for n, v in given.items() if n in taken and not written[0].startswith("rule=")}
    return eval(f"takes(**right, {written[0]})", {"lossscale": lossscale} | locals())


@pytest.mark.parametrize("takes", [wrapper, scaler, DynamicScale], ids=lambda t: t.__name__)
@pytest.mark.parametrize("other", [None, "growth_factor"])
def test_what_is_answered_can_be_written(takes, other):
    taken, tried = set(inspect.signature(takes).parameters), 0
    for word, setting in SETTING_OF.items():
        names = {word: setting} | ({other: other} if other else {})
        if setting in ("clip_norm", other) or names.keys() <= taken:
            continue
        wanted = {each: VALUES[each] for each in names.values()}
        rule = answered(takes, {name: VALUES[each] for name, each in names.items()})
        assert {name: getattr(rule, name) for name in wanted} == wanted, word
        tried += 1
    assert tried > 10


@pytest.mark.parametrize("word", ["loss_scale", "static_loss_scale", "enabled", "skip_nonfinite"])
def test_words_for_a_fixed_scale_are_answered_with_one(word):
    said = unknown_keywords("f", {word: 4.0}, ["rule"], {})
    assert word in KEYWORD_HINTS
    assert "write rule=lossscale.FixedScale(" in said
    if "scale" in word:
        assert answered(wrapper, {word: 4.0}) == FixedScale(4.0)


def test_what_takes_no_scale_is_told_of_none():
    assert unknown_keywords("A monitor", {"period": 9}, ["path", "every"], {}) == (
        "A monitor has no argument `period`. It takes path, every."
    )


def test_a_function_has_answers_of_its_own_and_a_class_for_the_error():
    @checks_keywords("f", {"clip_norm": "norm={value!r}"}, ArgumentError)
    def function(rule=None):
        return rule

    assert function(rule=3) == 3
    with pytest.raises(ValueError, match="f has no argument `max_norm`: write norm=3"):
        function(max_norm=3)
