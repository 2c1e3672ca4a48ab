"""What is asked of a wrapper by another name, or cannot be set, is answered with what to write."""

import numpy as np
import pytest

import lossscale
from conformance.recordings import VALUES
from lossscale import DynamicScale, FixedScale

RULE = DynamicScale(8.0)

# What stands in the message; and a rule that the same keyword gives where it is written so.
SAID = {
    ("growth_interval", 500): "rule=lossscale.DynamicScale(growth_interval=500)",
    ("init_scale", 4.0): "initial_scale=4.0",
    ("loss_scale", 4.0): "rule=lossscale.FixedScale(4.0) for a fixed scale",
    ("min_scale", 0.5): "rule=lossscale.DynamicScale(min_scale=0.5)",
    ("max_grad_norm", 1.0): "1.0",
    ("learning_rate", 0.1): "learning_rate=0.1 on the `inner_optimizer`",
    ("hysteresis", 2): "rule=lossscale.DynamicScale(overflows_before_backoff=2)",
    ("skip_nonfinite", True): "rule=lossscale.FixedScale(scale, skip_nonfinite=True)",
    ("enabled", False): "FixedScale(1.0)",
    ("nonsense", 1): "It takes inner",
}


@pytest.mark.parametrize(("keyword", "said"), SAID.items(), ids=lambda value: str(value)[:30])
def test_a_keyword_of_others_is_answered_with_what_to_write(wrapper, keyword, said):
    name, value = keyword
    inner = wrapper.make(VALUES, "sgd").inner_optimizer
    with pytest.raises((TypeError, ValueError)) as raised:
        wrapper.wrap(inner, **{name: value})
    assert f"no argument `{name}`" in str(raised.value)
    assert said in str(raised.value)
    # The class by the name that users know it by.
    assert not any(private in str(raised.value) for private in ("Torch", "Keras", "__init__"))


def test_settings_that_come_together_are_answered_with_one_rule(wrapper):
    inner = wrapper.make(VALUES, "sgd").inner_optimizer
    # Those of a GradScaler, and one that is right.
    given = {"initial_scale": 8.0, "growth_factor": 4.0, "growth_interval": 50, "min_scale": 2.0}
    with pytest.raises((TypeError, ValueError)) as raised:
        wrapper.wrap(inner, **given)
    written, rest = str(raised.value).split("write rule=")[1].split(" without ")
    assert rest.startswith("initial_scale.")
    rule = eval(written, {"lossscale": lossscale})
    assert rule == DynamicScale(8.0, 50, growth_factor=4.0, min_scale=2.0)
    assert not wrapper.is_an_object or wrapper.wrap(inner, rule=rule).rule == rule


def made(wrapper):
    if not wrapper.is_an_object:
        pytest.skip("an Optax transformation is a pair of functions, and its state a tuple")
    return wrapper.make(VALUES, "sgd", RULE)


def test_what_can_only_be_read_says_how_it_is_set(wrapper):
    harness = made(wrapper)
    optimizer, before = harness.optimizer, harness.scale()
    inner = optimizer.inner_optimizer
    for name, value in {
        "loss_scale": 4.0,
        "rule": FixedScale(2.0),
        "steps_skipped": 0,
        "dynamic": False,
        "initial_scale": 4.0,
        "dynamic_growth_steps": 2,
        "dynamic_counter": 0,
        "inner_optimizer": wrapper.make(VALUES, "sgd").inner_optimizer,
    }.items():
        with pytest.raises(AttributeError, match=f"{name}.*(no setter|cannot be replaced)"):
            setattr(optimizer, name, value)
    assert (harness.scale(), optimizer.rule) == (before, RULE)
    assert optimizer.inner_optimizer is inner


def test_what_is_offered_for_completion_is_there(wrapper):
    optimizer = made(wrapper).optimizer
    offered = [name for name in dir(optimizer) if name[0] != "_"]
    assert {"loss_scale", "steps_skipped", "rule"} <= set(offered)
    for name in offered:
        getattr(optimizer, name)


def test_a_repr_shows_the_scale_and_the_skips(wrapper):
    harness = made(wrapper)
    harness.step([np.full_like(value, np.inf) for value in VALUES])
    inner, rule = (type(getattr(harness.optimizer, name)) for name in ("inner_optimizer", "rule"))
    state = "loss scale 4, 1 of 1 steps skipped"
    if getattr(harness.optimizer, "decide", "host") == "device":
        # To read the numbers would wait for it.
        state = "loss scale on the device"
    shown = f"{inner.__name__}, {rule.__name__}: {state}"
    assert repr(harness.optimizer) == f"<LossScaleOptimizer around {shown}>"
