"""The optimizers that are wrapped: each has some state that a skipped step must not touch."""

import keras

INNER = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adamw-clipnorm": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.01, clipnorm=1.0),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=1.0),
    "clipvalue": lambda: keras.optimizers.RMSprop(0.1, clipvalue=0.5),
    "ema": lambda: keras.optimizers.SGD(
        0.5, momentum=0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.5)
    ),
}
