"""The same initial values every time."""

import random

import numpy as np


def seed(number):
    """Seeds what Keras draws initial values, dropout and orders from.

    Not `keras.utils.set_random_seed`: with the seed of TensorFlow all compiled kernels of its
    eager mode go, and the next steps make them anew.
    """
    random.seed(number)
    np.random.seed(number)
