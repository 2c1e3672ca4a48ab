"""Code that Keras 3 and tf_keras share, the optimizer and the guard of a model; imports neither."""

from lossscale.keras_common.optimizer import _rebuild as _rebuild
