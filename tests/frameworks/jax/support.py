"""What several tests of the Optax transformation use."""

import jax
import numpy as np


def bits(tree):
    """The bytes, shapes and types of all leaves of a tree, to be compared."""

    def of(leaf):
        if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        return array.dtype.name, array.shape, array.tobytes()

    return jax.tree.structure(tree), [of(leaf) for leaf in jax.tree.leaves(tree)]


def signature(tree):
    """What decides whether a compiled function has to be compiled again."""
    leaves = jax.tree.leaves(tree)
    types = [(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves]
    return jax.tree.structure(tree), types


def spoiled(tree, value, leaf=0):
    """A tree with the last element of one leaf replaced."""
    leaves, structure = jax.tree.flatten(tree)
    flat = leaves[leaf].ravel().at[-1].set(value)
    leaves[leaf] = flat.reshape(leaves[leaf].shape)
    return jax.tree.unflatten(structure, leaves)


def scaled(tree, factor):
    return jax.tree.map(lambda leaf: leaf * np.asarray(factor, leaf.dtype), tree)
