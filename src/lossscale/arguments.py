"""Converts arguments and configurations of every release of the API to a rule, and back.

There are three ways to specify how the scale moves: the arguments `dynamic`, `initial_scale` and
`dynamic_growth_steps` (TensorFlow 2.4 and later, and Keras 3 without `dynamic`), the argument
`loss_scale` (TensorFlow 2.0 to 2.3), and `rule` (this library). All checks are here or in `rules`,
and run before anything is created.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lossscale.checks import checked_interval, checked_scale
from lossscale.errors import ArgumentError, ArgumentTypeError
from lossscale.framework_types import Config, Scalar
from lossscale.rules import RULES, DynamicScale, FixedScale, ScaleRule

_Made = TypeVar("_Made")

# Keras 3 wrote these into the configuration of its own LossScaleOptimizer before it rejected
# them; they never had an effect.
_IDLE_KERAS_ARGUMENTS: dict[str, Any] = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def rule_from_arguments(
    dynamic: bool = True,
    initial_scale: Scalar | None = None,
    dynamic_growth_steps: Scalar | None = None,
    rule: ScaleRule | None = None,
) -> ScaleRule:
    """Returns the rule that the constructor's arguments describe.

    Args:
        dynamic: True for a scale that is adjusted, False for a fixed one.
        initial_scale: The first, or the fixed, loss scale. None means 2**15 and needs
            `dynamic=True`.
        dynamic_growth_steps: Number of finite steps in a row after which the scale doubles. None
            means 2000; only with `dynamic=True`.
        rule: A rule, instead of the three others.

    Raises:
        ArgumentTypeError: If `dynamic` is not a bool or `rule` not a rule.
        ArgumentError: If a value is invalid.

    Examples:
        >>> rule_from_arguments(dynamic=False, initial_scale=128)
        FixedScale(scale=128.0, skip_nonfinite=False)
    """
    if rule is not None:
        checked = checked_rule(rule)
        if dynamic is not True or initial_scale is not None or dynamic_growth_steps is not None:
            raise ArgumentError(
                "`rule` excludes `dynamic`, `initial_scale` and `dynamic_growth_steps`. Received: "
                f"rule={rule!r}, dynamic={dynamic!r}, initial_scale={initial_scale!r}, "
                f"dynamic_growth_steps={dynamic_growth_steps!r}. Pass `rule` alone."
            )
        return checked
    if not isinstance(dynamic, bool):
        raise ArgumentTypeError(
            f"`dynamic` must be True or False. Received: dynamic={dynamic!r} of type "
            f"{type(dynamic).__name__}. For a fixed scale pass dynamic=False, initial_scale=...; a "
            "rule by name, rule=.... In lossscale.experimental.LossScaleOptimizer, a number or "
            "'dynamic' in this place is the loss scale."
        )
    if not dynamic:
        if initial_scale is None:
            raise ArgumentError(
                "With `dynamic=False` the fixed loss scale must be given as `initial_scale`. "
                "Received: initial_scale=None."
            )
        if dynamic_growth_steps is not None:
            raise ArgumentError(
                "`dynamic_growth_steps` needs `dynamic=True`: a fixed scale does not grow. "
                f"Received: dynamic_growth_steps={dynamic_growth_steps!r}. Leave it out, or pass "
                "`dynamic=True`."
            )
        return FixedScale(checked_scale("initial_scale", initial_scale))
    settings: dict[str, Any] = {}
    if initial_scale is not None:
        settings["initial_scale"] = checked_scale("initial_scale", initial_scale)
        # An initial scale below 1 needs a lower `min_scale`: with the default of 1, the first
        # overflow would raise the scale.
        settings["min_scale"] = min(1.0, settings["initial_scale"])
    if dynamic_growth_steps is not None:
        settings["growth_interval"] = checked_interval("dynamic_growth_steps", dynamic_growth_steps)
    return DynamicScale(**settings)


def checked_rule(rule: object) -> ScaleRule:
    """Returns a rule.

    Raises:
        ArgumentTypeError: If it is not a `ScaleRule`, or defines `needs`.
    """
    # A class has the attributes of its instances.
    if isinstance(rule, ScaleRule) and not isinstance(rule, type):
        if hasattr(rule, "needs"):
            raise ArgumentTypeError(
                "A rule receives only whether the gradients are finite: update(self, state, "
                f"finite, *, xp). Received: {type(rule).__name__}, which defines `needs`. Remove "
                "it."
            )
        return rule
    hint = " This is a class: create an instance first." if isinstance(rule, type) else ""
    raise ArgumentTypeError(
        "`rule` must be a scaling rule, such as lossscale.DynamicScale(growth_interval=500) or "
        f"lossscale.FixedScale(128). Received: rule={rule!r} of type {type(rule).__name__}.{hint}"
    )


def growth_steps(rule: ScaleRule) -> int | None:
    """The documented `dynamic_growth_steps` of a rule; None if it has none."""
    return getattr(rule, "growth_interval", None)


def config_from_rule(rule: ScaleRule) -> dict[str, Any]:
    """Returns the part of an optimizer's configuration that describes its rule.

    It uses the documented keys if they describe the rule completely.

    Examples:
        >>> config_from_rule(DynamicScale(initial_scale=8, growth_interval=3))
        {'dynamic': True, 'initial_scale': 8.0, 'dynamic_growth_steps': 3}
    """
    config: dict[str, Any] = {
        "dynamic": rule.is_dynamic,
        "initial_scale": float(rule.init().scale),
        "dynamic_growth_steps": growth_steps(rule),
    }
    if not isinstance(rule, (DynamicScale, FixedScale)) or rule != rule_from_arguments(**config):
        config["rule"] = {"class_name": type(rule).__name__, "config": rule.get_config()}
    return config


def arguments_from_config(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> tuple[object, dict[str, Any]]:
    """Returns the inner optimizer's configuration and the constructor's arguments.

    Args:
        config: A configuration of any generation; it is not changed.
        custom_objects: Rules that are not part of this library, by class name.

    Returns:
        The configuration of the inner optimizer, and a dictionary with `name` (if there is one)
        and either `rule` or the documented arguments.

    Raises:
        ArgumentError: If `config` does not describe a loss scale optimizer.

    Examples:
        >>> arguments_from_config({"optimizer": {}, "loss_scale": {
        ...     "class_name": "FixedLossScale", "config": {"loss_scale_value": 8.0}}})
        ({}, {'rule': FixedScale(scale=8.0, skip_nonfinite=False)})
    """
    rest = dict(config)
    inner_key = "optimizer" if "loss_scale" in rest else "inner_optimizer"
    if inner_key not in rest:
        raise ArgumentError(
            f"The configuration of a loss scale optimizer needs the key `{inner_key}`. Received "
            f"the keys {sorted(rest)}."
        )
    inner = rest.pop(inner_key)
    if "loss_scale" in rest:
        rest["rule"] = made_from(
            rest.pop("loss_scale"),
            _OLDER_LOSS_SCALES,
            "loss scale",
            "Load your own class with lossscale.experimental.LossScaleOptimizer.from_config and "
            "custom_objects.",
        )
    elif "rule" in rest:
        rest["rule"] = made_from(rest["rule"], {**RULES, **(custom_objects or {})}, "rule")
        # Redundant if there is a rule.
        for name in ("dynamic", "initial_scale", "dynamic_growth_steps"):
            rest.pop(name, None)
    for name, idle in _IDLE_KERAS_ARGUMENTS.items():
        if name in rest and rest[name] == idle:
            del rest[name]
    return inner, rest


def check_config(config: object) -> None:
    """Raises if an optimizer's configuration is not a dictionary.

    Raises:
        ArgumentError: If it is not.
    """
    if not isinstance(config, Mapping):
        raise ArgumentError(
            "The configuration of a loss scale optimizer must be a dictionary. Received: "
            f"{config!r}."
        )


def check_described(described: object, what: str) -> None:
    """Raises unless a description has a class name and settings, as in Keras.

    Raises:
        ArgumentError: If it is not; the message names it by `what`.
    """
    if (
        isinstance(described, Mapping)
        and isinstance(described.get("class_name"), str)
        and isinstance(described.get("config"), Mapping)
    ):
        return
    raise ArgumentError(
        f"A configuration must hold the {what} as a dictionary with `class_name` and `config`. "
        f"Received: {described!r}."
    )


def made_from(
    described: Config,
    known: Mapping[str, Callable[..., _Made]],
    what: str,
    instead: str = "For your own class, pass custom_objects={{{name!r}: {name}}}.",
) -> _Made:
    """Creates an object from a description, a class name and settings as in Keras.

    Args:
        described: `{"class_name": ..., "config": ...}`.
        known: What creates the objects of each class.
        what: What is described, for the message.
        instead: What to do about another class; a format string with `name`.

    Raises:
        ArgumentError: If it is not such a description, the class is not known, or a setting is
            missing or unknown.
    """
    check_described(described, what)
    name, settings = described["class_name"], described["config"]
    if name not in known:
        raise ArgumentError(
            f"Unknown {what} class. Received: {name!r}. Known: {sorted(known)}. "
            f"{instead.format(name=name)}"
        )
    try:
        return known[name](**settings)
    except TypeError as error:
        raise ArgumentError(
            f"Cannot create the {what} {name!r} from its configuration: {error}. Received: "
            f"{dict(settings)}."
        ) from error


def rule_from_loss_scale_arguments(
    initial_loss_scale: Scalar = 2.0**15, increment_period: Scalar = 2000, multiplier: Scalar = 2.0
) -> DynamicScale:
    """Returns the rule that the arguments of TensorFlow 2.0's `DynamicLossScale` describe.

    Args:
        initial_loss_scale: The first loss scale.
        increment_period: Number of finite steps in a row after which the scale grows.
        multiplier: Multiplies the scale when it grows, and divides it after an overflow.

    Raises:
        ArgumentError: If a value is invalid; the message names it.
    """
    first = checked_scale("initial_loss_scale", initial_loss_scale)
    factor = checked_scale("multiplier", multiplier)
    if not factor > 1.0:
        raise ArgumentError(
            f"`multiplier` must be a number above 1. Received: multiplier={multiplier!r}."
        )
    return DynamicScale(
        initial_scale=first,
        growth_interval=checked_interval("increment_period", increment_period),
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        min_scale=min(1.0, first),
    )


_OLDER_LOSS_SCALES: dict[str, Callable[..., ScaleRule]] = {
    "FixedLossScale": lambda loss_scale_value: FixedScale(
        checked_scale("loss_scale_value", loss_scale_value)
    ),
    "DynamicLossScale": rule_from_loss_scale_arguments,
}
"""The rule of each serialized `LossScale` of TensorFlow 2.0 to 2.3."""
