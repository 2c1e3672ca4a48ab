"""Old programs run unedited on Keras 3; the page of loops, and the examples in docstrings."""

import doctest
import importlib
import pkgutil

import keras
import pytest
import tensorflow as tf

import autographs
import lossscale
import lossscale.keras
import old_programs
from pages import programs

MODULES = ["lossscale.keras"] + [
    found.name
    for found in pkgutil.walk_packages(lossscale.keras.__path__, "lossscale.keras.")
    # A backend needs its own backend.
    if ".backends." not in found.name
]
# That of the wrapper is found where its class says that it is.
WITH_EXAMPLES = {"lossscale.keras", "lossscale.keras.arguments"}


@pytest.mark.filterwarnings(old_programs.IGNORED_WARNINGS)
@old_programs.every_program
def test_an_old_program_learns(name, caplog, capsys, monkeypatch, two_replicas):
    old_programs.on_two_replicas(monkeypatch, two_replicas)
    old_programs.run(name, caplog, capsys)


def test_the_loop_on_the_page_runs_on_two_replicas(monkeypatch, two_replicas):
    old_programs.on_two_replicas(monkeypatch, two_replicas)
    (loop,) = [block for block in programs("training_loops.md") if "MirroredStrategy()" in block]
    namespace = {}
    exec(loop, namespace)
    assert namespace["strategy"].num_replicas_in_sync == 2
    assert namespace["optimizer"].inner_optimizer.iterations.numpy() == 2


def test_only_the_users_functions_are_translated():
    autographs.assert_only_the_users_functions_are_translated(keras.optimizers)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "keras": keras, "tf": tf, "lossscale": lossscale}
    failed, tried = doctest.testmod(module, globs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
    assert (tried > 0) == (name in WITH_EXAMPLES)


def test_the_examples_of_the_wrappers_own_verbs_print_what_they_show():
    names = {"keras": keras, "tf": tf, "lossscale": lossscale}
    cls = lossscale.keras.LossScaleOptimizer
    # Its methods are in another module than the class says, where doctest looks for none.
    examples = doctest.DocTestFinder(exclude_empty=True).find(cls, module=False, globs=names)
    results = [doctest.DocTestRunner().run(each) for each in examples]
    assert sum(each.attempted for each in results) >= 10
    assert not any(each.failed for each in results)
