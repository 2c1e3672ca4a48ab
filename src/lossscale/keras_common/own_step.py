"""A model's `train_step` of its own as what gives gradients: whether it runs, and how it scales."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lossscale.common.diagnosis import ModelGradients
from lossscale.common.probing import said_by
from lossscale.diagnostics.batch_checks import check_batch, inputs_of
from lossscale.diagnostics.batches import Batch
from lossscale.diagnostics.fidelity import Fidelity
from lossscale.diagnostics.measurement import Derived
from lossscale.diagnostics.report import GradientReport
from lossscale.keras_common.stand_ins import Recorder
from lossscale.packages import warn

_UNKNOWN_WAY = (
    "it does not scale its loss, and how it takes gradients is not known here, so that it cannot "
    "be seen what scaling would do"
)


class Ran(NamedTuple):
    """One run of a `train_step`.

    Attributes:
        derived: The gradients that it gave to its optimizers.
        recorder: What is known of how it did.
    """

    derived: list[Derived]
    recorder: Recorder


class Run(NamedTuple):
    """Which run it is.

    Attributes:
        reference: Whether in float32; otherwise in float16.
        helped: Whether the loss is scaled, and its gradients divided, where gradients are taken.
    """

    reference: bool
    helped: bool


class NotRunError(Exception):
    """Why a `train_step` cannot be measured."""


class OwnStep:
    """Gradients of a `train_step`.

    Args:
        model: The model.
        new_run: Returns what runs its `train_step` on data at a scale, in one way.
        advice: What to do where a loss is not scaled, a clause with `{}` for the optimizer.

    Attributes:
        helps: Whether its loss is scaled, and its gradients divided, in its place.
        optimizers: Those that it gives gradients to, once it was attempted.
    """

    def __init__(
        self, model: Any, new_run: Callable[[Run], Callable[[Any, float], Ran]], advice: str
    ) -> None:
        self._name, self._advice = type(model).__name__, advice
        self._new_run = new_run
        self._runs: dict[Run, Callable[[Any, float], Ran]] = {}
        self._is_bare = self.helps = False
        self._forgotten: dict[str, str] = {}
        self.optimizers: list[Any] = []

    def attempt(self, batch: Any, *, helps: bool) -> None:
        """Runs it once, to see what it does.

        Args:
            batch: The inputs, targets and sample weights; None for what there is not.
            helps: Whether to measure what scaling would do to a step that does not scale its
                loss; otherwise what is done without.

        Raises:
            NotRunError: If it does not run, or gives no gradient to an optimizer.
        """
        only_x = batch[1] is None and batch[2] is None
        first: Exception | None = None
        # `fit` gives arrays as they are, and the elements of a data set.
        for self._is_bare in (True, False) if only_x else (False,):
            try:
                ran = self._ran(batch, 1.0, Run(reference=True, helped=False))
                break
            except Exception as error:
                first = first or error
        else:
            assert first is not None
            raise NotRunError(said_by(first)[:-1]) from first
        if all(each.gradient is None for each in ran.derived):
            raise NotRunError("it gives no gradient to an optimizer that the model has")
        self._forgotten, self.optimizers = ran.recorder.forgotten, ran.recorder.optimizers
        self.helps = helps and bool(self._forgotten) and not ran.recorder.scales
        if self.helps:
            again = self._ran(batch, 1.0, Run(reference=True, helped=True))
            if not again.recorder.helped:
                raise NotRunError(_UNKNOWN_WAY)

    def derived(self, batch: Any, scale: float, *, reference: bool) -> list[Derived]:
        """Returns the gradients that it gives to its optimizers, times the scale."""
        return self._ran(batch, scale, Run(reference, self.helps)).derived

    def setting(self, policy: str) -> str:
        """Returns how gradients were computed in float16, for a report.

        Args:
            policy: The dtype policy of the model.
        """
        own = "float16" in policy.replace("bfloat16", "")
        how = "" if own else ", with each layer under mixed_float16"
        return f"by {self._name}.train_step{how}"

    def caveats(self, *, is_scaled: bool) -> tuple[str, ...]:
        """Returns what is to be known about how it scales, as sentences.

        Args:
            is_scaled: Whether the optimizers of the model are loss scale optimizers.
        """
        if not self._forgotten:
            return ()
        names = ", ".join(f"self.{name}" for name in self._forgotten)
        too_small = (
            " `apply` divides by the loss scale all the same, so its steps are too small by it."
            if is_scaled and "apply" in self._forgotten.values()
            else ""
        )
        if self.helps:
            first = next(iter(self._forgotten))
            return (
                f"{self._name}.train_step does not scale its loss, so no loss scale does anything "
                "for its gradients. What scaling would do was measured in its place: "
                f"{self._advice.format(f'self.{first}')}.{too_small}",
            )
        return (
            f"{self._name}.train_step scales no loss for {names}: whatever the scale, the "
            f"gradients given to it are those without scaling.{too_small}",
        )

    def _ran(self, batch: Any, scale: float, run: Run) -> Ran:
        if run not in self._runs:
            self._runs[run] = self._new_run(run)
        return self._runs[run](_data(batch, self._is_bare), scale)


class Attempt:
    """What came of running a model's own `train_step`.

    Args:
        step: The step, as what gives gradients; None if the model has none that runs here.
        caveats: Why it does not, as a sentence; none if the model has none.

    Attributes:
        step: The step, or None.
    """

    def __init__(self, step: OwnStep | None, caveats: tuple[str, ...] = ()) -> None:
        self.step, self._caveats = step, caveats
        self._is_scaled = False

    def gradients(
        self, names: Sequence[str], on_host: Callable[[Any], Any]
    ) -> ModelGradients | None:
        """Returns the gradients of the step; None if there is none.

        Args:
            names: The names of the trainable variables.
            on_host: Returns a gradient as a NumPy array.
        """
        step = self.step
        if step is None:
            return None
        return ModelGradients(
            lambda batch, scale: step.derived(batch, scale, reference=True),
            lambda batch, scale: step.derived(batch, scale, reference=False),
            names,
            on_host,
        )

    def check(self, model: Any, batch: Batch, needs_targets: Callable[[Any], bool]) -> None:
        """Checks a batch; a step of its own takes what it takes.

        Args:
            model: The model.
            batch: The inputs, targets and sample weights.
            needs_targets: Whether the loss of a model is computed from targets.

        Raises:
            ArgumentError, ArgumentTypeError: If the model does not take it.
        """
        if self.step is None:
            check_batch(batch, inputs_of(model), needs_targets=needs_targets(model))
        else:
            check_batch(batch, [], needs_targets=False)

    def in_use(self, model: Any, scale_of: Callable[[Any], float | None]) -> float | None:
        """Returns the scale that gradients are taken with in training; None if there is no one.

        Args:
            model: The model.
            scale_of: Returns the loss scale of an optimizer; None if it does not scale.
        """
        step = self.step
        several = [model.optimizer] if step is None else step.optimizers
        found = {scale for scale in map(scale_of, several) if scale is not None}
        self._is_scaled = bool(found)
        if found and step is not None and step.helps:
            return 1.0
        return found.pop() if len(found) == 1 else None

    def told(self, report: GradientReport, fidelity: Fidelity | None) -> GradientReport:
        """Returns a report with what is known of the step.

        Args:
            report: The report without it.
            fidelity: What float16 made of the gradients.
        """
        caveats = self._caveats
        if self.step is not None:
            caveats = self.step.caveats(is_scaled=self._is_scaled)
            if fidelity is not None and not fidelity.missing:
                fidelity = dataclasses.replace(fidelity, setting=self.step.setting(report.policy))
        return dataclasses.replace(report, fidelity=fidelity, caveats=caveats)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Adds to an error within it why a step was not run: its model may have no other loss."""
        try:
            yield
        except Exception as error:
            for caveat in self._caveats:
                error.add_note(caveat)
            raise

    def warn(self) -> None:
        """Says of a step that does not run here what is measured in its place."""
        for caveat in self._caveats:
            warn(caveat)


