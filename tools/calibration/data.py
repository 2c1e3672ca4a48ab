"""The data of the training runs: from scikit-learn, or generated."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np


class Split(NamedTuple):
    """Data to train on and to test on.

    Attributes:
        x: Inputs, an array whose first dimension counts samples.
        y: Their targets.
        test_x: The same, not trained on.
        test_y: Their targets.
    """

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


@functools.cache
def digits() -> Split:
    """1,437 handwritten digits of 8 x 8 pixels from 0 to 1, and 360 for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    images = (found.images / 16).astype("float32")
    x, test_x, y, test_y = train_test_split(
        images, found.target.astype("int32"), test_size=360, random_state=0, stratify=found.target
    )
    return Split(x, y, test_x, test_y)


@functools.cache
def baskets() -> Split:
    """Sets of 32 words out of 2,000 that belong to one of 10 topics each.

    Words are as unevenly frequent as in a language, so most rows of an embedding are rarely used.
    """
    random = np.random.default_rng(0)
    words, topics, size = 2000, 10, 32
    frequency = 1 / np.arange(1, words + 1)
    belongs = random.integers(topics, size=words)
    chances = frequency * (1 + 9 * (belongs == np.arange(topics)[:, None]))
    chances /= chances.sum(axis=1, keepdims=True)
    y = random.integers(topics, size=5000).astype("int32")
    x = np.stack([random.choice(words, size, p=chances[topic]) for topic in y]).astype("int32")
    return Split(x[:4000], y[:4000], x[4000:], y[4000:])


@functools.cache
def sums() -> Split:
    """Sequences of 32 numbers, and the sum of those that a second row marks: what to remember."""
    random = np.random.default_rng(0)
    numbers = random.uniform(-1, 1, size=(5000, 32))
    marks = np.zeros_like(numbers)
    for row in marks:
        row[random.choice(32, size=2, replace=False)] = 1
    x = np.stack([numbers, marks], axis=-1).astype("float32")
    y = (numbers * marks).sum(axis=1, keepdims=True).astype("float32")
    return Split(x[:4000], y[:4000], x[4000:], y[4000:])


@functools.cache
def line(factor: float) -> Split:
    """Numbers from 0 to 1 and a smooth function of them, times a factor."""
    random = np.random.default_rng(0)
    x = random.uniform(size=(2000, 8)).astype("float32")
    y = (x[:, :1] + x[:, 1:2] ** 2 - x[:, 2:3]).astype("float32") * np.float32(factor)
    return Split(x[:1600], y[:1600], x[1600:], y[1600:])
