"""What earlier releases left on disk loads as they read it themselves."""

import pytest
import tf_keras

from earlier_files import read

FAMILIES = {
    "tf_keras-new": tf_keras.optimizers,
    "tf_keras-legacy": tf_keras.optimizers.legacy,
}


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in FAMILIES for name in read.of(family, "")]
)
def test_a_file_loads(family, name):
    read.check_keras(family, name, tf_keras, FAMILIES[family].Adam(0.05))
