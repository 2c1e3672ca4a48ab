"""The training step: scale the loss, unscale and judge the gradients, apply or skip, move on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import keras
from keras import ops

# Keras keeps attribute tracking private; its own optimizers decorate `build` with this.
from keras.src.utils.tracking import no_automatic_dependency_tracking

from lossscale.errors import ArgumentError, GradientsError
from lossscale.frameworks.checks import check_some_gradient, checked_pairs, with_gradient
from lossscale.frameworks.part import Part
from lossscale.frameworks.watches.common import Seen


class TrainingStep(Part):
    """What Keras' trainer calls, and what the documented verbs lead to."""

    built: bool

    # A monitor sets it in the instance's dictionary, past attribute tracking: it is not saved.
    _watch: ClassVar[Any] = None

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's variables; a second call does nothing."""
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
        self._build_watch()

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

    def _start_watch(self, histograms_every: int | None) -> None:
        """Lets steps note what a monitor reads; takes effect in functions that are traced later.

        Args:
            histograms_every: At which multiples of this step number exponents are counted; None
                for never.
        """
        # Past the attribute tracking of Keras and TensorFlow.
        self.__dict__["_watch"] = self._engine.new_watch(histograms_every, _new_watch_variable)
        if self.built:
            self._build_watch()

    def _build_watch(self) -> None:
        if self._watch is not None:
            trained = self._trainable_variables
            names = [getattr(variable, "path", variable.name) for variable in trained]
            dtypes = [keras.backend.standardize_dtype(variable.dtype) for variable in trained]
            with self._engine.outside_traces():
                self._watch.build(trained, names, dtypes)

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the loss scale, and marks the gradients that come of it.

        This is how Keras' trainer begins a step: `apply_gradients` takes its gradients for scaled
        ones and divides them, once for each variable, so that they can be applied in groups. With
        `get_unscaled_gradients`, use `get_scaled_loss`.

        Args:
            loss: Tensor of any shape and dtype, a number, or a callable that returns one.

        Returns:
            The product, in float32 or wider; for a callable, a callable.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8)
            >>> float(optimizer.scale_loss(tf.constant(0.5)))
            4.0
        """
        self._convention.note_scale_loss(self._engine.current_place())
        return self._scaled(loss)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Applies gradients to variables, or skips the step; then moves the loss scale.

        The gradients are those that `get_unscaled_gradients` returned. After `scale_loss` they
        are those of the scaled loss, as Keras' trainer passes them.

        Args:
            grads_and_vars: (gradient, variable) pairs. A gradient is a tensor of the variable's
                shape, a `tf.IndexedSlices`, or None.
            name: Name of the operations, or None.
            skip_gradients_aggregation: Whether the gradients were already summed over the
                replicas of a strategy; then they are not summed again.
            experimental_aggregate_gradients: The opposite, under its older name.

        Returns:
            `iterations`, which has grown by 1, whether the step was applied or skipped.

        Raises:
            TypeError: If `grads_and_vars` does not hold pairs.
            ValueError: If no variable has a gradient.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
            >>> weight = tf.Variable([1.0, 2.0])
            >>> scaled = optimizer.get_scaled_loss(tf.constant([2.0, float("inf")]))
            >>> gradients = optimizer.get_unscaled_gradients([scaled])
            >>> steps = optimizer.apply_gradients(zip(gradients, [weight]))
            >>> weight.numpy(), int(optimizer.steps_skipped), float(optimizer.loss_scale)
            (array([1., 2.], dtype=float32), 1, 16384.0)
        """
        gradients, variables = checked_pairs(grads_and_vars, self._engine.is_variable)
        moved = with_gradient(gradients, variables)
        place = self._engine.current_place()
        scaled = self._convention.are_scaled(place, moved)
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        with keras.name_scope(name or self.name):
            self._step(gradients, variables, scaled=scaled, aggregate=aggregate)
        self._convention.note_applied(place, moved)
        return self.iterations

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Applies gradients of the scaled loss, or skips the step; then moves the loss scale.

        The gradients themselves stay as they are: on PyTorch a `.grad` can be added to, filled
        again or handed in once more.

        Args:
            grads: Gradients of the loss that `scale_loss` returned; None where there is none.
            trainable_variables: Their variables; None for those the optimizer was built with.

        Raises:
            ValueError: If no variable has a gradient, or without variables their number differs.

        Example:
            >>> optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1.0))
            >>> weight = keras.Variable([1.0, 2.0])
            >>> optimizer.apply([optimizer.scale_loss(tf.constant([0.5, 0.5]))], [weight])
            >>> weight.numpy()
            array([0.5, 1.5], dtype=float32)
        """
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
        self._convention.check_apply()
        with keras.name_scope(self.name):
            self._step(grads, variables, scaled=True)
        self._convention.note_apply(self._engine.current_place(), with_gradient(grads, variables))

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Applies gradients of the scaled loss without changing any variable.

        Args:
            optimizer_variables: Arrays, the values of `variables`.
            grads: Gradients of the loss that `scale_loss` returned; None where there is none.
            trainable_variables: Arrays, the values of the variables it was built with.

        Returns:
            The new values of the trainable variables, and those of `variables`.

        Raises:
            ValueError: If the optimizer is not built, the numbers of values do not match, or the
                backend is TensorFlow.
        """
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
        scale = self._current_scale() if scaled else None
        self._engine.run_step(self, gradients, variables, scale, aggregate)

    def _note(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        scale: Any,
        finite: Any,
        *,
        is_shared: bool,
    ) -> None:
        """Notes a step that was decided on and not done yet; only for an optimizer with a watch.

        Args:
            gradients: Those of the step; None where there is none.
            variables: Their variables.
            scale: What the gradients have to be divided by; None if they are unscaled already.
            finite: Whether the step is applied.
            is_shared: Whether all replicas have the same gradients.
        """
        self._watch.note(
            Seen(
                gradients,
                variables,
                lambda scaled: self._unscaled(scaled, variables, scale),
                finite,
                self._current_scale() if scale is None else scale,
                self._engine.read(self._iterations) + 1,
                is_shared,
            )
        )

    def _check_known(self, variables: Sequence[Any]) -> None:
        """Raises for a variable that the inner optimizer does not know, before anything is done."""
        # Once for each list: in eager mode looking every variable up takes longer than the rest.
        # The optimizer keeps the variables it knows, so that no id is given to another one.
        ids = tuple(map(id, variables))
        if ids != self.__dict__.get("_known_ids"):
            self.inner_optimizer._check_variables_are_known(variables)
            self.__dict__["_known_ids"] = ids

    def _scaled(self, loss: Any) -> Any:
        if callable(loss):
            return lambda: self._scaled(loss())
        return self._engine.scaled(loss, self._current_scale())

    def _unscaled(
        self, gradients: Iterable[Any], variables: Sequence[Any], scale: Any
    ) -> list[Any]:
        """Returns gradients divided by a scale; as they are if it is None."""
        gradients = list(gradients)
        if scale is None:
            return gradients
        multiplied = self._multiplied(gradients, variables)
        divided = self._engine.unscaled(multiplied, scale, self._rule.powers_of_two)
        return [
            given if kept is None else result
            for given, kept, result in zip(gradients, multiplied, divided, strict=True)
        ]

    def _for_inner(
        self, gradients: Sequence[Any], variables: Sequence[Any], scale: Any
    ) -> list[Any]:
        """Returns unscaled gradients in the dtype in which the inner optimizer takes them."""
        unscaled = self._unscaled(gradients, variables, scale)
        inner = self.inner_optimizer
        parts = (inner, *getattr(inner, "optimizers", ()))
        if not any(part.gradient_accumulation_steps for part in parts):
            return unscaled
        # It adds them to sums of the variables' dtype, and adds no two dtypes.
        wanted = [keras.backend.standardize_dtype(variable.dtype) for variable in variables]
        return [
            gradient
            if gradient is None or keras.backend.standardize_dtype(gradient.dtype) == dtype
            else self._engine.cast(gradient, dtype)
            for gradient, dtype in zip(unscaled, wanted, strict=True)
        ]

    def _multiplied(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients that the loss scale multiplied, None for others.

        A variable that Keras overwrites with its gradient (float8 statistics) has no gradient of
        the loss, so nothing multiplied it.
        """
        return [
            None if getattr(variable, "overwrite_with_gradient", False) else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    # What a LossScale object of the older API replaces: the scale, the verdict, the move.

    def _current_scale(self) -> Any:
        return self._rule.loss_scale(self._state.read())

    def _judge(self, gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> Any:
        """Whether the step is applied: a boolean scalar tensor, or True if nothing is checked.

        Args:
            gradients: Those of the step; None where there is none.
            variables: Their variables.
            scale: What the gradients will be divided by; None if they are unscaled already.
        """
        if not self._rule.checks_gradients:
            return True
        if scale is None:
            return self._engine.all_finite(gradients)
        multiplied = self._multiplied(gradients, variables)
        others = [g for g, m in zip(gradients, multiplied, strict=True) if m is None]
        finite = self._engine.all_finite(multiplied, scale, self._rule.powers_of_two)
        if all(gradient is None for gradient in others):
            return finite
        return ops.logical_and(finite, self._engine.all_finite(others))

    def _move_scale(self, finite: Any) -> None:
        if self._state is not None:
            self._state.update(finite)
        self._count_step(finite)

    def _count_step(self, finite: Any) -> None:
        if finite is not True:
            known = self._engine.known(finite)
            skipped = ops.logical_not(finite) if known is None else not known
            self._last_step_skipped.assign(skipped)
            if known is None:
                self._steps_skipped.assign_add(ops.cast(skipped, self._steps_skipped.dtype))
            elif skipped:
                self._steps_skipped.assign_add(1)
        self._iterations.follow()


def _new_watch_variable(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    return keras.Variable(
        initializer="zeros", shape=shape, dtype=dtype, trainable=False, name=f"watch_{name}"
    )
