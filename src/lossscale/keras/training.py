"""The training step: scale the loss, unscale and judge the gradients, apply or skip, move on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from lossscale.common.autograph import as_written
from lossscale.common.checks import check_some_gradient, with_gradient
from lossscale.common.host_rule import host_can_move
from lossscale.common.notes import NotesOfVariables
from lossscale.errors import ArgumentError, GradientsError
from lossscale.keras.parts import Parts
from lossscale.keras.private_names import no_automatic_dependency_tracking
from lossscale.keras.state import Ledger
from lossscale.keras.step import Step
from lossscale.keras_common.training import SharedTraining
from lossscale.rules import Needs


class TrainingStep(SharedTraining, Parts):
    """What Keras' trainer calls, and what the documented verbs lead to."""

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        inner = self.inner_optimizer
        # Keras switches attribute tracking off for all objects at once, and by it an optimizer
        # lists the variables that its `build` sets as attributes.
        if not inner.built:
            inner.build(list(variables))
        self._remember_trained(list(variables))
        self.built = True
        self._load_what_waited()
        self._build_notes()

    @no_automatic_dependency_tracking  # type: ignore[untyped-decorator]
    def _remember_trained(self, variables: list[Any]) -> None:
        self._trainable_variables = variables
        self._trainable_variables_indices = {
            self._var_key(variable): index for index, variable in enumerate(variables)
        }
        # An optimizer of several keeps them where TensorFlow's checkpoints do not look.
        parts = list(getattr(self.inner_optimizer, "optimizers", ()))
        if parts:
            self._inner_parts = parts

    def _keep_notes(self, histograms_every: int | None) -> None:
        super()._keep_notes(histograms_every)
        if self.built:
            self._build_notes()

    def _new_notes(self, histograms_every: int | None) -> NotesOfVariables:
        return self._backend.new_notes(histograms_every, _new_note_variable)

    def _build_notes(self) -> None:
        if self._notes is not None:
            trained = self._trainable_variables
            names = [getattr(variable, "path", variable.name) for variable in trained]
            dtypes = [keras.backend.standardize_dtype(variable.dtype) for variable in trained]
            with self._backend.outside_traces():
                self._notes.build(trained, names, dtypes)

    @as_written
    def scale_loss(self, loss: Any) -> Any:
        self._handover.note_scale_loss(self._backend.current_place())
        return self._scaled(loss)

    def _apply_step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        name: str | None,
        *,
        scaled: bool,
        aggregate: bool,
    ) -> Any:
        with keras.name_scope(name or self.name):
            self._step(gradients, variables, scaled=scaled, aggregate=aggregate)
        return self.iterations

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
            if len(grads) != len(trainable_variables):
                raise GradientsError(
                    f"Expected one gradient for each of the {len(trainable_variables)} variables "
                    f"the optimizer was built with. Received: {len(grads)} gradients. Pass the "
                    "variables as `trainable_variables`, or call build(variables) first."
                )
        check_some_gradient(grads)
        variables = list(trainable_variables)
        self._handover.check_apply()
        with keras.name_scope(self.name):
            self._step(grads, variables, scaled=True)
        self._handover.note_apply(self._backend.current_place(), with_gradient(grads, variables))

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        own, trained = self.variables, self._trainable_variables
        if not self.built or keras.backend.backend() == "tensorflow":
            # The inner optimizer says why.
            self.inner_optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)
        for name, given, expected in (
            ("optimizer_variables", optimizer_variables, own),
            ("trainable_variables", trainable_variables, trained),
        ):
            if len(given) != len(expected):
                raise ArgumentError(
                    f"`{name}` must hold {len(expected)} values, one for each of the variables "
                    f"of the optimizer. Received: {len(given)}."
                )
        values = zip([*own, *trained], [*optimizer_variables, *trainable_variables], strict=True)
        with keras.StatelessScope(state_mapping=list(values)) as scope:
            self.apply(grads, trained)
        return (
            [scope.get_current_value(variable) for variable in trained],
            [scope.get_current_value(variable) for variable in own],
        )

    def _step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        scaled: bool,
        aggregate: bool = True,
    ) -> None:
        self.build(variables)
        self._check_known(variables)
        rule, needs = self._rule, self._rule.needs
        sees_scale = scaled or self._notes is not None or needs != Needs()
        step = Step(
            list(gradients),
            list(variables),
            self._current_scale() if sees_scale else None,
            are_scaled=scaled,
            sum_replicas=aggregate,
            powers_of_two=rule.powers_of_two,
            checks_gradients=rule.checks_gradients,
            needs=needs,
            moves_on_host=host_can_move(rule),
            decide=self._decide if self._state is None else None,
        )
        self._backend.run_step(step, self.inner_optimizer, self._ledger, self._notes)

    def _check_known(self, variables: Sequence[Any]) -> None:
        """Raises for a variable that the inner optimizer does not know, before anything is done."""
        # Once for each list: in eager mode looking every variable up takes longer than the rest.
        # The optimizer keeps the variables it knows, so that no id is given to another one.
        ids = tuple(map(id, variables))
        if ids != self.__dict__.get("_known_ids"):
            self.inner_optimizer._check_variables_are_known(variables)
            self.__dict__["_known_ids"] = ids

    @property
    def _ledger(self) -> Ledger:
        return Ledger(
            self._state,
            self._steps_skipped,
            self._last_step_skipped,
            self._iterations,
            self._backend.known,
        )


def _new_note_variable(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    return keras.Variable(
        initializer="zeros", shape=shape, dtype=dtype, trainable=False, name=f"noted_{name}"
    )
