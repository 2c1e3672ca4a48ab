import keras

import autographs


def test_only_the_users_functions_are_translated():
    autographs.assert_only_the_users_functions_are_translated(keras.optimizers)
