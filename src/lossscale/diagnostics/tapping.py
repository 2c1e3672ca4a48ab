"""The tensors inside a model whose gradients are of interest, and how to get at them.

Those are what each layer with trainable variables returns, and what the model returns. Where the
model ends in an activation function, it is what goes into that: the loss is often computed from the
logits directly, and where it is not, it is the logits' gradient that goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from lossscale import registry

if TYPE_CHECKING:
    from lossscale.diagnostics.measurement import Derived

OUTPUT, ACTIVATION = "output:", "activation:"
"""What the names of tensors begin with."""

_LIBRARIES = tuple(framework.root for framework in registry.kerases())

Tap = Callable[[str, Any], Any]
"""Given the name of a tensor and the tensor, returns what the computation must go on with."""


class Library(NamedTuple):
    """What differs between the two generations of Keras.

    Attributes:
        graph_of: Returns a layer as the graph of layers that it is, None if it is none.
        is_softmax: Whether a layer is nothing but a softmax.
        linear: The activation function that does nothing.
        flatten: Lists the leaves of a structure.
        map_structure: Applies a function to the leaves of a structure.
    """

    graph_of: Callable[[Any], Any]
    is_softmax: Callable[[Any], bool]
    linear: Any
    flatten: Callable[[Any], list[Any]]
    map_structure: Callable[..., Any]


class TappedModel:
    """Where to tap a model.

    Args:
        model: The model, with its variables.
        library: The Keras it is of.

    Attributes:
        untapped: The layers, or the model, that what happens inside of is not known of.
    """

    def __init__(self, model: Any, library: Library) -> None:
        self.layer_names: dict[str, str] = {}
        self.untapped: tuple[str, ...] = ()
        self._model_name = model.name
        self._library = library
        self._wrappers: list[tuple[Any, str, Callable[[Any, Tap], Any]]] = []
        self._inside: dict[int, tuple[str, str]] = {}
        self._output_names: list[str | None] = []
        graph = library.graph_of(model)
        if graph is None:
            self._tap_own_layers(model)
            return
        sources = [self._source(tensor) for tensor in library.flatten(graph.outputs)]
        for source in {id(source): source for source in sources}.values():
            self._tap_last_layer(source)
        tapped = {id(layer) for layer, _, _ in self._wrappers}
        self._output_names = [
            None if id(source) in tapped else self._named(OUTPUT, source) for source in sources
        ]
        for layer in self._weighted_layers(graph):
            if not any(layer is source for source in sources):
                self._tap_inside(layer)
            self._tap_own_layers(layer)

    def _source(self, tensor: Any) -> Any:
        """The innermost layer that returns a symbolic tensor."""
        layer, _, number = tensor._keras_history
        inner = self._library.graph_of(layer)
        return (
            layer if inner is None else self._source(self._library.flatten(inner.outputs)[number])
        )

    def _weighted_layers(self, graph: Any) -> Iterator[Any]:
        for layer in graph.layers:
            inner = self._library.graph_of(layer)
            if inner is not None:
                yield from self._weighted_layers(inner)
            elif layer.trainable_variables:
                yield layer

    def _tap_own_layers(self, owner: Any) -> None:
        """Taps the layers that a layer calls by itself, if it was not written by Keras.

        Those of Keras may call theirs in compiled loops, from which no tensor gets out.
        """
        if type(owner).__module__.partition(".")[0] in _LIBRARIES:
            return
        for layer in owner._flatten_layers(include_self=False, recursive=False):
            graph = self._library.graph_of(layer)
            inner = [layer] if graph is None else list(self._weighted_layers(graph))
            for each in inner:
                known = any(each is tapped for tapped, _, _ in self._wrappers)
                if each.trainable_variables and not known:
                    self._tap_inside(each)
                    name = ACTIVATION + self._path(each)
                    self._inside[id(each)] = name, self._path(owner)
                    self._tap_own_layers(each)

    def leave_inside(self) -> bool:
        """Taps the layers no longer that other layers call by themselves.

        Returns:
            Whether there were any.
        """
        self.untapped = tuple(dict.fromkeys(owner for _, owner in self._inside.values()))
        left = [wrapper for wrapper in self._wrappers if id(wrapper[0]) not in self._inside]
        found, self._wrappers, self._inside = bool(self._inside), left, {}
        return found

    def without_lost(self, derived: list[Derived]) -> list[Derived]:
        """Leaves out the tensors inside that no gradient arrived at, as in compiled loops."""
        lost = {each.key for each in derived if each.gradient is None}
        owners = [owner for name, owner in self._inside.values() if name in lost]
        self.untapped = tuple(dict.fromkeys([*self.untapped, *owners]))
        inside = {name for name, _ in self._inside.values()}
        return [each for each in derived if each.key not in lost & inside]

    def _tap_last_layer(self, layer: Any) -> None:
        activation = getattr(layer, "activation", None)
        if callable(activation) and activation is not self._library.linear:
            attribute = "activation"
        elif self._library.is_softmax(layer):
            attribute = "call"
        else:
            return
        name = self._named(OUTPUT, layer)

        def wrapper(function: Any, tap: Tap) -> Any:
            return lambda tensor, *args, **kwargs: function(
                _tapped(name, tensor, tap), *args, **kwargs
            )

        self._wrappers.append((layer, attribute, wrapper))

    def _tap_inside(self, layer: Any) -> None:
        name = self._named(ACTIVATION, layer)

        def wrapper(function: Any, tap: Tap) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                returned = function(*args, **kwargs)
                return self._library.map_structure(lambda leaf: _tapped(name, leaf, tap), returned)

            return call

        self._wrappers.append((layer, "call", wrapper))

    @staticmethod
    def _path(layer: Any) -> str:
        # Layers of tf_keras, and operations that are no layers, have no path.
        return str(getattr(layer, "path", None) or layer.name)

    def _named(self, kind: str, layer: Any) -> str:
        path = self._path(layer)
        # Keras calls an output by the name of its layer.
        name = kind + (layer.name if kind == OUTPUT else path)
        self.layer_names[name] = path
        return name

    @contextlib.contextmanager
    def installed(self, tap: Tap) -> Iterator[None]:
        """Within it the layers pass their tensors through `tap`."""
        with contextlib.ExitStack() as stack:
            for layer, attribute, wrapper in self._wrappers:
                wrapped = wrapper(getattr(layer, attribute), tap)
                stack.enter_context(replaced(layer, attribute, wrapped))
            yield

    def on_outputs(self, y_pred: Any, tap: Tap) -> Any:
        """Passes through `tap` what the model returns, as far as no layer does it."""
        names = list(self._output_names)
        if not names:
            leaves = self._library.flatten(y_pred)
            ends = [""] if len(leaves) == 1 else [f"/{number}" for number in range(len(leaves))]
            names = [f"{OUTPUT}{self._model_name}{end}" for end in ends]
            self.layer_names.update(dict.fromkeys(map(str, names), self._model_name))
        waiting = iter(names)

        def through(tensor: Any) -> Any:
            name = next(waiting)
            return tensor if name is None else _tapped(name, tensor, tap)

        return self._library.map_structure(through, y_pred)


@contextlib.contextmanager
def replaced(target: Any, attribute: str, value: Any) -> Iterator[None]:
    """Within it an object has another attribute, of which Keras' tracking knows nothing."""
    attributes = vars(target)
    was_there, before = attribute in attributes, attributes.get(attribute)
    attributes[attribute] = value
    try:
        yield
    finally:
        if was_there:
            attributes[attribute] = before
        else:
            del attributes[attribute]


def _tapped(name: str, tensor: Any, tap: Tap) -> Any:
    if "float" not in str(getattr(tensor, "dtype", "")):
        return tensor
    mask = getattr(tensor, "_keras_mask", None)
    tensor = tap(name, tensor)
    if mask is not None:
        # The loss leaves out what the mask hides.
        tensor._keras_mask = mask
    return tensor
