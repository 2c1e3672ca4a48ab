"""The images of handwritten digits that come with scikit-learn."""

from __future__ import annotations

from typing import Any, NamedTuple

TEST_IMAGES = 360


class Digits(NamedTuple):
    """Images of digits and what they show.

    Attributes:
        images: float32 array of shape (n, 8, 8), from 0 to 1; n is 1437.
        labels: int64 array of shape (n,), from 0 to 9.
        test_images: The same for the 360 images that are not trained on.
        test_labels: Their labels.
    """

    images: Any
    labels: Any
    test_images: Any
    test_labels: Any


def load_digits(seed: int) -> Digits:
    """Returns the 1,797 digits that come with scikit-learn, a fifth of them for testing.

    Args:
        seed: Which images are tested on.
    """
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    data = load()
    images = (data.images / 16).astype("float32")
    trained, tested, labels, test_labels = train_test_split(
        images, data.target, test_size=TEST_IMAGES, random_state=seed, stratify=data.target
    )
    return Digits(trained, labels, tested, test_labels)
