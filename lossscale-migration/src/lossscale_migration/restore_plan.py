"""Finds what a file sets in an optimizer of this library, then sets it, for each framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lossscale.errors import OldFileError, UnknownSlotError, UnsupportedError
from lossscale.old_formats import NADAM_DECAY, decayed, kind_of, names_for
from lossscale.packages import warn
from lossscale_migration.matching import MatchedObjects
from lossscale_migration.numbered_arrays import nadam_product, set_scale
from lossscale_migration.saved_optimizer import (
    FIRST_KIND,
    NEW_KIND,
    OLDEST,
    SavedOptimizer,
    SavedSlot,
)

# With this value, TensorFlow's first Nadam raises its momentum like all later ones.
NEW_NADAM_DECAY = 1.0


class RestorePlan:
    """The state to set in one optimizer; each framework has its own subclass.

    Args:
        path: The file, for messages.
        name: The name of the optimizer.
        saved: The saved state.
        optimizer: The optimizer.
    """

    def __init__(self, path: str, name: str, saved: SavedOptimizer, optimizer: Any) -> None:
        self.path = path
        self.name = name
        self.saved = saved
        self.optimizer = optimizer
        self.inner = optimizer.inner_optimizer
        self.kind = kind_of(self.inner)
        self.slots: list[tuple[Any, Any]] = []
        self._settings_before: dict[str, Any] = {}

    def prepare(self, matches: MatchedObjects | None, trainable: Sequence[Any]) -> None:
        """Finds the variable for every slot, without setting any.

        Args:
            matches: The matched objects of a checkpoint; None for a model file.
            trainable: The variables to build the optimizer with, if it is not built.
        """
        # Before `build`, because the slots of some optimizers depend on them.
        self._settings_before = self._set_settings(self.saved.settings)
        if not self.saved.slots:
            return
        owners = [matches and self._owner(slot, matches) for slot in self.saved.slots]
        if matches is not None:
            self._check_known(owners, trainable)
        if not self._built_with():
            self._build(trainable)
        for slot, owner in zip(self.saved.slots, owners, strict=True):
            place = self._slot(slot, self._by_turn(slot) if owner is None else owner)
            if place is None:
                continue
            if tuple(place.shape) != tuple(slot.value.shape):
                raise OldFileError(
                    f"{self.path}: {slot.label or slot.names[0]!r} has shape "
                    f"{tuple(slot.value.shape)} in the file and {tuple(place.shape)} here. Nothing "
                    "was changed."
                )
            self.slots.append((place, slot.value))

    def undo(self) -> None:
        """Undoes the changes of `prepare`."""
        self._set_settings(self._settings_before)

    def carry_out(self) -> list[str]:
        """Sets everything; returns the names of values that the optimizer does not have."""
        self._set_learning_rate()
        for place, value in self.slots:
            place.assign(value)
        if self.saved.iterations is not None:
            self._set_counters(self.saved.iterations)
        return self._set_others() + self._set_scale()

    def _owner(self, slot: SavedSlot, matches: MatchedObjects) -> Any:
        """Returns the variable of a slot; None if only its position is known."""
        if slot.variable is None:
            return None
        owner = matches.variables.get(slot.variable)
        if owner is None:
            name = matches.graph.nodes[slot.variable].name
            raise OldFileError(
                f"{self.path}: {slot.label or slot.names[0]!r} belongs to the variable {name!r}, "
                "which was not passed. Pass its model too."
            )
        return owner

    def _check_known(self, owners: Sequence[Any], trainable: Sequence[Any]) -> None:
        built_with = self._built_with()
        if not built_with and any(owner is None for owner in owners):
            # The new optimizers name a slot by its variable, and by its index if two share a name.
            raise OldFileError(
                f"{self.path}: several variables share a name, so only their order identifies "
                "them. Call optimizer.build(variables) first, with the variables in their "
                "original order."
            )
        known = {self._key(variable) for variable in built_with or trainable}
        for owner in owners:
            if owner is not None and self._key(owner) not in known:
                raise OldFileError(
                    f"{self.path}: the file has state for {owner.name!r}, which the optimizer was "
                    "not built with. Pass it to optimizer.build."
                )

    def _by_turn(self, slot: SavedSlot) -> Any:
        built_with = self._built_with()
        if slot.index is None or slot.index >= len(built_with):
            raise OldFileError(
                f"{self.path}: {slot.label or slot.names[0]!r} belongs to variable number "
                f"{slot.index}; the optimizer was built with {len(built_with)}."
            )
        return built_with[slot.index]

    def _set_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Sets hyperparameters other than the learning rate; returns the previous values.

        Raises:
            OldFileError: If the optimizer has no such hyperparameter. Nothing is changed then.
        """
        named = {name: value for name, value in settings.items() if name != "decay"}
        unknown = sorted(name for name in named if not hasattr(self.inner, name))
        if unknown:
            raise OldFileError(
                f"{self.path}: {type(self.inner).__name__} has no hyperparameter {unknown[0]!r}, "
                "which the saved optimizer has. Nothing was changed."
            )
        before = {name: float(getattr(self.inner, name)) for name in named}
        for name, value in named.items():
            # A file holds float32; keep the Python number if it is equal.
            if np.float32(before[name]) != np.float32(value):
                self._set_setting(name, value)
        return before

    def _set_learning_rate(self) -> None:
        """Sets the learning rate and its decay; a schedule of the optimizer stays."""
        saved = self.saved
        decay = saved.settings.get("decay", 0.0)
        if self.kind == "Nadam":
            # Other optimizers use this name for the decay of the learning rate.
            if "decay" in saved.settings:
                self._set_momentum_schedule(decay)
            elif saved.era not in (OLDEST, FIRST_KIND):
                self._set_momentum_schedule(NEW_NADAM_DECAY)
            decay = 0.0
        if saved.learning_rate is not None:
            self._set_rate(saved.learning_rate, decay)

    def _slot(self, saved: SavedSlot, variable: Any) -> Any:
        """Returns the optimizer's variable for a saved array; None for an array without effect.

        Raises:
            OldFileError: If the optimizer has no such variable.
        """
        for name in names_for(self.kind, saved.names):
            try:
                return self.optimizer.get_slot(variable, name)
            except UnknownSlotError:
                continue
        # TensorFlow's new SGD keeps a momentum slot even if momentum is 0.
        if self.kind == "SGD" and "m" in saved.names and not float(self.inner.momentum):
            return None
        raise OldFileError(
            f"{self.path}: the saved optimizer has the slot {saved.label or saved.names[0]!r}; "
            f"{type(self.inner).__name__} has {self.optimizer.get_slot_names()} for "
            f"{variable.name!r}. Create the optimizer with the settings of the saved one."
        )

    def _set_counters(self, iterations: int) -> None:
        """Sets the number of steps and of skipped steps."""
        self.optimizer._steps_skipped.assign(self.saved.skipped)
        self.optimizer.iterations = iterations

    def _set_others(self) -> list[str]:
        """Sets values that are neither slots nor settings; returns the names that do not exist."""
        saved, left = self.saved, []
        product, known = None, False
        if self.kind == "Nadam":
            # The scalar with the product of its momentums, in the new and the legacy optimizers.
            names = ("_u_product", "_m_cache")
            product = next((getattr(self.inner, n) for n in names if hasattr(self.inner, n)), None)
        for name, value in saved.others.items():
            if name in ("momentum_cache", "_u_product") and product is not None:
                product.assign(value)
                known = True
            else:
                left.append(name)
        if product is not None and not known and saved.slots:
            # Model files of the new optimizers lack it.
            steps = (saved.iterations or 0) - saved.skipped
            product.assign(nadam_product(float(self.inner.beta_1), steps))
            if saved.era == NEW_KIND and self.optimizer.dynamic:
                warn(
                    f"{self.path}: the file lacks Nadam's product of momentums; it was computed "
                    f"for {steps} steps. If some of these were skipped, the next steps differ "
                    "slightly. A checkpoint contains the product."
                )
        return left

    def _set_scale(self) -> list[str]:
        """Sets the loss scale; returns the names of values that do not exist in this rule."""
        optimizer, saved = self.optimizer, self.saved
        if optimizer._state.decide is not None:
            # A user's LossScale with its own variables.
            own = optimizer._loss_scale._variables()
            for name, value in saved.loss_scale.items():
                if name in own:
                    own[name].assign(value)
            return sorted(set(saved.loss_scale) - set(own))
        if saved.scale is None:
            return []
        if not optimizer.dynamic:
            return ["loss_scale"]
        self._set_scale_values(saved.scale, saved.good_steps or 0)
        return []

    # --- Different for each framework ----------------------------------------------------------

    def _build(self, variables: Sequence[Any]) -> None:
        """Creates the slots for these variables."""
        raise NotImplementedError

    def _built_with(self) -> list[Any]:
        """Returns the variables that the optimizer was built with."""
        raise NotImplementedError

    def _key(self, variable: Any) -> Any:
        """Returns the key by which the optimizer stores a variable."""
        raise NotImplementedError

    def _set_rate(self, rate: float, decay: float) -> None:
        """Sets the learning rate, unless the optimizer has a schedule.

        If `decay` is not 0, the rate becomes rate / (1 + decay * iterations).
        """
        raise NotImplementedError

    def _set_scale_values(self, scale: float, good_steps: int) -> None:
        """Sets the loss scale and its counter, made valid for the rule."""
        raise NotImplementedError

    def _set_setting(self, name: str, value: Any) -> None:
        """Sets a hyperparameter other than the learning rate."""
        setattr(self.inner, name, value)

    def _set_momentum_schedule(self, decay: float) -> None:
        """Sets how fast Nadam raises its momentum: TensorFlow's `schedule_decay`, per step."""
        if decay != NEW_NADAM_DECAY:
            warn(NADAM_DECAY.format(decay=decay))


