"""What is asked of a wrapper by another name, or cannot be set, is answered with what to write."""

import importlib

import numpy as np
import pytest

from conformance.recordings import VALUES
from conformance.wrappers import KERAS
from lossscale import DynamicScale, FixedScale, LossScaleOptimizer

RULE = DynamicScale(8.0)


@pytest.mark.parametrize("keyword", ["growth_interval", "loss_scale"])
def test_an_unknown_keyword_is_an_error_that_names_it_and_the_class_of_users(wrapper, keyword):
    inner = wrapper.make(VALUES, "sgd").inner_optimizer
    with pytest.raises(
        (TypeError, ValueError), match=rf"^(LossScaleOptimizer|loss_scaled)\b.*\b{keyword}\b"
    ):
        wrapper.wrap(inner, **{keyword: 500})


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
        "dynamic_scale": 4.0,
        "step_counter": 0,
    }.items():
        # Keras 3 alone has the last two, variables.
        if not hasattr(optimizer, name):
            continue
        with pytest.raises(AttributeError, match=f"{name}.*(no setter|cannot be replaced)"):
            setattr(optimizer, name, value)
    assert (harness.scale(), optimizer.rule) == (before, RULE)
    assert optimizer.inner_optimizer is inner


SETTINGS = [
    ("SGD", {"momentum": 0.5}, 0.25),
    ("Adam", {"beta_1": 0.75}, 0.5),
    ("Adam", {"epsilon": 0.5}, 0.25),
    ("Adam", {"clipnorm": 0.5}, None),
    ("Adam", {"clipnorm": None}, 0.5),
]
if KERAS == "keras":
    SETTINGS += [
        ("AdamW", {"weight_decay": 0.5}, 0.25),
        ("Adam", {"use_ema": True}, False),
        ("Adam", {"gradient_accumulation_steps": 2}, 4),
    ]


@pytest.mark.skipif(KERAS == "none", reason="about the settings of Keras")
@pytest.mark.parametrize(("cls", "settings", "after"), SETTINGS, ids=str)
def test_settings_read_and_write_through(optimizers, cls, settings, after):
    optimizer = LossScaleOptimizer(getattr(optimizers, cls)(**settings))
    [(name, before)] = settings.items()
    assert getattr(optimizer, name) == before
    setattr(optimizer, name, after)
    assert getattr(optimizer, name) == getattr(optimizer.inner_optimizer, name) == after
    assert name not in vars(optimizer)
    with pytest.raises(AttributeError, match="has an attribute 'momentun'"):
        _ = optimizer.momentun


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
    of_keras_on_a_gpu = not wrapper.is_native and harness.device() != "cpu"
    if of_keras_on_a_gpu or getattr(harness.optimizer, "decide", "host") == "device":
        # To read the numbers would wait for it.
        state = "loss scale on the device"
    shown = f"{inner.__name__}, {rule.__name__}: {state}"
    assert repr(harness.optimizer) == f"<LossScaleOptimizer around {shown}>"


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "bfloat16"])
def test_float16_variables_that_are_trained_are_named_once(wrapper, policy, recwarn):
    if wrapper.is_native:
        pytest.skip("about the policies of Keras")
    keras = importlib.import_module(KERAS)
    dense, frozen = (keras.layers.Dense(1, dtype=name) for name in (policy, "float16"))
    for layer in (dense, frozen):
        layer.build((None, 3))
    frozen.trainable = False
    optimizer = wrapper.wrap(wrapper.harness.new_inner("sgd"))
    # A frozen layer of tf_keras has variables that could be trained.
    others = frozen.variables if KERAS == "keras" else []
    for _ in range(2):
        optimizer.build([dense.kernel, *others])
    found = [str(each.message) for each in recwarn if "float16 variables" in str(each.message)]
    assert len(found) == (policy == "float16")
    assert all('Set the policy "mixed_float16"' in message for message in found)
