"""Matches the arrays of a model file to the variables of a Keras 3 model."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import keras

from lossscale.errors import OldFileError
from lossscale_migration.building import ModelBuilder
from lossscale_migration.layers import ConvertedLayer, plain_values
from lossscale_migration.models import HDF5, ModelFile, layers_with_arrays, named_arrays, parsed

# Where `.keras` files store the layers of a model; release 2.12 used the second name.
_MODEL_LAYERS = ("layers", "_layer_checkpoint_dependencies")


class Weights:
    """The variables of a model in the order of Keras 2.

    Args:
        builder: The builder of the model.
        model: The model.
    """

    def __init__(self, builder: ModelBuilder, model: Any) -> None:
        self.builder = builder
        self.path = builder.path
        self.model = model
        self._values: list[tuple[Any, Any]] = []

    def trainable(self) -> list[Any]:
        """Returns the trained variables in the order in which Keras 2 passed them to optimizers."""
        return self._split(self.model)[0]

    def read_hdf5(self, group: Any) -> None:
        """Finds a variable for every array of an HDF5 file.

        Args:
            group: The group `model_weights`.

        Raises:
            OldFileError: If a layer has other weights in the file.
        """
        for part in self.builder.parts[id(self.model)]:
            if part.layer is None or part.name not in group:
                continue
            trainable, others = self._split(part.layer)
            _, arrays = named_arrays(group[part.name])
            self._pair(part, [*trainable, *others], arrays)

    def read_zip(self, stored: Any) -> None:
        """Finds a variable for every array of a `.keras` file.

        Args:
            stored: The content of `model.weights.h5`.

        Raises:
            OldFileError: If a layer has other weights in the file.
        """
        for part, group in self._places(self.model, stored, set()):
            found = group.get("vars", {})
            arrays = [found[name][()] for name in sorted(found, key=int)]
            self._pair(part, _own(part.layer), arrays)

    def assign(self) -> None:
        """Sets all variables."""
        for variable, value in self._values:
            variable.assign(value)
        for layer in self.model._flatten_layers():
            # Normalization computes with values derived from its variables.
            if callable(getattr(layer, "finalize_state", None)):
                layer.finalize_state()

    def _pair(self, part: ConvertedLayer, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        what = f"{self.path}: the layer {part.name!r} ({part.kind})"
        if len(arrays) != len(variables):
            raise OldFileError(
                f"{what} has {len(arrays)} weight arrays in the file and {len(variables)} in Keras "
                "3. Create the model with Keras 3 and restore a checkpoint of it with "
                "restore_checkpoint."
            )
        for variable, value in zip(variables, arrays, strict=True):
            if tuple(variable.shape) != tuple(value.shape):
                raise OldFileError(
                    f"{what} has weights of shape {tuple(value.shape)} in the file and "
                    f"{tuple(variable.shape)} in Keras 3 ({variable.path!r})."
                )
            self._values.append((variable, value))

    def _children(self, layer: Any) -> list[Any]:
        if id(layer) in self.builder.parts:
            return [part.layer for part in self.builder.parts[id(layer)] if part.layer is not None]
        return [one for _, value in attributes(layer) for one in value]

    def _split(self, layer: Any) -> tuple[list[Any], list[Any]]:
        """Returns the trained and the other variables of a layer, as Keras 2 listed them."""
        children = [self._split(child) for child in self._children(layer)]
        own = _own(layer)
        count = len(layer._trainable_variables)
        trained, others = own[:count], own[count:]
        below = [v for split in children for v in split[0]]
        below_others = [v for split in children for v in split[1]]
        if id(layer) in self.builder.parts:
            # A model puts its own weights last.
            trained, others = [*below, *trained], [*below_others, *others]
            if not layer.trainable:
                trained, others = [], [*trained, *others]
        elif layer.trainable:
            trained, others = [*trained, *below], [*others, *below_others]
        else:
            every = [v for split in children for part in split for v in part]
            trained, others = [], [*trained, *others, *every]
        return _once(trained), _once(others)

    def _places(
        self, layer: Any, group: Any, seen: set[int]
    ) -> Iterator[tuple[ConvertedLayer, Any]]:
        """Yields the layers inside a layer, each with its group in a `.keras` file."""
        seen.add(id(layer))
        if id(layer) in self.builder.parts:
            parts = [part for part in self.builder.parts[id(layer)] if part.layer is not None]
            yield from self._in_list(parts, _first(group, *_MODEL_LAYERS), seen)
            return
        # In the order in which Keras 2 visited them.
        for name, children in sorted(attributes(layer), reverse=True):
            value = getattr(layer, name)
            if isinstance(value, (list, tuple)):
                parts = [
                    ConvertedLayer(child.name, type(child).__name__, child) for child in children
                ]
                yield from self._in_list(parts, _first(group, name), seen)
            elif id(value) not in seen:
                below = _first(group, name)
                yield ConvertedLayer(value.name, type(value).__name__, value), below
                yield from self._places(value, below, seen)

    def _in_list(
        self, parts: Sequence[ConvertedLayer], group: Any, seen: set[int]
    ) -> Iterator[tuple[ConvertedLayer, Any]]:
        # Layers of one class are numbered; 2.12 counts a layer with weights twice.
        with_arrays = layers_with_arrays(group)
        places: dict[str, int] = {}
        for part in parts:
            if id(part.layer) in seen or not part.layer.weights:
                continue
            kind = snake_case(part.kind)
            of_kind = [name for name in with_arrays if re.fullmatch(rf"{kind}(_\d+)?", name)]
            places[kind] = place = places.get(kind, -1) + 1
            below = group[of_kind[place]] if place < len(of_kind) else {}
            yield part, below
            yield from self._places(part.layer, below, seen)


def attributes(layer: Any) -> list[tuple[str, list[Any]]]:
    """Returns the layers in a layer's attributes, by attribute, in the order of creation."""
    found, seen = [], {id(layer)}
    for name, value in vars(layer).items():
        several = list(value) if isinstance(value, (list, tuple)) else [value]
        several = [one for one in several if isinstance(one, keras.layers.Layer)]
        several = [one for one in several if id(one) not in seen]
        if several and name != "_layers":
            seen |= {id(one) for one in several}
            found.append((name, several))
    return found


