"""The optimizers that are wrapped: each has some state that a skipped step must not touch.

Each makes one of a module `optimizers`, of Keras 3 or of one of tf_keras' two families.
"""

from lossscale import DynamicScale

RULE = DynamicScale(2.0**15, growth_interval=2)
"""The rule that each is recorded with."""

INNER = {
    "plain": lambda optimizers: optimizers.SGD(1.0),
    "sgd": lambda optimizers: optimizers.SGD(0.5),
    "momentum": lambda optimizers: optimizers.SGD(0.5, momentum=0.9, nesterov=True),
    "adam": lambda optimizers: optimizers.Adam(0.1),
    "adamw-clipnorm": lambda optimizers: optimizers.AdamW(0.1, weight_decay=0.01, clipnorm=1.0),
    "global_clipnorm": lambda optimizers: optimizers.SGD(0.5, global_clipnorm=1.0),
    "clipvalue": lambda optimizers: optimizers.RMSprop(0.1, clipvalue=0.5),
    "ema": lambda optimizers: optimizers.SGD(
        0.5, momentum=0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "accumulation": lambda optimizers: optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda optimizers: optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.5)
    ),
    "small-rate": lambda optimizers: optimizers.SGD(2.0**-13),
    "large-rate": lambda optimizers: optimizers.SGD(8.0),
    "small-momentum": lambda optimizers: optimizers.SGD(2.0**-13, momentum=0.5),
    "lion": lambda optimizers: optimizers.Lion(2.0**-13, beta_1=0.5, beta_2=0.75),
}

MULTIPLYING = ("small-rate", "large-rate", "small-momentum", "lion", "global_clipnorm")
"""Those that multiply a gradient by what a compiler could take together with the scale."""

RECORDED = tuple(name for name in INNER if name != "plain" and name not in MULTIPLYING[:4])
"""Those that each wrapper is recorded with: all that have code of their own."""

FEW = ("plain", "sgd", "momentum", "adam", "accumulation")
"""Those for a wrapper that runs another one's code: without a state, with one, with a branch."""

WITH_STATE = ("momentum", "adam", "accumulation")
"""Those of them whose state a skipped step could touch."""

_OF_TORCH = {
    "accumulation": "PyTorch accumulates gradients in the loop",
    "lion": "PyTorch has no Lion",
    **dict.fromkeys(
        ("adamw-clipnorm", "global_clipnorm", "clipvalue", "ema", "schedule"),
        "a hook of PyTorch's optimizers does it: test_clipping.py, test_steps.py of PyTorch",
    ),
}
MISSING = {
    "torch": _OF_TORCH,
    "torch-device": _OF_TORCH,
    "tf_keras-new": {"accumulation": "tf_keras accumulates no gradients"},
    "tf_keras-legacy": {
        "accumulation": "tf_keras accumulates no gradients",
        "ema": "the legacy optimizers do not average variables",
        "adamw-clipnorm": "AdamW is a new optimizer",
        "lion": "Lion is a new optimizer",
    },
}
"""For each family of optimizers, what it cannot do, and why."""
