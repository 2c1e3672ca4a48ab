"""Files that lack what an optimizer sets as attributes in `build`, such as Nadam's product.

Keras' own LossScaleOptimizer builds the optimizer inside it with attribute tracking off. So its
files have the variables that `add_variable` made, and no others.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lossscale.errors import LossScaleWarning
from lossscale.keras.weights import numpy_of
from lossscale.older.slots import kind_of, nadam_product


def places_of_attributes(inner: Any, trained: Sequence[Any]) -> list[int]:
    """Returns which of an optimizer's variables its `build` sets as attributes, by their places.

    Args:
        inner: A Keras optimizer that is built.
        trained: The variables it was built with.
    """
    # Only while it builds can it be seen who lists a variable, so another one is built.
    twin = type(inner).from_config(inner.get_config())
    added = {id(variable) for variable in twin.variables}
    track = twin._track_variable

    def noted(variable: Any) -> None:
        added.add(id(variable))
        track(variable)

    twin.__dict__["_track_variable"] = noted
    twin.build(list(trained))
    return [place for place, variable in enumerate(twin.variables) if id(variable) not in added]


def completed(
    values: Mapping[str, Any], own: int, lacking: Sequence[int], inner: Any
) -> dict[str, Any]:
    """Returns the values of a file with the missing ones put in.

    Args:
        values: Arrays by number: `own` others, then the inner optimizer's, of which some lack.
        own: How many come before those of the inner optimizer.
        lacking: Places of the missing ones among the inner optimizer's variables.
        inner: The inner optimizer.
    """
    given = [values[str(number)] for number in range(len(values))]
    arrays = iter(given[own:])
    variables = inner.variables
    filled = [
        numpy_of(variable) if place in lacking else next(arrays)
        for place, variable in enumerate(variables)
    ]
    missing = [variables[place] for place in lacking]
    product = getattr(inner, "_u_product", None)
    if kind_of(inner) == "Nadam" and [id(v) for v in missing] == [id(product)]:
        # These files count applied steps alone, so it is known.
        steps = int(filled[0])
        filled[lacking[0]] = nadam_product(float(inner.beta_1), steps)
    else:
        names = sorted({variable.path for variable in missing})
        warnings.warn(
            f"The file has no values for the variables {names} of {type(inner).__name__}: Keras' "
            "own LossScaleOptimizer does not write them. They stay as they are.",
            LossScaleWarning,
            stacklevel=2,
        )
    return {str(number): value for number, value in enumerate([*given[:own], *filled])}