class KerasRestorePlan(RestorePlan):
    """A loss scale optimizer on Keras 3."""

    def _build(self, variables: Sequence[Any]) -> None:
        self.optimizer.build(list(variables))

    def _built_with(self) -> list[Any]:
        return list(self.optimizer._trainable_variables) if self.optimizer.built else []

    def _key(self, variable: Any) -> Any:
        return self.optimizer._var_key(variable)

    def _set_rate(self, rate: float, decay: float) -> None:
        import keras

        if isinstance(self.inner._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return
        described = decayed(rate, decay, type(self.inner).__name__) if decay else rate
        self.inner.learning_rate = keras.saving.deserialize_keras_object(described)

    def _set_scale_values(self, scale: float, good_steps: int) -> None:
        named = {field: v.name for field, v in self.optimizer._state.variables.items()}
        values = {"scale": np.float32(scale), "good_steps": np.int64(good_steps)}
        # A custom rule may not count steps.
        set_scale(
            self.optimizer,
            {named[field]: value for field, value in values.items() if field in named},
        )


class TFKerasRestorePlan(RestorePlan):
    """A loss scale optimizer on tf_keras, around an optimizer of either family."""

    def _build(self, variables: Sequence[Any]) -> None:
        self.optimizer._build(list(variables))

    def _built_with(self) -> list[Any]:
        return [each for group in self.optimizer._built_groups for each in group]

    def _key(self, variable: Any) -> Any:
        return variable._unique_id

    def _set_setting(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)
        if self.optimizer._is_legacy and name == "momentum" and hasattr(self.inner, "_momentum"):
            # These settings decide whether the slots exist.
            self.inner._momentum = float(value) > 0

    def _set_rate(self, rate: float, decay: float) -> None:
        import tf_keras

        schedules = tf_keras.optimizers.schedules
        now = (
            self.inner._hyper["learning_rate"]
            if self.optimizer._is_legacy
            else self.inner._learning_rate
        )
        if isinstance(now, schedules.LearningRateSchedule):
            return
        if self.optimizer._is_legacy:
            if self.kind != "Nadam":
                self.inner._initial_decay = decay
                self.inner._set_hyper("decay", decay)
            self.inner.learning_rate = rate
        elif decay:
            schedule = schedules.InverseTimeDecay(rate, 1, decay)
            self.inner._learning_rate = self.inner._build_learning_rate(schedule)
        else:
            self.inner.learning_rate = rate

    def _set_momentum_schedule(self, decay: float) -> None:
        if not self.optimizer._is_legacy:
            super()._set_momentum_schedule(decay)
            return
        self.inner._initial_decay = decay
        self.inner._set_hyper("decay", decay)

    def _set_others(self) -> list[str]:
        left, saved = super()._set_others(), self.saved
        if hasattr(self.inner, "_u_product_counter") and saved.iterations is not None:
            # tf_keras uses this number to tell whether the current step has already updated the
            # product.
            self.inner._u_product_counter = saved.iterations - saved.skipped + 1
        return left

    def _set_scale_values(self, scale: float, good_steps: int) -> None:
        values = {"current_loss_scale": np.float32(scale), "good_steps": np.int64(good_steps)}
        set_scale(self.optimizer, values)


_PLANS = {"keras": KerasRestorePlan, "tf_keras": TFKerasRestorePlan}
"""The class for the optimizers of each framework, by its name."""


def plan_for(path: str, name: str, saved: SavedOptimizer, optimizer: Any) -> RestorePlan:
    """Returns the plan to set saved state in an optimizer; see `RestorePlan`.

    Raises:
        UnsupportedError: If its framework is not supported.
    """
    plan = _PLANS.get(optimizer._framework)
    if plan is None:
        raise UnsupportedError(
            f"Files of TensorFlow cannot be restored into a {optimizer._framework} optimizer."
        )
    return plan(path, name, saved, optimizer)
