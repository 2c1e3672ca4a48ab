"""What the loss scale optimizers of both families of tf_keras optimizers are made of."""

from __future__ import annotations

import collections
from typing import Any, ClassVar

import tensorflow as tf
import tf_keras

from lossscale import registry
from lossscale.arguments import rule_from_arguments
from lossscale.common.checks import remember_wrapper
from lossscale.common.handover import GradientHandover
from lossscale.keras_common.contract import StateVariables
from lossscale.keras_common.reading import SharedReading
from lossscale.members import VariableList
from lossscale.optimizer import LossScaleOptimizer
from lossscale.tensorflow import replicas
from lossscale.tensorflow.private_names import DelegatingTrackableMixin
from lossscale.tf_keras.checks import check_inner, check_names
from lossscale.tf_keras.iterations import StepCounter
from lossscale.tf_keras.loss_scales import LossScaleSupport
from lossscale.tf_keras.older_checkpoints import OlderBaseOptimizer
from lossscale.tf_keras.parts import Parts
from lossscale.tf_keras.persistence import Persistence
from lossscale.tf_keras.private_names import LossScaleOptimizerMetaclass
from lossscale.tf_keras.settings import InnerSettings
from lossscale.tf_keras.state import LossScaleNode, State, new_variable
from lossscale.tf_keras.training import TrainingStep
from lossscale.tf_keras.verbs import DocumentedVerbs


class ByFamily(LossScaleOptimizerMetaclass):
    """Makes an object of the shell that fits the optimizer to wrap.

    A file names one class for both families.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapped = args[0] if args else kwargs.get("inner_optimizer", kwargs.get("optimizer"))
        shell = _shell_for(wrapped)
        cls: type[Any] = self
        # The constructor says what is wrong with something that is no optimizer.
        if shell is not None and not issubclass(cls, shell):
            if vars(cls).get("_is_combined"):
                cls = registry.combined(cls.__mro__[1], shell)
            elif cls in _SHELLS.values():
                cls = shell
        return type.__call__(cls, *args, **kwargs)


_SHELLS: dict[type[Any], type[Any]] = {}
"""The shells by the base class of the optimizers that they wrap."""


def _shell_for(optimizer: Any) -> type[Any] | None:
    for base, shell in _SHELLS.items():
        if isinstance(optimizer, base):
            return shell
    return None


def register_shell(shell: type[Any]) -> None:
    """Lets a shell be found by the optimizers that it wraps, and tf_keras' files name it."""
    _SHELLS[shell._inner_base] = shell
    register = tf_keras.saving.register_keras_serializable
    register(package="lossscale", name="LossScaleOptimizer")(shell)


class CommonShell(
    InnerSettings,
    TrainingStep,
    DocumentedVerbs,
    Persistence,
    LossScaleSupport,
    SharedReading,
    LossScaleOptimizer,
    Parts,
):
    """The constructor, what can be read, and the configuration."""

    _framework: ClassVar[str | None] = "tf_keras"
    _inner_base: ClassVar[type[Any]]

    _waiting: list[Any] | None
    _warned_of_none: bool

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: Any = True,
        initial_scale: Any = None,
        dynamic_growth_steps: Any = None,
        *,
        rule: Any = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_names(kwargs)
        rule = rule_from_arguments(dynamic, initial_scale, dynamic_growth_steps, rule)
        check_inner(inner_optimizer, self._inner_base)
        replicas.check_strategy()
        # The constructors of tf_keras are not called: they would make a second counter and hide
        # the inner optimizer's settings. In a checkpoint both optimizers are one node.
        DelegatingTrackableMixin.__init__(self, inner_optimizer)
        self._optimizer = inner_optimizer
        self._given_name = name
        self._rule = rule
        self._handover = GradientHandover()
        self._waiting = None
        # Past attribute tracking, as a checkpoint holds no arrays.
        self.__dict__["_later"] = {}
        self._warned_of_none = False
        self._trained: tuple[Any, ...] = ()
        self._loose_variables: dict[str, Any] = {}
        self._added_slots: dict[Any, Any] = {}
        self._create_state()
        remember_wrapper(inner_optimizer, self)

    def _create_state(self) -> None:
        first = self._first_state()
        if first is None or isinstance(first, State):
            self._state = first
        else:
            # A LossScale object whose value was asked for before it met an optimizer, in a process
            # that has imported Keras 3 as well.
            self._state = State(self._rule, new_variable)
            self._state.write(first.read())
            self._loss_scale._state = self._state
        self._steps_skipped = new_variable("steps_skipped", tf.int64, 0)
        self._last_step_skipped = new_variable("last_step_skipped", tf.bool, False)
        self._step_counter = StepCounter(self._inner_iterations, self._steps_skipped)
        own = self._own_variables()
        extras = {name: own.pop(name) for name in ("steps_skipped", "last_step_skipped")}
        # A checkpoint that was written before the optimizer was wrapped left a list of children.
        self._optimizer.__dict__.pop("_coalesced_children", None)
        if own or self._rule.checks_gradients:
            self._track_trackable(LossScaleNode(own, extras), "loss_scale", overwrite=True)
        older = OlderBaseOptimizer(self._optimizer, self._is_legacy, self._find_slot)
        self._track_trackable(older, "base_optimizer", overwrite=True)

    def _first_state(self) -> StateVariables | None:
        return State(self._rule, new_variable)

    def _track_variable(self, variable: Any) -> None:
        """Counts a variable of a LossScale object as one of this optimizer's."""
        self._loose_variables[variable.name.removesuffix(":0")] = variable

    # --- What can be read ---------------------------------------------------------------------

    @property
    def name(self) -> str:  # type: ignore[override]
        """The optimizer's name."""
        return self._given_name or "loss_scale_optimizer"

    # `dynamic`, `initial_scale` and `dynamic_growth_steps` come before those of tf_keras, as
    # lossscale.LossScaleOptimizer does.

    @property
    def loss_scale(self) -> Any:
        return tf.cast(self._current_scale(), tf.float32)

    @property
    def dynamic_counter(self) -> Any:
        return None if self._state is None else self._state.variables.get("good_steps")

    @property
    def iterations(self) -> StepCounter:
        return self._step_counter

    @iterations.setter
    def iterations(self, value: Any) -> None:
        if isinstance(value, tf.Variable):
            self._optimizer.iterations = value
        else:
            self._step_counter.assign(value)

    def _inner_iterations(self) -> Any:
        # A legacy optimizer makes its counter when it is first read, maybe in a traced function.
        with tf.init_scope():
            return self._optimizer.iterations

    @property
    def variables(self) -> VariableList:
        # Last come those that the inner optimizer keeps and does not list (Nadam).
        listed = [*self._inner_weights(), *self._own_variables().values()]
        # HDF5 files name a variable by its name alone.
        others = self._unlisted_variables().values()
        names = collections.Counter(variable.name for variable in (*listed, *others))
        return VariableList([*listed, *(other for other in others if names[other.name] == 1)])

    @property
    def weights(self) -> VariableList:
        return VariableList(self._inner_weights())

    # --- Configuration ------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        return {
            **({} if self._given_name is None else {"name": self._given_name}),
            "inner_optimizer": tf_keras.optimizers.serialize(self._optimizer),
            "dynamic": self.dynamic,
            **self._described_rule(),
        }
