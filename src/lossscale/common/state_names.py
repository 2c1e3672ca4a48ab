"""What the variables that hold a rule's state are called on Keras 3, in files too."""

from __future__ import annotations

# The names of Keras' own class; other rules may have more fields.
_OF_KERAS = {"scale": "dynamic_scale", "good_steps": "step_counter"}


def variable_name(field: str) -> str:
    """Returns the name of the variable for a field of a state.

    Example:
        >>> variable_name("scale"), variable_name("largest")
        ('dynamic_scale', 'loss_scale_largest')
    """
    return _OF_KERAS.get(field, f"loss_scale_{field}")
