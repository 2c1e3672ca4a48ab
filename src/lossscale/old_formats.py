"""The formats of old releases: configurations of inner optimizers, and the names of their slots.

Nothing that matters in a configuration is dropped silently: settings without effect in Keras 3 are
removed, renamed settings are renamed, and an unsupported setting is an error or a warning that
names it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lossscale.errors import ArgumentError
from lossscale.framework_types import Config
from lossscale.packages import warn

# For each optimizer, groups of names of the same slot: first the name in TensorFlow's first
# optimizers, which the documents use, then the names in its new ones, in Keras 3, and of the
# attribute.
_FIRST = ("m", "momentum", "momentums", "_momentums")
_SECOND = ("v", "velocity", "_velocities")
_LARGEST = ("vhat", "velocity_hat", "_velocity_hats")
_MOMENTUM = ("momentum", "m", "momentums", "_momentums")
_ACCUMULATOR = ("accumulator", "_accumulators")
SYNONYMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "SGD": (_MOMENTUM,),
    "Lion": (_MOMENTUM,),
    "Adam": (_FIRST, _SECOND, _LARGEST),
    "AdamW": (_FIRST, _SECOND, _LARGEST),
    "Nadam": (_FIRST, _SECOND),
    "Adamax": (("m", "momentum", "_m"), ("v", "u", "norm", "_u")),
    "RMSprop": (
        ("rms", "velocity", "_velocities"),
        ("momentum", "_momentums"),
        ("mg", "average_gradient", "_average_gradients"),
    ),
    "Adagrad": (_ACCUMULATOR,),
    "Adadelta": (
        ("accum_grad", "accumulated_grad", "_accumulated_grads"),
        ("accum_var", "accumulated_delta_var", "_accumulated_delta_vars"),
    ),
    "Ftrl": (_ACCUMULATOR, ("linear", "_linears")),
}
_AVERAGE = ("average", "_model_variables_moving_average")

# In lower case too, because TensorFlow's loader lower-cases the names in the caller's dictionary.
_OPTIMIZERS = {name.lower(): name for name in (*SYNONYMS, "Adafactor")}
# The names of two of them in TensorFlow's exports.
_OPTIMIZERS["gradientdescent"] = "SGD"
_OPTIMIZERS["gradient_descent"] = "SGD"

_SCHEDULES = {
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
}

# Settings that affect only how TensorFlow runs the optimizer, not its result.
_WITHOUT_EFFECT = ("is_legacy_optimizer", "jit_compile")

NADAM_DECAY = (
    "The file's Nadam raises its momentum slowly (schedule_decay={decay:g}); Keras 3's has no "
    "such setting and raises it faster. The state is kept, but the next steps differ a little."
)


def inner_config(config: object, custom_objects: Mapping[str, object] | None = None) -> object:
    """Returns the configuration of an inner optimizer for Keras 3.

    Args:
        config: The value of `inner_optimizer` or `optimizer` in a configuration of any release; it
            is not changed. A value that is not a dictionary is returned as it is.
        custom_objects: The caller's classes. A configuration that names one of them is returned
            unchanged.

    Raises:
        ArgumentError: If Keras 3 does not support a setting; the message names it.

    Examples:
        >>> inner_config({"class_name": "sgd", "module": "keras.optimizers.legacy",
        ...               "config": {"lr": 0.5, "decay": 0.0}, "registered_name": None})
        {'class_name': 'SGD', 'config': {'learning_rate': 0.5}}
    """
    if not isinstance(config, Mapping) or "class_name" not in config:
        return config
    written = str(config["class_name"])
    registered = config.get("registered_name")
    if {written, registered} & set(custom_objects or ()):
        return copy.deepcopy(dict(config))
    # TensorFlow 2.8 to 2.10 registered its new optimizers with this prefix.
    name = _OPTIMIZERS.get(written.removeprefix("Custom>").lower())
    if name is None or (registered and ">" in registered and registered[:7] != "Custom>"):
        return copy.deepcopy(dict(config))
    settings = copy.deepcopy(dict(config.get("config") or {}))
    return {"class_name": name, "config": _settings(name, settings)}


def _settings(optimizer: str, settings: dict[str, Any]) -> dict[str, Any]:
    for name in _WITHOUT_EFFECT:
        settings.pop(name, None)
    if "lr" in settings:
        rate = settings.pop("lr")
        settings.setdefault("learning_rate", rate)
    for name in ("epsilon", "clipnorm", "clipvalue", "global_clipnorm"):
        if settings.get(name, 0) is None:
            # TensorFlow used its default instead, as Keras 3 does if the setting is missing.
            del settings[name]
    decay = settings.pop("decay", None)
    slow_rise = settings.pop("schedule_decay", None)
    if "learning_rate" in settings:
        settings["learning_rate"] = schedule_config(settings["learning_rate"])
    if optimizer == "Nadam":
        # Other optimizers use this name for the decay of the learning rate.
        slow_rise = decay if slow_rise is None else slow_rise
        if slow_rise is not None and slow_rise != 1.0:
            warn(NADAM_DECAY.format(decay=slow_rise))
    elif decay:
        settings["learning_rate"] = decayed(settings.get("learning_rate"), decay, optimizer)
    return settings


def schedule_config(rate: float | Config) -> float | Config:
    """Returns a learning rate for Keras 3; adds the module to a schedule.

    Args:
        rate: A number, or the configuration of a schedule.
    """
    if not isinstance(rate, Mapping):
        return rate
    name = str(rate.get("class_name", ""))
    if name not in _SCHEDULES or ">" in str(rate.get("registered_name") or ""):
        return dict(rate)
    settings = dict(rate.get("config") or {})
    if settings.get("name", "") is None:
        # Keras 3 has its own name for each, and rejects this one.
        del settings["name"]
    return {
        "module": "keras.optimizers.schedules",
        "class_name": name,
        "config": settings,
        "registered_name": None,
    }


def decayed(rate: float | Config | None, decay: float, optimizer: str) -> float | Config:
    """Returns the schedule equivalent to `decay`: rate / (1 + decay * iterations).

    Args:
        rate: The learning rate, a number.
        decay: The `decay` of TensorFlow's optimizers, per step.
        optimizer: The name of the optimizer, for the message.

    Raises:
        ArgumentError: If the learning rate is a schedule too.
    """
    if rate is None or isinstance(rate, Mapping):
        what = "a schedule" if rate else "no learning rate"
        raise ArgumentError(
            f"{optimizer} has both decay={decay!r} and {what}; Keras 3 has no `decay`. Create the "
            "optimizer with one schedule that does both."
        )
    settings = {"initial_learning_rate": float(rate), "decay_steps": 1, "decay_rate": float(decay)}
    return schedule_config({"class_name": "InverseTimeDecay", "config": settings})


def kind_of(optimizer: object) -> str | None:
    """Returns the name of the known optimizer class of an optimizer or its bases, or None."""
    return next((cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ in SYNONYMS), None)


def names_for(kind: str | None, names: Sequence[str]) -> list[str]:
    """Returns every name that a slot may have, the given ones first.

    Args:
        kind: An optimizer's name, as `kind_of` returns it.
        names: The names of the slot in a file.

    Examples:
        >>> sorted(names_for("Adamax", ["v"]))
        ['_u', 'norm', 'u', 'v']
    """
    found = list(names)
    for group in (*SYNONYMS.get(kind or "", ()), _AVERAGE):
        if set(group) & set(names):
            found += sorted(set(group) - set(found))
    return found


def documented_name(kind: str | None, names: Sequence[str]) -> str | None:
    """Returns the documented name of a slot, or None.

    Args:
        kind: An optimizer's name, as `kind_of` returns it.
        names: Names of the slot in any release.

    Examples:
        >>> documented_name("RMSprop", ["_velocities"])
        'rms'
    """
    groups = SYNONYMS.get(kind or "", ())
    return next((group[0] for group in groups if set(group) & set(names)), None)
