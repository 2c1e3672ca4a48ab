"""The same initial values every time."""

import random

import numpy as np


def seed(number):
    """Not `keras.utils.set_random_seed`, which makes TensorFlow compile its eager kernels anew."""
    random.seed(number)
    np.random.seed(number)
