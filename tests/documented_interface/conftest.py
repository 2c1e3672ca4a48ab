"""Fixtures for the tests of the documented interface."""

from __future__ import annotations

import functools

import pytest
import tensorflow as tf

import two_devices
from conformance.page_matrix import CURRENT, EXPERIMENTAL, Program

two_devices.split_cpu()


@pytest.fixture(params=[CURRENT, EXPERIMENTAL])
def form(request):
    """The documented class: that of TensorFlow 2.4 and later, and that of 2.0 to 2.3."""
    return Program("keras-tensorflow", request.param, in_function=False)


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
