"""Runs examples/old_programs/ under `lossscale.install()`, all in the process of the tests."""

import logging
import pathlib
import runpy

import pytest
import tensorflow as tf

import lossscale

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "old_programs"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py"))
assert len(PROGRAMS) >= 6
# What Keras says about the way that models were written then.
IGNORED_WARNINGS = "ignore:Do not pass an `input_shape`"

_LOGGED_BY_OTHERS = (
    "mixed_float16 may run slowly",
    # That the function of `fit` is traced often: TensorFlow counts those of other tests with it.
    "TensorFlowTrainer._make_function",
    "Model.make_train_function",
)


def on_two_replicas(monkeypatch, strategy):
    """Makes every MirroredStrategy this one: a second one in a process would disturb the first."""
    cls = tf.distribute.MirroredStrategy
    if "__new__" not in vars(cls):
        # One that is deleted leaves a class that takes no arguments; this one stays.
        cls.__new__ = lambda cls, *_, **__: object.__new__(cls)
    monkeypatch.setattr(cls, "__new__", lambda cls: strategy)
    monkeypatch.setattr(cls, "__init__", lambda self: None)


def run(name, caplog, capsys):
    """Runs a program as it stands, and checks that it says nothing but that it has learned."""
    with caplog.at_level(logging.WARNING, logger="tensorflow"), lossscale.install():
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    # AutoGraph speaks to the log of what it cannot read.
    logged = [record.getMessage() for record in caplog.records]
    assert [m for m in logged if not any(other in m for other in _LOGGED_BY_OTHERS)] == []
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{name.removesuffix('.py')}: ")


every_program = pytest.mark.parametrize("name", PROGRAMS)
