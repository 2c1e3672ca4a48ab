"""Sets saved state in an optimizer of this library, for each framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lossscale.errors import OldFileError, UnknownSlotError, UnsupportedError
from lossscale.migration.saved_optimizer import (
    FIRST_KIND,
    NEW_KIND,
    OLDEST,
    SavedOptimizer,
    SavedSlot,
)
from lossscale.old_formats.configurations import NADAM_DECAY, decayed
from lossscale.old_formats.slots import kind_of, nadam_product, names_for
from lossscale.packages import warn

# With this value, TensorFlow's first Nadam raises its momentum like all later ones.
NEW_NADAM_DECAY = 1.0


class RestoreTarget:
    """A loss scale optimizer to restore; each framework has its own subclass.

    Args:
        optimizer: The optimizer.
        path: The file, for messages.
    """

    def __init__(self, optimizer: Any, path: str) -> None:
        self.optimizer = optimizer
        self.inner = optimizer.inner_optimizer
        self.kind = kind_of(self.inner)
        self.path = path

    # --- Different for each framework ----------------------------------------------------------

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the slots for these variables."""
        raise NotImplementedError

    def built_with(self) -> list[Any]:
        """Returns the variables that the optimizer was built with."""
        raise NotImplementedError

    def key(self, variable: Any) -> Any:
        """Returns the key by which the optimizer stores a variable."""
        raise NotImplementedError

    def set_setting(self, name: str, value: Any) -> None:
        """Sets a hyperparameter other than the learning rate."""
        setattr(self.inner, name, value)

    def set_rate(self, rate: float, decay: float) -> None:
        """Sets the learning rate; if `decay` is not 0, to rate / (1 + decay * iterations)."""
        raise NotImplementedError

    def follows_schedule(self) -> bool:
        """Whether the optimizer has a learning rate schedule."""
        raise NotImplementedError

    def set_momentum_schedule(self, decay: float) -> None:
        """Sets how fast Nadam raises its momentum: TensorFlow's `schedule_decay`, per step."""
        if decay != NEW_NADAM_DECAY:
            warn(NADAM_DECAY.format(decay=decay))

    def momentum_product(self) -> Any:
        """Returns the scalar in which Nadam keeps the product of its momentums, or None."""
        return getattr(self.inner, "_u_product", None)

    def set_scale_values(self, scale: float, good_steps: int) -> None:
        """Sets the loss scale and its counter, made valid for the rule."""
        raise NotImplementedError

    # --- Common to all --------------------------------------------------------------------------

    def set_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
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
                self.set_setting(name, value)
        return before

    def set_learning_rate(self, saved: SavedOptimizer) -> None:
        """Sets the learning rate and its decay; a schedule of the optimizer stays."""
        decay = saved.settings.get("decay", 0.0)
        if self.kind == "Nadam":
            # Other optimizers use this name for the decay of the learning rate.
            if "decay" in saved.settings:
                self.set_momentum_schedule(decay)
            elif saved.era not in (OLDEST, FIRST_KIND):
                self.set_momentum_schedule(NEW_NADAM_DECAY)
            decay = 0.0
        if saved.learning_rate is not None and not self.follows_schedule():
            self.set_rate(saved.learning_rate, decay)

    def slot(self, saved: SavedSlot, variable: Any) -> Any:
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

    def set_counters(self, saved: SavedOptimizer) -> None:
        """Sets the number of steps and of skipped steps."""
        if saved.iterations is not None:
            self.optimizer._steps_skipped.assign(saved.skipped)
            self.optimizer.iterations = saved.iterations

    def set_others(self, saved: SavedOptimizer) -> list[str]:
        """Sets values that are neither slots nor settings; returns the names that do not exist."""
        left = []
        product = self.momentum_product() if self.kind == "Nadam" else None
        known = False
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

    def set_scale(self, saved: SavedOptimizer) -> list[str]:
        """Sets the loss scale; returns the names of values that do not exist in this rule."""
        optimizer = self.optimizer
        if optimizer._state is None:
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
        self.set_scale_values(saved.scale, saved.good_steps or 0)
        return []