def attempted(
    model: Any, base: Any, new_step: Callable[[], OwnStep], batch: Any, *, helps: bool
) -> Attempt:
    """Runs a model's own `train_step` once, to see whether it can be measured.

    Args:
        model: The model.
        base: The library's class of models.
        new_step: Returns its `train_step`, as what gives gradients.
        batch: The inputs, targets and sample weights; None for what there is not.
        helps: Whether to measure what scaling would do to a step that does not scale its loss.
    """
    if not has_own_step(model, base):
        return Attempt(None)
    step = new_step()
    try:
        step.attempt(batch, helps=helps)
    except NotRunError as error:
        return Attempt(
            None,
            (
                f"{type(model).__name__} has a train_step of its own, which was not run: {error}. "
                "Measured is the loss that compile was given, or compute_loss returns. If "
                "train_step takes the gradients of another loss, return that from compute_loss.",
            ),
        )
    return Attempt(step)


def has_own_step(model: Any, base: Any) -> bool:
    """Whether a model has a `train_step` that its library did not write.

    Args:
        model: The model.
        base: The library's class of models.
    """
    return type(model).train_step is not base.train_step or "train_step" in vars(model)


def peeked(batches: Iterable[Batch]) -> tuple[Batch, Iterator[Batch]]:
    """Returns the first batch, and all of them."""
    waiting = iter(batches)
    first = next(waiting)
    return first, itertools.chain([first], waiting)


@contextlib.contextmanager
def attributes_kept(owner: Any) -> Iterator[None]:
    """After it an object has the attributes that it had before, past the tracking of Keras."""
    attributes = vars(owner)
    before = dict(attributes)
    try:
        yield
    finally:
        for name in [name for name in attributes if name not in before]:
            del attributes[name]
        attributes.update(before)


def optimizers_of(owners: Iterable[Any], is_optimizer: Callable[[Any], bool]) -> list[Any]:
    """Returns the optimizers that a model and its layers have as attributes, each once."""
    found = []
    for owner in owners:
        for value in vars(owner).values():
            nested = value.values() if isinstance(value, dict) else value
            several = nested if isinstance(value, (list, tuple, dict)) else [value]
            found += [each for each in several if is_optimizer(each)]
    return list({id(each): each for each in found}.values())


def _data(batch: Any, is_bare: bool) -> Any:
    """What `fit` gives to a `train_step`."""
    x, y, sample_weight = batch
    if sample_weight is not None:
        return x, y, sample_weight
    if y is not None:
        return x, y
    return x if is_bare else (x,)
