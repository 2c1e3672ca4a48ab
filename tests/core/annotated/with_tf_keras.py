"""tf_keras: both families of optimizers."""

from typing import reveal_type

import numpy as np
import tf_keras

import lossscale

model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.Adam(1e-3), dynamic=True)
reveal_type(optimizer)  # AroundKeras
model.compile(optimizer, "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)))
legacy = lossscale.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.1), initial_scale=8)
reveal_type(legacy.get_slot_names())  # list[str]
model.compile(legacy, "mse")
print(float(legacy.loss_scale), int(legacy.iterations))
own = lossscale.tf_keras.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1))
reveal_type(own.initial_scale)  # float
model.compile(own, "mse")
