"""Whether the gradients that `apply_gradients` receives are still scaled.

Two families of calls meet there. The documented one gives it unscaled gradients:
`get_scaled_loss`, `get_unscaled_gradients`, `apply_gradients`. Keras' trainer gives it scaled
ones: `scale_loss`, `apply_gradients`. So `scale_loss` leaves a mark, which serves every variable
once: a program may take the gradients of one loss in groups and apply each group by itself.
`get_unscaled_gradients` notes how many gradients it returned: so many are applied as they are.

Under `tf.function` these calls run once, when the function is traced, and not on later steps.
What a variable was given that was made in one graph and applied in another therefore holds for
it from then on: the traced half will do the same on the next step without passing through here.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lossscale.common.autograph import as_written
from lossscale.errors import LossScaleWarning

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


class Place(NamedTuple):
    """Where in a program a call is made.

    Attributes:
        graph: The graph being traced, None where there is none.
        replicas: The numbers of the replicas it is made for.
    """

    graph: Any
    replicas: tuple[int, ...]

    def reference(self) -> weakref.ref[Any] | None:
        """What a mark remembers of the place."""
        return None if self.graph is None else weakref.ref(self.graph)


class _Mark:
    """What was said of the gradients of one replica.

    Attributes:
        losses: How many losses `scale_loss` scaled before the first of their gradients was
            applied. Gradients of several losses may be added up, or applied one after the other.
        made_in: The graph where it did.
        times: The variables that were applied since, and how often, by id.
        unscaled: How many gradients `get_unscaled_gradients` returned that were not applied yet.
        unscaled_in: The graph where it did.
        spent: Whether some of these were applied.
        at_home: Which kinds of gradients were applied in the graph where they were made.
    """

    def __init__(self, losses: int, place: Place) -> None:
        self.losses = losses
        self.made_in = place.reference()
        self.times: dict[int, tuple[Any, int]] = {}
        self.unscaled: float = 0
        self.unscaled_in = place.reference()
        self.spent = False
        self.at_home: set[str] = set()

    def kind(self, place: Place, variables: Sequence[Any]) -> str | None:
        """What the gradients of these variables are: "scaled", "unscaled", or not known."""
        inside = "unscaled" in self.at_home and _elsewhere(self.unscaled_in, place)
        if self.unscaled and not inside:
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


def _elsewhere(made_in: weakref.ref[Any] | None, place: Place) -> bool:
    """Whether something was made in a graph, and not in the one of `place`."""
    if made_in is None:
        return False
    graph = made_in()
    # A graph that is gone is not the absence of one.
    return graph is None or graph is not place.graph


class GradientHandover:
    """Remembers how the loss was scaled, for the call that applies the gradients."""

    def __init__(self) -> None:
        # By the number of the replica, each of which scales a loss of its own. Not by thread:
        # TensorFlow's replicas get new threads on every run.
        self._marks: dict[int, _Mark] = {}
        # What variables were given out of another graph, by id: "scaled" or "unscaled", and
        # whether the call that applied it was traced as well.
        self._traced: dict[int, tuple[Any, set[tuple[str, bool]]]] = {}
        self._loss_was_scaled = False
        self._loss_was_scaled_by_hand = False
        self._gradients_were_unscaled = False
        self._warned: set[str] = set()

    def note_scale_loss(self, place: Place) -> None:
        """`scale_loss` was called."""
        self._loss_was_scaled = True
        for replica in place.replicas:
            mark = self._marks.get(replica)
            losses = 1
            if mark is not None and not mark.times and not _elsewhere(mark.made_in, place):
                losses += mark.losses
            self._marks[replica] = _Mark(losses, place)

    def note_get_scaled_loss(self) -> None:
        """`get_scaled_loss` was called."""
        self._loss_was_scaled_by_hand = True

    @as_written
    def note_unscaled(self, place: Place, count: float) -> None:
        """`get_unscaled_gradients` was called: what it returned is not scaled any more.

        Args:
            place: Where.
            count: How many gradients it returned.
        """
        self._gradients_were_unscaled = True
        for replica in place.replicas:
            mark = self._marks.setdefault(replica, _Mark(0, place))
            goes_on = not mark.spent and not _elsewhere(mark.unscaled_in, place)
            if not goes_on:
                mark.unscaled = 0
                mark.at_home.discard("unscaled")
            mark.unscaled += count
            mark.unscaled_in, mark.spent = place.reference(), False

    @contextlib.contextmanager
    def aside(self, place: Place) -> Iterator[None]:
        """Within it a verb makes a whole step, which is no part of the loop around it."""
        marks = {replica: self._marks.pop(replica, None) for replica in place.replicas}
        said = self._loss_was_scaled, self._loss_was_scaled_by_hand, self._gradients_were_unscaled
        try:
            yield
        finally:
            for replica, mark in marks.items():
                self._marks.pop(replica, None)
                if mark is not None:
                    self._marks[replica] = mark
            self._loss_was_scaled, self._loss_was_scaled_by_hand, self._gradients_were_unscaled = (
                said
            )

    @as_written
    def note_all_unscaled(self, place: Place) -> None:
        """Whatever is applied next is not scaled, whoever unscaled it."""
        self.note_unscaled(place, math.inf)

    def are_scaled(self, place: Place, variables: Sequence[Any]) -> bool:
        """Whether the gradients given to `apply_gradients` are scaled; warns where it guesses.

        Args:
            place: Where.
            variables: Those that have a gradient. `note_applied` follows once the step is made.
        """
        mark = self._marks.get(place.replicas[0])
        kind = mark.kind(place, variables) if mark is not None else None
        if kind == "unscaled":
            return False
        given = self._given_out_of_traces(variables)
        if mark is not None and kind == "scaled":
            conflict = ("unscaled", False) in given
            return self._are_scaled_by(mark, mark.counts(variables), place, conflict)
        traced = {kind for kind, _ in given}
        if "scaled" in traced:
            if "unscaled" in traced:
                self._warn_once(_EITHER.format(reason=_BOTH_TRACED, taken=_AS_SCALED))
            return True
        if "unscaled" not in traced:
            if mark is not None and mark.losses:
                self._warn_once(_AGAIN)
            elif not self._gradients_were_unscaled:
                self._warn_once(_NOT_UNSCALED if self._loss_was_scaled_by_hand else _NOTHING_SCALED)
        return False

    def _are_scaled_by(
        self, mark: _Mark, times: Sequence[int], place: Place, conflict: bool
    ) -> bool:
        """What a mark says that has not served each of the variables yet."""
        if _elsewhere(mark.made_in, place):
            if "scaled" in mark.at_home:
                # No other graph needs it, unless that one returned gradients as well.
                self._warn_once(_EITHER.format(reason=_APPLIED_INSIDE, taken=_AS_SCALED), 5)
        elif place.graph is None and conflict:
            # Right after scale_loss() its gradients are expected first, and their groups then.
            applied = [variable for variable, _ in mark.times.values()]
            scaled = not applied or ("unscaled", False) in self._given_out_of_traces(applied)
            taken = _AS_SCALED if scaled else _AS_UNSCALED
            self._warn_once(_EITHER.format(reason=_ONE_TRACED, taken=taken), 5)
            return scaled
        # With one new variable all gradients are those of the loss. Without, they may be those
        # of a second loss, or the first ones were the sum of both.
        if max(times) >= mark.losses or min(times) > 0:
            self._warn_once(_AGAIN_DIVIDED, 5)
        return True

    def note_applied(self, place: Place, variables: Sequence[Any]) -> None:
        """`apply_gradients` has made its step: the marks have served these variables once more."""
        for replica in place.replicas:
            mark = self._marks.get(replica)
            kind = mark.kind(place, variables) if mark is not None else None
            if mark is None or kind is None:
                continue
            made_in = mark.made_in
            if kind == "unscaled":
                made_in = mark.unscaled_in
                mark.unscaled = max(mark.unscaled - len(variables), 0)
                mark.spent = True
            if mark.losses:
                mark.count(variables)
            if _elsewhere(made_in, place):
                what = kind, place.graph is not None
                for variable in variables:
                    self._traced.setdefault(id(variable), (variable, set()))[1].add(what)
            else:
                mark.at_home.add(kind)

    def check_apply(self) -> None:
        """Keras' `apply` was called, whose gradients are scaled by definition."""
        if self._loss_was_scaled:
            return
        if self._gradients_were_unscaled:
            self._warn_once(_UNSCALED_TWICE)
        elif not self._loss_was_scaled_by_hand:
            self._warn_once(_APPLY_WITHOUT_SCALE)

    def note_apply(self, place: Place, variables: Sequence[Any]) -> None:
        """`apply` has made its step."""
        for replica in place.replicas:
            mark = self._marks.get(replica)
            if mark is not None:
                mark.unscaled = 0
                mark.count(variables)

    def _given_out_of_traces(self, variables: Sequence[Any]) -> set[tuple[str, bool]]:
        nothing: tuple[None, set[tuple[str, bool]]] = (None, set())
        return set().union(*(self._traced.get(id(v), nothing)[1] for v in variables))

    def _warn_once(self, message: str, stacklevel: int = 4) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, LossScaleWarning, stacklevel=stacklevel)
