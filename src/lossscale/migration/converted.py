"""What a configuration of Keras 2 says of a layer, and the layer of Keras 3 it became."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from lossscale.errors import LossScaleError, OldFileError
from lossscale.migration.damage import first_line


@dataclasses.dataclass
class ConvertedLayer:
    """A layer of the file and what it became.

    Args:
        name: Its name in the file.
        kind: The name of its class in the file.
        layer: The layer of Keras 3; None for what has no weights and became an operation.
    """

    name: str
    kind: str
    layer: Any


def name_of(described: dict[str, Any]) -> str:
    """Returns the name of a layer in its file; that of its class if it has none."""
    config = described["config"]
    name = described.get("name") or (isinstance(config, dict) and config.get("name"))
    return str(name or described["class_name"])


def is_container(described: dict[str, Any]) -> bool:
    """Whether a configuration is that of a model."""
    config = described["config"]
    if isinstance(config, list):
        return bool(described["class_name"] == "Sequential")
    return "layers" in config and isinstance(config["layers"], list)


def unpacked(value: Any) -> Any:
    """Returns the only element of a list that has one, and everything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


@contextlib.contextmanager
def made_by_keras(what: str) -> Iterator[None]:
    """Where Keras 3 makes something: whatever it raises becomes an error that names it.

    Raises:
        OldFileError: If it raises anything but an error of this library.
    """
    try:
        yield
    except LossScaleError:
        raise
    # Keras raises whatever the layer of the moment raises.
    except Exception as error:
        text = first_line(error)
        raise OldFileError(f"{what} cannot be made by Keras 3: {text}") from error
