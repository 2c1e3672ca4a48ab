"""The dtype policy of TensorFlow 2.1 to 2.3, which had a loss scale."""

from __future__ import annotations

import functools
from typing import Any

from lossscale.errors import ArgumentError
from lossscale.experimental.loss_scale import LossScale, get


class _ClassOfPlainPolicies(type):
    """Makes `isinstance` recognize the policies that the class creates."""

    _plain: type[Any]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._plain)


@functools.cache
def policy_class(plain: type[Any]) -> type[Any]:
    """Returns the older `Policy` class for Keras 3 or tf_keras.

    Args:
        plain: The framework's own class of policies, which have no loss scale.
    """

    class Policy(metaclass=_ClassOfPlainPolicies):
        """A dtype policy with a loss scale, which `compile` uses to wrap optimizers.

        The call returns a policy of Keras' own class with two more attributes, `loss_scale` and
        `should_cast_variables`, so that files contain only the names of Keras' policies.

        Args:
            name: `"mixed_float16"`, or another name of a policy.
            loss_scale: A `LossScale`, a number, `"dynamic"`, or None for no loss scaling.
                `"auto"` means `"dynamic"` with `"mixed_float16"`, and None otherwise.

        Raises:
            ValueError: If there is no policy with this name, or the loss scale is invalid.

        Source: `tf.keras.mixed_precision.experimental.Policy`, TensorFlow 2.1 to 2.3.
        """

        _plain = plain

        def __new__(cls, name: str, loss_scale: Any = "auto") -> Any:
            policy = plain(name)
            policy.loss_scale = _loss_scale_of(policy, loss_scale)
            policy.should_cast_variables = policy.variable_dtype != policy.compute_dtype
            return policy

    return Policy


def _loss_scale_of(policy: Any, loss_scale: Any) -> LossScale | None:
    is_float16 = policy.name == "mixed_float16"
    if isinstance(loss_scale, str) and loss_scale == "auto":
        loss_scale = "dynamic" if is_float16 else None
    if loss_scale is None:
        return None
    if not is_float16:
        raise ArgumentError(
            f"The policy {policy.name!r} takes no loss scale: compile() wraps optimizers under "
            f"'mixed_float16' only. Received: loss_scale={loss_scale!r}. Leave it out, and wrap "
            "the optimizer in a LossScaleOptimizer instead."
        )
    return get(loss_scale)


def older_policies(mixed_precision: Any) -> dict[str, Any]:
    """Returns the documented names other than the optimizer.

    Args:
        mixed_precision: The `mixed_precision` module of Keras 3 or tf_keras.
    """
    policy = policy_class(mixed_precision.Policy)

    def set_policy(given: Any) -> None:
        mixed_precision.set_global_policy(policy(given) if isinstance(given, str) else given)

    def get_layer_policy(layer: Any) -> Any:
        return layer.dtype_policy

    return {
        "Policy": policy,
        "global_policy": mixed_precision.global_policy,
        "set_policy": set_policy,
        "get_layer_policy": get_layer_policy,
    }
