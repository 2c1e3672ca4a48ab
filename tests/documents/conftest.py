"""Fixtures for the tests of the documented interface."""

from __future__ import annotations

import functools

import pytest
import tensorflow as tf

import two_devices
from documents import documented_classes

two_devices.split_cpu()


@pytest.fixture(
    params=[documented_classes.CURRENT, documented_classes.EXPERIMENTAL], ids=lambda form: form.name
)
def form(request):
    """The documented class: that of TensorFlow 2.4 and later, and that of 2.0 to 2.3."""
    return request.param


@pytest.fixture(params=["eager", "graph"])
def stepped(request):
    """Makes a step of a function: the function itself, or a `tf.function` of it."""
    if request.param == "eager":
        return lambda function: function
    # To translate a lambda, AutoGraph reads all of its file: conformance/test_programs.py has that.
    return functools.partial(tf.function, autograph=False)


@pytest.fixture
def var():
    return tf.Variable(1.0)
