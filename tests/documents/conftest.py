"""Fixtures for the tests of the documented interface."""

from __future__ import annotations

import functools

import pytest
import tensorflow as tf

import two_devices
from documents import forms

two_devices.split_cpu()


_FORMS = [forms.CURRENT, forms.EXPERIMENTAL]
# What both classes do in a graph is the same code; test_experimental.py has what one does there.
_FORMS_AND_STEPS = [*((form, "eager") for form in _FORMS), (forms.CURRENT, "graph")]


def pytest_generate_tests(metafunc):
    names = {"form", "stepped"} & set(metafunc.fixturenames)
    if names == {"form", "stepped"}:
        ids = [f"{form.name}-{way}" for form, way in _FORMS_AND_STEPS]
        metafunc.parametrize(("form", "stepped"), _FORMS_AND_STEPS, indirect=True, ids=ids)
    elif "form" in names:
        metafunc.parametrize("form", _FORMS, indirect=True, ids=lambda form: form.name)
    elif "stepped" in names:
        metafunc.parametrize("stepped", ["eager", "graph"], indirect=True)


@pytest.fixture
def form(request):
    """The documented class: that of TensorFlow 2.4 and later, and that of 2.0 to 2.3."""
    return request.param


@pytest.fixture
def stepped(request):
    """Makes a step of a function: the function itself, or a `tf.function` of it."""
    if request.param == "eager":
        return lambda function: function
    # To translate a lambda, AutoGraph reads all of its file: see autographs.py for that.
    return functools.partial(tf.function, autograph=False)


@pytest.fixture
def var():
    return tf.Variable(1.0)