class KerasRestoreTarget(RestoreTarget):
    """A loss scale optimizer on Keras 3."""

    def build(self, variables: Sequence[Any]) -> None:
        self.optimizer.build(list(variables))

    def built_with(self) -> list[Any]:
        return list(self.optimizer._trainable_variables) if self.optimizer.built else []

    def key(self, variable: Any) -> Any:
        return self.optimizer._var_key(variable)

    def set_counters(self, saved: SavedOptimizer) -> None:
        if saved.iterations is not None:
            self.optimizer._steps_skipped.assign(saved.skipped)
            # With gradient accumulation, `iterations` counts something else.
            self.optimizer._iterations.assign(saved.iterations)

    def set_rate(self, rate: float, decay: float) -> None:
        import keras

        described = decayed(rate, decay, type(self.inner).__name__) if decay else rate
        self.inner.learning_rate = keras.saving.deserialize_keras_object(described)

    def follows_schedule(self) -> bool:
        import keras

        schedule = keras.optimizers.schedules.LearningRateSchedule
        return isinstance(self.inner._learning_rate, schedule)

    def set_scale_values(self, scale: float, good_steps: int) -> None:
        named = {field: v.name for field, v in self.optimizer._state.variables.items()}
        values = {"scale": np.float32(scale), "good_steps": np.int64(good_steps)}
        # A custom rule may not count steps.
        self.optimizer._restore_scale(
            {named[field]: value for field, value in values.items() if field in named}
        )


class TFKerasRestoreTarget(RestoreTarget):
    """A loss scale optimizer on tf_keras, around an optimizer of either family."""

    @property
    def _is_legacy(self) -> bool:
        return bool(self.optimizer._is_legacy)

    def build(self, variables: Sequence[Any]) -> None:
        self.optimizer._build(list(variables))

    def built_with(self) -> list[Any]:
        return [each for group in self.optimizer._trained for each in group]

    def key(self, variable: Any) -> Any:
        return variable._unique_id

    def set_setting(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)
        if self._is_legacy and name == "momentum" and hasattr(self.inner, "_momentum"):
            # These settings decide whether the slots exist.
            self.inner._momentum = float(value) > 0

    def set_rate(self, rate: float, decay: float) -> None:
        import tf_keras

        if self._is_legacy:
            if self.kind != "Nadam":
                self.inner._initial_decay = decay
                self.inner._set_hyper("decay", decay)
            self.inner.learning_rate = rate
        elif decay:
            schedule = tf_keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)
            self.inner._learning_rate = self.inner._build_learning_rate(schedule)
        else:
            self.inner.learning_rate = rate

    def follows_schedule(self) -> bool:
        import tf_keras

        rate = self.inner._hyper["learning_rate"] if self._is_legacy else self.inner._learning_rate
        return isinstance(rate, tf_keras.optimizers.schedules.LearningRateSchedule)

    def set_momentum_schedule(self, decay: float) -> None:
        if not self._is_legacy:
            super().set_momentum_schedule(decay)
            return
        self.inner._initial_decay = decay
        self.inner._set_hyper("decay", decay)

    def momentum_product(self) -> Any:
        name = "_m_cache" if self._is_legacy else "_u_product"
        return getattr(self.inner, name, None)

    def set_others(self, saved: SavedOptimizer) -> list[str]:
        left = super().set_others(saved)
        if hasattr(self.inner, "_u_product_counter") and saved.iterations is not None:
            # tf_keras uses this number to tell whether the current step has already updated the
            # product.
            self.inner._u_product_counter = saved.iterations - saved.skipped + 1
        return left

    def set_scale_values(self, scale: float, good_steps: int) -> None:
        values = {"current_loss_scale": np.float32(scale), "good_steps": np.int64(good_steps)}
        self.optimizer._set_own_values(values)


TARGETS: dict[str, type[RestoreTarget]] = {
    "keras": KerasRestoreTarget,
    "tf_keras": TFKerasRestoreTarget,
}
"""The class for the optimizers of each framework, by its name."""


def target_for(optimizer: Any, path: str) -> RestoreTarget:
    """Returns the target that sets saved state in an optimizer.

    Raises:
        UnsupportedError: If its framework is not supported.
    """
    target = TARGETS.get(optimizer._framework)
    if target is None:
        raise UnsupportedError(
            f"Files of TensorFlow cannot be restored into a {optimizer._framework} optimizer."
        )
    return target(optimizer, path)
