"""Reads what earlier releases have written, and compares with what these read back themselves."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from earlier_files import of_users, write

FOLDER = pathlib.Path(__file__).parent


def of(what, *suffixes):
    """Returns the names of the files of a set, as `release/name`, for a parametrized test."""
    found = [
        f"{path.parent.name}/{name}"
        for path in sorted(FOLDER.glob(f"*/{what}.json"))
        for name in json.loads(path.read_text())
        if name.endswith(suffixes)
    ]
    assert found, f"there are no files of {what} that end in {suffixes}"
    return found


def path_and_facts(what, name):
    """Returns where a file is, and what its release read back from it."""
    release, _, file = name.partition("/")
    facts = json.loads((FOLDER / release / f"{what}.json").read_text())[file]
    return FOLDER / release / what / file, facts


def assert_same(found, expected):
    """Whether two nests of facts agree, numbers to the last bits of float32."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list) and expected and not isinstance(expected[0], str):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    else:
        assert found == expected


def check_keras(what, name, keras, inner):
    """Checks a file of an optimizer of a Keras, whatever its form.

    Args:
        what: The set of files.
        name: The file, as `of` names it.
        keras: The module `keras` or `tf_keras`.
        inner: An optimizer like the one inside, for what has no description of it.
    """
    path, expected = path_and_facts(what, name)
    if path.suffix == ".pickle":
        dense = keras.layers.Dense(1, name="dense")
        dense.build((None, 2))
        found = write.facts(write.unpickled(path, dense.trainable_variables))
    elif path.suffix in (".keras", ".h5"):
        found = write.facts_of_model(keras, path)
    else:
        import tensorflow as tf

        make = write.OPTIMIZERS[path.name.partition("_checkpoint")[0]]
        found = write.facts(write.restored(tf, keras, make, inner, path).optimizer)
    assert_same(found, expected)


def check_torch(name):
    """Checks a file of PyTorch alone."""
    path, expected = path_and_facts("torch", name)
    if path.stem in of_users.TORCH_SCALERS:
        assert_same(of_users.scaler_facts(path), expected)
    else:
        assert_same(of_users.torch_facts(path, of_users.TORCH_OPTIMIZERS[path.stem]), expected)


def check_optax(name):
    """Checks a pickled state of Optax."""
    path, expected = path_and_facts("optax", name)
    transformation = of_users.TRANSFORMATIONS[path.stem]()
    if path.stem == "noted":
        # It noted histograms as well, which are gone: the step of the last one, and none of them.
        del expected["leaves"][5]
        expected["structure"] = expected["structure"].replace("*, *, *, *, *, ()", "*, *, *, *")
    assert_same(of_users.optax_facts(path, transformation), expected)
