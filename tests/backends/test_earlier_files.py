"""What earlier releases left on disk loads as they read it themselves."""

import keras
import pytest

from earlier_files import read

SET = f"keras-{keras.backend.backend()}"


@pytest.mark.parametrize("name", read.of(SET, ""))
def test_a_file_loads(name):
    read.check_keras(SET, name, keras, keras.optimizers.Adam(0.05))
