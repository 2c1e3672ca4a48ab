"""The `.keras` files of TensorFlow 2.12, written as all later releases write them.

2.12 was the first release with this format. It named the modules of its classes otherwise, and put
the layers of a model under another name, those with weights twice.
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any

from lossscale.migration.layer_weights import holds_arrays, turn

_LAYERS_THEN, _LAYERS_NOW = "_layer_checkpoint_dependencies", "layers"


def rewrite(path: str, target: Path) -> None:
    """Writes the model of a `.keras` file of TensorFlow 2.12 as later releases read it.

    Args:
        path: The file.
        target: Where to write the model and its weights; the optimizer's state is left out.
    """
    import h5py

    with zipfile.ZipFile(path) as then, zipfile.ZipFile(target, "w") as now:
        for name in ("metadata.json", "config.json"):
            text = then.read(name).decode()
            now.writestr(name, text.replace('"keras.engine.', '"keras.src.engine.'))
        stored, written = io.BytesIO(then.read("model.weights.h5")), io.BytesIO()
        with h5py.File(stored, "r") as weights, h5py.File(written, "w") as rearranged:
            _copy(weights, rearranged)
        now.writestr("model.weights.h5", written.getvalue())


def _copy(group: Any, target: Any) -> None:
    for name in group:
        if name in ("vars", "optimizer"):
            if name == "vars":
                group.copy(name, target)
        elif name == _LAYERS_THEN:
            _copy_layers(group[name], target.create_group(_LAYERS_NOW))
        else:
            _copy(group[name], target.create_group(name))


def _copy_layers(group: Any, target: Any) -> None:
    # Layers of one class are numbered.
    with_arrays = sorted((name for name in group if holds_arrays(group[name])), key=turn)
    numbers: dict[str, int] = {}
    for name in with_arrays:
        kind = re.sub(r"_\d+$", "", name)
        number = numbers.get(kind, 0)
        numbers[kind] = number + 1
        _copy(group[name], target.create_group(f"{kind}_{number}" if number else kind))
