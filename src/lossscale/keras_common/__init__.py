"""Code that the optimizers and monitors of Keras 3 and tf_keras share; imports neither."""

from lossscale.keras_common.optimizer import _rebuild as _rebuild
