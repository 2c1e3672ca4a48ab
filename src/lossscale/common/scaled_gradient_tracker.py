"""Whether the gradients that `apply_gradients` receives are still scaled.

Two families of calls meet there. The documented one gives it unscaled gradients:
`get_scaled_loss`, `get_unscaled_gradients`, `apply_gradients`. Keras' trainer gives it scaled
ones: `scale_loss`, `apply_gradients`. So `scale_loss` leaves a record, which serves every variable
once: a program may take the gradients of one loss in groups and apply each group by itself.
`get_unscaled_gradients` notes how many gradients it returned: so many are applied as they are.

Under `tf.function` these calls run once, when the function is traced, and not on later steps.
What a variable was given that was made in one graph and applied in another therefore holds for
it from then on: the traced half will do the same on the next step without passing through here.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lossscale.common.autograph import do_not_convert
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
    "scale_loss(). The gradients are applied as they are: if they are those of the scaled loss, "
    "this step is too large by the loss scale. Call scale_loss() before each step, or pass the "
    "gradients through get_unscaled_gradients() first."
)
_AGAIN_DIVIDED = (
    "apply_gradients() was called again for variables that it had already been called for since "
    "scale_loss(). The gradients are divided by the loss scale: if nothing multiplied them by "
    "it, this step is too small by that factor. Call scale_loss() before each step, or pass the "
    "gradients through get_unscaled_gradients() first."
)
_EITHER = (
    "apply_gradients() cannot tell whether these gradients are scaled: {reason}. They are {taken}. "
    "Call apply_gradients() inside the tf.function, or use only one of scale_loss() and "
    "get_unscaled_gradients()."
)
_BOTH_TRACED = (
    "scale_loss() and get_unscaled_gradients() were both called inside a tf.function that "
    "returned gradients"
)
_ONE_TRACED = (
    "get_unscaled_gradients() was called inside a tf.function that returned gradients, and "
    "scale_loss() outside of it"
)
_APPLIED_INSIDE = "scale_loss() was called inside a tf.function that applied gradients itself"
_AS_SCALED = "taken for scaled ones and divided by the loss scale"
_AS_UNSCALED = "taken for unscaled ones and applied as they are"
_APPLY_WITHOUT_SCALE = (
    "apply() divides the gradients by the loss scale, and the loss was never scaled with "
    "scale_loss(). If nothing else multiplied it by the loss scale, this step is too small by "
    "that factor. Pass the loss through scale_loss() before taking gradients, or give unscaled "
    "gradients to apply_gradients()."
)
_UNSCALED_TWICE = (
    "apply() divides the gradients by the loss scale, and get_unscaled_gradients() already did. "
    "If these are its gradients, this step is too small by that factor. Pass unscaled gradients "
    "to apply_gradients()."
)


class TraceLocation(NamedTuple):
    """Where in a program a call is made.

    Attributes:
        graph: The graph being traced, None where there is none.
        replicas: The numbers of the replicas it is made for.
    """

    graph: Any
    replicas: tuple[int, ...]

    def reference(self) -> weakref.ref[Any] | None:
        """What a record remembers of the location."""
        return None if self.graph is None else weakref.ref(self.graph)


class _ReplicaRecord:
    """What was said of the gradients of one replica.

    Attributes:
        losses: How many losses `scale_loss` scaled before the first of their gradients was
            applied. Gradients of several losses may be added up, or applied one after the other.
        scaled_in: The graph where it did.
        times: The variables that were applied since, and how often, by id.
        unscaled: How many gradients `get_unscaled_gradients` returned that were not applied yet.
        unscaled_in: The graph where it did.
        spent: Whether some of these were applied.
        applied_in_same_graph: The kinds of gradients that were applied where they were made.
    """

    def __init__(self, losses: int, location: TraceLocation) -> None:
        self.losses = losses
        self.scaled_in = location.reference()
        self.times: dict[int, tuple[Any, int]] = {}
        self.unscaled: float = 0
        self.unscaled_in = location.reference()
        self.spent = False
        self.applied_in_same_graph: set[str] = set()

    def kind(self, location: TraceLocation, variables: Sequence[Any]) -> str | None:
        """What the gradients of these variables are: "scaled", "unscaled", or not known."""
        are_of_another_graph = "unscaled" in self.applied_in_same_graph and _is_in_another_graph(
            self.unscaled_in, location
        )
        if self.unscaled and not are_of_another_graph:
            return "unscaled"
        return "scaled" if self.losses and min(self.counts(variables)) < self.losses else None

    def counts(self, variables: Sequence[Any]) -> list[int]:
        """How often each variable was applied."""
        return [self.times.get(id(variable), (None, 0))[1] for variable in variables]

    def count(self, variables: Sequence[Any]) -> None:
        """Counts variables that were applied."""
        for variable, times in zip(variables, self.counts(variables), strict=True):
            # The variable is kept, so that no other one is given its id.
            self.times[id(variable)] = variable, times + 1


def _is_in_another_graph(origin: weakref.ref[Any] | None, location: TraceLocation) -> bool:
    """Whether gradients come out of a graph, and not out of that of `location`."""
    if origin is None:
        return False
    graph = origin()
    # A graph that is gone is not the absence of one.
    return graph is None or graph is not location.graph


class ScaledGradientTracker:
    """Remembers how the loss was scaled, for the call that applies the gradients."""

    def __init__(self) -> None:
        # By the number of the replica, each of which scales a loss of its own. Not by thread:
        # TensorFlow's replicas get new threads on every run.
        self._records: dict[int, _ReplicaRecord] = {}
        # The kinds of gradients that variables had out of another graph, by id: "scaled" or
        # "unscaled", and whether the call that applied them was traced as well.
        self._from_other_graphs: dict[int, tuple[Any, set[tuple[str, bool]]]] = {}
        # By name. A verb that makes a whole step leaves none.
        self._calls: set[str] = set()
        # The replicas for which such a verb is under way.
        self._isolated: list[int] = []
        self._warned: set[str] = set()

    def note_scale_loss(self, location: TraceLocation) -> None:
        """`scale_loss` was called."""
        self._calls.add("scale_loss")
        for replica in location.replicas:
            losses, record = 1, self._records.get(replica)
            if record is not None and not record.times:
                losses += 0 if _is_in_another_graph(record.scaled_in, location) else record.losses
            self._records[replica] = _ReplicaRecord(losses, location)

    def note_get_scaled_loss(self) -> None:
        """`get_scaled_loss` was called."""
        self._calls.add("get_scaled_loss")

    @do_not_convert
    def note_unscaled(self, location: TraceLocation, count: float) -> None:
        """`get_unscaled_gradients` was called: what it returned is not scaled any more.

        Args:
            location: Where.
            count: How many gradients it returned.
        """
        self._calls.add("get_unscaled_gradients")
        for replica in location.replicas:
            record = self._records.setdefault(replica, _ReplicaRecord(0, location))
            goes_on = not record.spent and not _is_in_another_graph(record.unscaled_in, location)
            if not goes_on:
                record.unscaled = 0
                record.applied_in_same_graph.discard("unscaled")
            record.unscaled += count
            record.unscaled_in, record.spent = location.reference(), False

    @contextlib.contextmanager
    def isolated_step(self, location: TraceLocation) -> Iterator[None]:
        """Within it calls are no part of the loop around it: their notes go when it ends."""
        records = {replica: self._records.pop(replica, None) for replica in location.replicas}
        calls = set(self._calls)
        self._isolated.extend(location.replicas)
        try:
            yield
        finally:
            for replica in location.replicas:
                self._isolated.remove(replica)
            for replica, record in records.items():
                self._records.pop(replica, None)
                if record is not None:
                    self._records[replica] = record
            self._calls = calls

    def is_isolated(self, location: TraceLocation) -> bool:
        """Whether an `isolated_step` is under way."""
        return location.replicas[0] in self._isolated

    @do_not_convert
    def note_all_unscaled(self, location: TraceLocation) -> None:
        """Whatever is applied next is not scaled, whoever unscaled it."""
        self.note_unscaled(location, math.inf)

    def gradients_are_scaled(self, location: TraceLocation, variables: Sequence[Any]) -> bool:
        """Whether the gradients given to `apply_gradients` are scaled; warns where it guesses.

        Args:
            location: Where.
            variables: Those that have a gradient. `note_applied` follows once the step is made.
        """
        record = self._records.get(location.replicas[0])
        kind = record.kind(location, variables) if record is not None else None
        if kind == "unscaled":
            return False
        earlier = self._kinds_from_other_graphs(variables)
        if record is not None and kind == "scaled":
            conflict = ("unscaled", False) in earlier
            return self._are_scaled_by_record(record, record.counts(variables), location, conflict)
        kinds = {kind for kind, _ in earlier}
        if "scaled" in kinds:
            if "unscaled" in kinds:
                self._warn_once(_EITHER.format(reason=_BOTH_TRACED, taken=_AS_SCALED))
            return True
        if "unscaled" not in kinds:
            if record is not None and record.losses:
                self._warn_once(_AGAIN)
            elif "get_unscaled_gradients" not in self._calls:
                by_hand = "get_scaled_loss" in self._calls
                self._warn_once(_NOT_UNSCALED if by_hand else _NOTHING_SCALED)
        return False

    def _are_scaled_by_record(
        self, record: _ReplicaRecord, times: Sequence[int], location: TraceLocation, conflict: bool
    ) -> bool:
        """What a record says that has not served each of the variables yet."""
        if _is_in_another_graph(record.scaled_in, location):
            if "scaled" in record.applied_in_same_graph:
                # No other graph needs it, unless that one returned gradients as well.
                self._warn_once(_EITHER.format(reason=_APPLIED_INSIDE, taken=_AS_SCALED))
        elif location.graph is None and conflict:
            # Right after scale_loss() its gradients are expected first, and their groups then.
            applied = [variable for variable, _ in record.times.values()]
            scaled = not applied or ("unscaled", False) in self._kinds_from_other_graphs(applied)
            taken = _AS_SCALED if scaled else _AS_UNSCALED
            self._warn_once(_EITHER.format(reason=_ONE_TRACED, taken=taken))
            return scaled
        # With one new variable all gradients are those of the loss. Without, they may be those
        # of a second loss, or the first ones were the sum of both.
        if max(times) >= record.losses or min(times) > 0:
            self._warn_once(_AGAIN_DIVIDED)
        return True

    def note_applied(self, location: TraceLocation, variables: Sequence[Any]) -> None:
        """`apply_gradients` has made its step: the records have served these variables again."""
        for replica in location.replicas:
            record = self._records.get(replica)
            kind = record.kind(location, variables) if record is not None else None
            if record is None or kind is None:
                continue
            origin = record.scaled_in
            if kind == "unscaled":
                origin = record.unscaled_in
                record.unscaled = max(record.unscaled - len(variables), 0)
                record.spent = True
            if record.losses:
                record.count(variables)
            if _is_in_another_graph(origin, location):
                for variable in variables:
                    _, kinds = self._from_other_graphs.setdefault(id(variable), (variable, set()))
                    kinds.add((kind, location.graph is not None))
            else:
                record.applied_in_same_graph.add(kind)

    def check_apply(self) -> None:
        """Keras' `apply` was called, whose gradients are scaled by definition."""
        if "scale_loss" in self._calls:
            return
        if "get_unscaled_gradients" in self._calls:
            self._warn_once(_UNSCALED_TWICE)
        elif "get_scaled_loss" not in self._calls:
            self._warn_once(_APPLY_WITHOUT_SCALE)

    def note_apply(self, location: TraceLocation, variables: Sequence[Any]) -> None:
        """`apply` has made its step."""
        for replica in location.replicas:
            record = self._records.get(replica)
            if record is not None:
                record.unscaled = 0
                record.count(variables)

    def _kinds_from_other_graphs(self, variables: Sequence[Any]) -> set[tuple[str, bool]]:
        nothing: tuple[None, set[tuple[str, bool]]] = (None, set())
        return set().union(*(self._from_other_graphs.get(id(v), nothing)[1] for v in variables))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message)
