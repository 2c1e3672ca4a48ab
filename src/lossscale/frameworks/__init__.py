"""One package per framework; each imports its own framework and no other."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # mypy holds what stands in the rows of the registry to what is expected of it.
    from lossscale.frameworks.jax import exponents as jax_exponents
    from lossscale.frameworks.keras import diagnose as keras_diagnose
    from lossscale.frameworks.keras import installing as keras_installing
    from lossscale.frameworks.keras.shell import KerasLossScaleOptimizer
    from lossscale.frameworks.shell.contract import Shell
    from lossscale.frameworks.tensorflow import exponents as tensorflow_exponents
    from lossscale.frameworks.tensorflow import names as tensorflow_names
    from lossscale.frameworks.tf_keras import diagnose as tf_keras_diagnose
    from lossscale.frameworks.tf_keras import installing as tf_keras_installing
    from lossscale.frameworks.tf_keras.for_current_optimizers import TFKerasLossScaleOptimizer
    from lossscale.frameworks.tf_keras.for_legacy_optimizers import TFKerasLegacyLossScaleOptimizer
    from lossscale.frameworks.torch import exponents as torch_exponents
    from lossscale.registry import CountsExponents, Installs, MeasuresModels

    _SHELL: type[Shell]
    _SHELL = KerasLossScaleOptimizer
    _SHELL = TFKerasLossScaleOptimizer
    _SHELL = TFKerasLegacyLossScaleOptimizer

    _MEASURING: MeasuresModels
    _MEASURING = keras_diagnose
    _MEASURING = tf_keras_diagnose

    _COUNTING: CountsExponents
    _COUNTING = jax_exponents
    _COUNTING = tensorflow_exponents
    _COUNTING = torch_exponents

    _INSTALLING: Installs
    _INSTALLING = keras_installing
    _INSTALLING = tf_keras_installing
    _INSTALLING = tensorflow_names
