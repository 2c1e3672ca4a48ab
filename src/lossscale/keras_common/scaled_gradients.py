"""Whether the gradients that `apply_gradients` receives are still scaled.

Keras' trainer calls `scale_loss` and passes scaled gradients to `apply_gradients`. TensorFlow's
loop calls `get_scaled_loss` and `get_unscaled_gradients`, and passes unscaled ones. So the calls
since the last `scale_loss` decide: as many gradients as `get_unscaled_gradients` returned are
unscaled; after these, each variable gets one scaled gradient for each loss.

A call inside a `tf.function` runs when the function is traced, and not on later steps.
`ScaleLedger` records whether a function returned scaled or unscaled gradients, and assumes the same
for the next ones until it is called again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

import lossscale.framework_types as ft
from lossscale.common.arrays import Location
from lossscale.common.private_names import do_not_convert
from lossscale.errors import GradientsError
from lossscale.packages import warn

_NOTHING_SCALED = (
    "apply_gradients() was called, and the loss was never scaled. The gradients are applied as "
    "they are, which is correct for float32; float16 gradients may have flushed to zero before. "
    "Scale the loss with get_scaled_loss() and unscale the gradients with "
    "get_unscaled_gradients(), or call minimize(), which does both."
)
_NOT_UNSCALED = (
    "get_scaled_loss() was called, and get_unscaled_gradients() was not, before "
    "apply_gradients(). The gradients are applied as they are: if nothing else divided them by "
    "the loss scale, this step is too large by that factor. Pass them through "
    "get_unscaled_gradients() first."
)
_AGAIN = (
    "apply_gradients() was called again for variables that it had already been called for since "
    "scale_loss(). The gradients are {}: if that is wrong, this step is wrong by that factor. Call "
    "scale_loss() before each step, or pass the gradients through get_unscaled_gradients() first."
)
_NOT_SCALED = (
    "{0}() divides the gradients by the loss scale, and the loss was never scaled with {1}(). "
    "If nothing else multiplied it by the loss scale, this step is too small by that factor. Pass "
    "the loss through {1}() before taking gradients, or give unscaled gradients to "
    "apply_gradients()."
)
_UNSCALED_TWICE = (
    "apply() divides the gradients by the loss scale, and get_unscaled_gradients() already did. "
    "If these are its gradients, this step is too small by that factor. Pass unscaled gradients "
    "to apply_gradients()."
)
_SCALED_TWICE = (
    "The loss was scaled twice: minimize(), get_gradients() and compute_gradients() scale it "
    "themselves. This step is too large by the loss scale. Pass the loss as it is."
)
_CANNOT_TELL = (
    "apply_gradients() cannot tell whether these gradients are scaled. A tf.function called "
    "scale_loss() or get_unscaled_gradients() when it was traced, and calls nothing on later "
    "steps; other gradients of this optimizer were made or applied elsewhere. Call "
    "apply_gradients() inside the tf.function that computes the gradients; or use "
    "get_scaled_loss() and get_unscaled_gradients() for all of them, and scale_loss() for none."
)
_OF_ANOTHER = (
    "{verb}() was called of an optimizer that has scaled no loss, after another "
    "LossScaleOptimizer scaled one. If these are gradients of that loss, they need the other "
    "loss scale: the two differ after an overflow that only one of them sees. For one loss and "
    "several optimizers, wrap one keras.optimizers.MultiOptimizer, or unscale all gradients with "
    "get_unscaled_gradients() of the one that scaled it. If they are of another loss, call "
    "get_scaled_loss() of this optimizer."
)

_SCALE = {"scale_loss", "get_scaled_loss"}


@dataclasses.dataclass
class _Record:
    """The calls of one replica since its last `scale_loss`, or in a step like `minimize`.

    Attributes:
        is_own_step: Whether they belong to a step like `minimize`, which scales the loss itself.
        losses: Number of losses scaled before the first of their gradients was applied.
        unscaled: Number of unscaled gradients that are not yet applied.
        graph: Where `scale_loss` or `get_unscaled_gradients` was called last.
        applied_inside: Whether gradients were applied in the graph where they were made.
        times: The variables that were applied since, and how often, by id.
        returned: The kinds of gradients that came out of a graph, "scaled" or "unscaled", and
            whether the call that applied them was traced.
        verbs: The verbs that were called at any time.
    """

    is_own_step: bool = False
    losses: int = 0
    unscaled: float = 0
    graph: weakref.ref[object] | None = None
    applied_inside: bool = False
    times: dict[int, tuple[ft.Variable, int]] = dataclasses.field(default_factory=dict)
    returned: set[tuple[str, bool]] = dataclasses.field(default_factory=set)
    verbs: set[str] = dataclasses.field(default_factory=set)

    def is_elsewhere(self, graph: object) -> bool:
        """Whether the calls were made in a graph, and neither in this one nor around it."""
        while graph is not None and self.graph is not None and graph is not self.graph():
            graph = getattr(graph, "outer_graph", None)
        return self.graph is not None and graph is None

    def counts(self, variables: ft.Variables) -> list[int]:
        """How often each variable was applied."""
        return [self.times.get(id(variable), (None, 0))[1] for variable in variables]

    def count(self, variables: ft.Variables) -> None:
        """Counts variables that were applied."""
        for variable, times in zip(variables, self.counts(variables), strict=True):
            # The variable is kept, so that no other one is given its id.
            self.times[id(variable)] = variable, times + 1


class ScaleLedger:
    """Records how the loss was scaled, for the call that applies the gradients.

    Args:
        is_fixed: Whether programs know the loss scale without reading it.
    """

    # The last call of any optimizer that scaled or unscaled: whose, its verb, and where.
    _last: ClassVar[tuple[weakref.ref[ScaleLedger], str, weakref.ref[object] | None] | None] = None

    def __init__(self, is_fixed: bool) -> None:
        # By replica, because each scales its own loss. Not by thread:
        # TensorFlow's replicas get new threads on every run.
        self._records: defaultdict[int, _Record] = defaultdict(_Record)
        # A program that has read the loss scale may multiply by it.
        self.is_scale_read = False
        self._is_fixed, self._warned = is_fixed, set[str]()
        # What was the last call when this optimizer applied gradients.
        self._last_at_apply = self._last

    def record(self, location: Location, verb: str) -> list[_Record]:
        """Records a call that scales or unscales; returns the records of its replicas."""
        graph, replicas = location
        records = [self._records[replica] for replica in replicas]
        if not records[0].is_own_step:
            if verb == "get_unscaled_gradients" and not self._is_fixed:
                self._check_not_of_another(location, verb)
            ScaleLedger._last = weakref.ref(self), verb, _reference(graph)
        elif verb in _SCALE and records[0].verbs & _SCALE:
            self._warn_once(_SCALED_TWICE)
        for record in records:
            record.verbs.add(verb)
        return records

    def record_scale_loss(self, location: Location) -> None:
        """`scale_loss` was called."""
        graph = location[0]
        for record in self.record(location, "scale_loss"):
            continues = not record.times and not record.is_elsewhere(graph)
            record.losses = record.losses + 1 if continues else 1
            record.unscaled, record.times = 0, {}
            record.graph, record.applied_inside = _reference(graph), False

    @do_not_convert
    def record_unscaled(self, location: Location, count: float) -> None:
        """`get_unscaled_gradients` was called, and returned so many gradients."""
        graph = location[0]
        for record in self.record(location, "get_unscaled_gradients"):
            record.unscaled = count + (0 if record.is_elsewhere(graph) else record.unscaled)
            record.graph, record.applied_inside = _reference(graph), False

    @contextlib.contextmanager
    def own_step(self, location: Location) -> Iterator[None]:
        """A context whose calls are not recorded for the loop around it."""
        before = {replica: self._records[replica] for replica in location[1]}
        self._records.update({replica: _Record(is_own_step=True) for replica in before})
        try:
            yield
        finally:
            self._records.update(before)

    def is_own_step(self, location: Location) -> bool:
        """Whether an `own_step` is in progress."""
        return self._records[location[1][0]].is_own_step

    @contextlib.contextmanager
    def applying(self, location: Location, variables: ft.Variables) -> Iterator[bool]:
        """A context that applies gradients, and records them unless it raises.

        Args:
            location: Where.
            variables: Those that have a gradient.

        Yields:
            Whether their gradients are scaled. Warns where that is a guess.

        Raises:
            GradientsError: If that cannot be known.
        """
        graph, (replica, *_) = location
        record = self._records[replica]
        kind = self._scaled_or_unscaled(record, location, variables)
        yield kind == "scaled"
        if kind == "of another":
            for left in self._left_by_another(location, len(variables)):
                left.unscaled -= len(variables)
            return
        self._last_at_apply = self._last
        if kind is None:
            return
        if kind == "unscaled":
            record.unscaled = max(record.unscaled - len(variables), 0)
        record.count(variables)
        if record.is_elsewhere(graph):
            record.returned.add((kind, graph is not None))
        else:
            record.applied_inside = True

    def _scaled_or_unscaled(
        self, record: _Record, location: Location, variables: ft.Variables
    ) -> str | None:
        """Whether gradients are "scaled" or "unscaled"; None if no call decided it.

        "of another" are those that another optimizer has unscaled and left.
        """
        graph, times = location[0], record.counts(variables)
        left_the_function = record.applied_inside and record.is_elsewhere(graph)
        noted = "scaled" if min(times) < record.losses else None
        if record.unscaled and not left_the_function:
            noted = "unscaled"
        # Gradients that are applied in a graph are never those of an eager call.
        kinds = {kind for kind, traced in record.returned if graph is not None or not traced}
        if noted is not None:
            kinds = {noted, *(kinds if graph is None else ())}
        if len(kinds) > 1 or (left_the_function and noted):
            raise GradientsError(_CANNOT_TELL)
        # With one new variable all gradients are those of the loss. Without, they may be those
        # of a second loss, or the first ones were the sum of both.
        if noted == "scaled" and (max(times) >= record.losses or min(times) > 0):
            self._warn_once(_AGAIN.format("divided by the loss scale"))
        if noted == "unscaled" and not record.is_own_step and not self._is_fixed:
            self._check_scaled(record, "get_unscaled_gradients", "get_scaled_loss", *_SCALE)
        if not kinds and record.losses:
            self._warn_once(_AGAIN.format("applied as they are, and not divided by the loss scale"))
        elif not kinds and "get_unscaled_gradients" not in record.verbs:
            if not record.verbs and self._left_by_another(location, len(variables)):
                return "of another"
            self._check_not_of_another(location, "apply_gradients")
            self._warn_once(_NOT_UNSCALED if record.verbs else _NOTHING_SCALED)
        return next(iter(kinds), None)

    def check_apply(self, location: Location) -> None:
        """Checks a call of Keras' `apply`, whose gradients are scaled by definition."""
        self._check_not_of_another(location, "apply")
        record = self._records[location[1][0]]
        if record.verbs != {"get_scaled_loss"}:
            self._check_scaled(record, "apply", "scale_loss")

    def record_apply(self, location: Location, variables: ft.Variables) -> None:
        """Records the end of the step of `apply`."""
        record = self._records[location[1][0]]
        record.unscaled = 0
        record.count(variables)
        self._last_at_apply = self._last

    def _check_scaled(self, record: _Record, verb: str, *scale: str) -> None:
        """Warns if a method divides gradients although no loss was scaled."""
        if not record.verbs & set(scale) and not self.is_scale_read:
            is_twice = verb == "apply" and "get_unscaled_gradients" in record.verbs
            self._warn_once(_UNSCALED_TWICE if is_twice else _NOT_SCALED.format(verb, scale[0]))

    def _check_not_of_another(self, location: Location, verb: str) -> None:
        """Raises if another optimizer scaled the last loss here, and this one never scaled any."""
        if self._last in (None, self._last_at_apply) or self._records[location[1][0]].verbs:
            return
        (owner, call, origin), graph = self._last, location[0]
        is_here = graph is None if origin is None else graph is origin()
        # Any optimizer can apply gradients that the other one has unscaled.
        is_ready = call == "get_unscaled_gradients" and verb == "apply_gradients"
        # A program that has read the scale is no exception: reading must not change a step.
        if owner() not in (None, self) and is_here and not is_ready:
            raise GradientsError(_OF_ANOTHER.format(verb=verb))

    def _left_by_another(self, location: Location, count: int) -> list[_Record]:
        """A list with the record of another optimizer that left as many unscaled gradients here."""
        graph, (replica, *_) = location
        owner = None if self._last in (None, self._last_at_apply) else self._last[0]()
        records = [] if owner is None else [owner._records[replica]]
        return [r for r in records if r.unscaled >= count and not r.is_elsewhere(graph)]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message)


def _reference(graph: object) -> weakref.ref[object] | None:
    return None if graph is None else weakref.ref(graph)
