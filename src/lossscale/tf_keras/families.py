"""What differs by the family of the inner optimizer: tf_keras' new ones, and its legacy ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tf_keras

import lossscale.framework_types as ft
from lossscale.keras_common.optimizer import KerasCommonOptimizer
from lossscale.keras_common.slots import Slots, slots_in
from lossscale.keras_common.state import parts_of
from lossscale.old_formats import documented_name, kind_of
from lossscale.tensorflow.tracing import in_xla, translated


class CurrentFamily:
    """An inner optimizer of the kind that tf_keras has had since 2.11.

    Attributes:
        are_summed: The argument of `apply_gradients` that says that gradients are summed over the
            replicas already, and its value.
        hidden: Names that dir() of the wrapper leaves out.
    """

    are_summed = ("skip_gradients_aggregation", True)
    hidden = KerasCommonOptimizer._hidden

    def __init__(self, inner: ft.KerasOptimizer) -> None:
        self._inner = inner

    def build(self, variables: list[ft.Variable]) -> None:
        self._inner.build(variables)

    def weights(self) -> list[ft.Variable]:
        return list(self._inner.variables)

    def unlisted_variables(self, trained: ft.Variables) -> dict[str, ft.Variable]:
        # tf_keras lists what `add_variable` made, and not what `build` set as an attribute.
        inner = self._inner
        listed = [*inner.variables, inner.iterations, inner._learning_rate, *trained]
        known = {id(variable) for variable in listed}
        return {
            f"inner.{name}.{number}": each
            for name, attribute in vars(inner).items()
            # TensorFlow keeps the attributes once more in these.
            if not name.startswith("_self_")
            for number, each in enumerate(parts_of(attribute))
            if isinstance(each, tf.Variable) and id(each) not in known
        }

    def pairs_of(self, loss: ft.Tensor, variables: ft.Variables, tape: ft.Tape) -> ft.GradsAndVars:
        return list(self._inner.compute_gradients(loss, variables, tape=tape))

    def symbolic(self, loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        return list(tf.gradients(loss, list(variables)))

    def aggregated(self, pairs: ft.GradsAndVars) -> ft.GradsAndVars:
        # With DTensor, gradients are already summed.
        if self._inner._run_with_dtensor or self._inner._mesh:
            return pairs
        return list(translated(self._inner.aggregate_gradients)(pairs))

    @contextlib.contextmanager
    def while_applying(self) -> Iterator[None]:
        inner = self._inner
        if "_u_product_counter" in vars(inner) and tf.executing_eagerly():
            # By this number Nadam tells whether this step has multiplied its product already, and
            # no file has it. A traced function keeps what it was when it was traced.
            inner._u_product_counter = int(inner.iterations) + 1
        if not in_xla():
            yield
            return
        # The optimizers compile each update as a function of its own. Where all is compiled anyway,
        # that only hides from XLA what the update is part of.
        before, inner.jit_compile = inner.jit_compile, False
        try:
            yield
        finally:
            inner.jit_compile = before

    def slots(self) -> Slots:
        inner = self._inner
        keys = list(getattr(inner, "_index_dict", ()))
        for attribute, slots in slots_in(inner, keys, tf.Variable):
            # tf_keras puts the slot's name before that of the reference variable.
            names = sorted({str(slot.name).partition("/")[0] for slot in slots.values()})
            documented = documented_name(kind_of(inner), [attribute])
            yield (names if documented is None else [documented, *names]), slots

    def new_weight(
        self, name: str, shape: Any, dtype: Any, initializer: Any, trainable: Any, **settings: Any
    ) -> ft.Variable:
        with tf.init_scope():
            first = tf_keras.initializers.get(initializer)(tuple(shape), dtype or tf.float32)
            variable = tf.Variable(first, trainable=bool(trainable), name=name, **settings)
        self._inner._variables.append(variable)
        return variable


class LegacyFamily:
    """An inner optimizer of `tf_keras.optimizers.legacy`, the only kind before 2.11.

    Attributes:
        are_summed: The argument of `apply_gradients` that says that gradients are summed over the
            replicas already, and its value.
        hidden: Names that dir() of the wrapper leaves out.
    """

    are_summed = ("experimental_aggregate_gradients", False)
    # It has none of these. TensorFlow's checkpoints ask dir() for the slots, as `get_slot_names`.
    hidden = frozenset(
        {
            "add_variable",
            "add_variable_from_reference",
            "aggregate_gradients",
            "exclude_from_weight_decay",
            "update_step",
        }
    )

    def __init__(self, inner: ft.KerasOptimizer) -> None:
        self._inner = inner

    def build(self, variables: list[ft.Variable]) -> None:
        self._inner._create_all_weights(variables)

    def weights(self) -> list[ft.Variable]:
        return list(self._inner.weights)

    def unlisted_variables(self, trained: ft.Variables) -> dict[str, ft.Variable]:
        return {}

    def pairs_of(self, loss: ft.Tensor, variables: ft.Variables, tape: ft.Tape) -> ft.GradsAndVars:
        return list(self._inner._compute_gradients(loss, variables, tape=tape))

    def symbolic(self, loss: ft.Tensor, variables: ft.Variables) -> list[ft.Gradient]:
        return list(self._inner.get_gradients(loss, list(variables)))

    def aggregated(self, pairs: ft.GradsAndVars) -> ft.GradsAndVars:
        pairs = self._inner._transform_unaggregated_gradients(pairs)
        return list(self._inner._aggregate_gradients(pairs))

    def while_applying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def slots(self) -> Slots:
        # It finds and makes them itself.
        yield from ()

    def new_weight(self, *given: Any, **settings: Any) -> ft.Variable:
        return self._inner.add_weight(*given, **settings)