def snake_case(name: str) -> str:
    """Returns the name of a class as in `.keras` files.

    Examples:
        >>> snake_case("MultiHeadAttention"), snake_case("Conv2DTranspose")
        ('multi_head_attention', 'conv2d_transpose')
    """
    name = re.sub(r"\W+", "", name.rpartition(">")[2])
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _first(group: Any, *names: str) -> Any:
    return next((group[name] for name in names if name in group), {})


def _own(layer: Any) -> list[Any]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _once(variables: list[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def load_old_model(file: ModelFile, custom_objects: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Builds the model that a Keras 2 file describes, with its weights.

    Args:
        file: An HDF5 file or a `.keras` file.
        custom_objects: The caller's classes and functions, by name.

    Returns:
        The model, not compiled, and its trained variables in the order of Keras 2.

    Raises:
        OldFileError: If Keras 3 cannot build the model.
    """
    builder = ModelBuilder(file.path, custom_objects)
    model = builder.model(plain_values(parsed(file.config)))
    if not model.built:
        raise OldFileError(
            f"{file.path}: the file does not record the model's input shape, so it has no "
            "weights. Create the model with Keras 3 and compile it."
        )
    weights = Weights(builder, model)
    if file.form == HDF5:
        with h5py.File(file.path, "r") as stored:
            weights.read_hdf5(stored["model_weights"])
    else:
        with zipfile.ZipFile(file.path) as archive:
            content = io.BytesIO(archive.read("model.weights.h5"))
        with h5py.File(content, "r") as stored:
            weights.read_zip(stored)
    weights.assign()
    return model, weights.trainable()
