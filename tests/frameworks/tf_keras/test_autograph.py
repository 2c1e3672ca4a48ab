import pytest
import tf_keras

import autographs


@pytest.mark.parametrize("family", ["new", "legacy"])
def test_only_the_users_functions_are_translated(family):
    optimizers = {"new": tf_keras.optimizers, "legacy": tf_keras.optimizers.legacy}[family]
    autographs.assert_only_the_users_functions_are_translated(optimizers)
