"""Wrong versions of the sources, and the tests that have to notice each.

`python -m tools.mutants` runs them.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator

from tools.mutants.edits import Edit

# The backends of the process in which a mutant's tests run.
TENSORFLOW, TF_KERAS, JAX, TORCH = "tensorflow", "tf_keras", "jax", "torch"
BACKEND_OF_PART = {"tf_keras": TF_KERAS, "jax": JAX, "optax": JAX, "torch": TORCH}


@dataclasses.dataclass(frozen=True)
class Mutant(Edit):
    """One wrong edit.

    Attributes:
        backend: Which process runs the tests.
        tests: Arguments of pytest that select the tests which must fail.
    """

    backend: str
    tests: tuple[str, ...]


# Tests, as they are named on the command line of pytest, and the mutants that they kill:
#
#     PART [on BACKEND] FUNCTION: OLD -> NEW  [-k WORDS]
#
# with the backend if it is not that of the part, and with words, as `-k` of pytest has them, if not
# all of these tests are needed. What is indented further goes on with the line above. Statements
# after one another have a `;` between them.
KILLED_BY = """
tests/core/test_rules_properties.py
    rules DynamicScale.update: xp.where(lowered < self.ceiling, lowered, self.ceiling) -> lowered
tests/core/test_rules.py
    rules DynamicScale.restored: math.isfinite(scale) and scale > 0 -> math.isfinite(scale)
    rules DynamicScale.restored: min(max(scale, self.min_scale), self.ceiling)
        -> max(scale, self.min_scale)
    arguments checked_rule: hasattr(rule, 'needs') -> False  -k needs
tests/conformance/test_promises.py -k tensorflow-eager
    rules DynamicScale.update: counted < self.growth_interval -> counted <= self.growth_interval
    rules DynamicScale.update: scale * self.backoff_factor -> scale / self.growth_factor
    rules DynamicScale.update: waiting | (grown > self.ceiling) -> waiting
    rules DynamicScale.update: grown > self.ceiling -> grown >= self.ceiling
    rules DynamicScale.update: xp.where(finite, ..., 0)
        -> xp.where(finite, ..., counted)
    rules DynamicScale.update: xp.where(finite, ..., lowered)
        -> xp.where(finite, ..., scale)
    rules DynamicScale.update: xp.where(lowered > self.min_scale, lowered, self.min_scale)
        -> lowered
    rules FixedScale.checks_gradients: self.skip_nonfinite -> True
    keras_common check: not rule.checks_gradients -> False
    keras_common save: store[name] = value -> pass
    tensorflow unscaled: gradient / divisor -> gradient * tf.math.reciprocal(divisor)
tests/conformance/test_promises.py -k tensorflow-function
    tensorflow _branch: finished(apply(), True) -> finished(None, True)
    tensorflow _branch: finished(None, False) -> finished(None, True)
    tensorflow _branch: [applied, update(...)] -> [applied]
    tensorflow where: one if decided else other -> one
    keras_common _counted: arrays.assign(parts.last_step_skipped, skipped) -> None
    keras StepCounter.value: self._skipped.value + self._inner._iterations.value
        -> self._inner._iterations.value
tests/conformance/test_promises.py -k tensorflow-xla
    tensorflow apply_or_skip: _keeping_old_values(written(), finite)
        -> _keeping_old_values([], finite)
    tensorflow _choosing_assignments: variable.read_value() - delta -> variable.read_value() + delta
    tensorflow _choosing_assignments: tf.where(finite, value, old) -> value
    tensorflow _choosing_assignments:
        {'assign': assign, 'assign_add': assign_add, 'assign_sub': assign_sub}
        -> {'assign': assign, 'assign_add': assign_add}
    keras_common _counted: arrays.add(parts.steps_skipped, skipped) -> None
tests/backends/test_fit.py -k subclass
    keras_common KerasCommonOptimizer._step: is_scaled and (...) -> False
    keras LossScaleOptimizer.scale_loss: ... and self._is_overridden(...) -> False
    keras LossScaleOptimizer.scale_loss: not self._ledger.is_own_step(location) -> True
tests/conformance/test_subclasses.py
    keras_common _recording: self._ledger.own_step(location) -> contextlib.nullcontext()
    keras_common _recording: each is not None -> False
    keras_common KerasCommonOptimizer.__init_subclass__: setattr(cls, name, ...) -> None
tests/conformance/test_promises.py -k tf_keras-new-function
    keras_common check: not rule.checks_gradients -> False
    keras_common on tf_keras _counted: arrays.add(parts.steps_skipped, skipped) -> None
    keras_common on tf_keras take: state.update(finite) -> None
tests/conformance/test_random_programs.py -k tf_keras-new-eager
    tf_keras LossScaleNode._restore_from_tensors: self._extras[name].assign(...) -> tf.no_op()
tests/conformance/test_promises.py -k tf_keras-legacy-eager
    keras_common on tf_keras _counted: arrays.assign(parts.last_step_skipped, skipped) -> None
tests/conformance/test_promises.py -k jax-eager
    keras.backends.jax on jax _branch: bool(finite) -> True
tests/conformance/test_promises.py -k jax-jit
    jax scaled: widened(loss) -> jnp.asarray(loss)
    keras on jax LossScaleOptimizer._changed_by:
        [*inner.variables, *inner._trainable_variables, *step.variables]
        -> [*inner.variables, *inner._trainable_variables[1:], *step.variables[1:]]
tests/conformance/test_promises.py
    keras on torch _check: -math.inf < read <= -1.0 -> -math.inf < read <= 0.0
    keras on torch _check: torch.where(...) -> overflow
    keras on torch _add: variable._value.add_(value) -> None
tests/conformance/test_promises.py -k 'reciprocal and tensorflow'
    tensorflow unscaled: compiled and powers_of_two -> powers_of_two
    tensorflow _not_constant: tf.get_static_value(divisor) is None -> True
tests/conformance/test_promises.py -k 'reciprocal and keras-jax-jit'
    keras on jax _unscaled: jax.lax.optimization_barrier(scale) -> scale
tests/conformance/test_promises.py -k 'floor and torch-native-host'
    common on torch warned_at_floor: scale > rule.min_scale -> scale >= rule.min_scale
tests/conformance/test_promises.py -k torch-native-host
    torch Engine._decide_on_host: not number > 0 -> True
    torch Engine.apply: decision.apply is False -> False
    torch Multiplier.may_be_below_one: lowest < 1.0 -> False
    torch LossScaleOptimizer.load_state_dict: state_dicts.restore(scale, numbers) -> pass
    torch LossScale.update: self.number != before -> False
tests/conformance/test_promises.py -k torch-native-device
    torch attributes: optimizer.found_inf = found_inf -> pass
tests/conformance/test_promises.py -k 'optax-native-jit and makes_infinite'
    optax may_be_below_one: rule.lowest_scale is None or rule.lowest_scale < 1.0 -> False
tests/conformance/test_random_programs.py
    tensorflow all_finite: _all_true(each_finite(large)) -> tf.constant(False)
        -k keras-tensorflow-function
    tensorflow _sums: tf.reduce_all -> tf.reduce_any  -k keras-tensorflow-function
    tensorflow _all_true: tf.reduce_all -> tf.reduce_any  -k keras-tensorflow-function
    tensorflow _in_turn: tf.constant(False) -> tf.constant(True)  -k keras-tensorflow-xla
tests/backends/test_diagnose.py
    diagnosis.keras on torch _as_it_was: attributes.update(values) -> pass  -k subclassed
    diagnosis on torch _cast_to_float16: not asks(layer) -> True  -k ask_for_a_dtype
    diagnosis on torch KerasGradientFunction._forward: keras.ops.cast(target, output.dtype)
        -> output  -k targets_beyond
    diagnosis on torch _value: keras.ops.cast(value, 'float32') -> value
        -k whatever and test_the_reference
    diagnosis on tensorflow _derive_on_tensorflow: map(rows, gradients)
        -> map(tf.convert_to_tensor, gradients)
        -k Embedding
tests/backends/test_diagnose_loss_functions.py
    diagnosis on torch KerasGradientFunction.__init__:
        checked_parameters(parameters, model.trainable_variables) -> model.trainable_variables
tests/backends/test_finite.py
    tensorflow all_finite: unscaled(parts, scale, powers_of_two) -> parts
    tensorflow all_finite: tf.logical_and(fits, ...) -> fits
    torch all_finite: bool(fits) -> True
tests/backends/test_torch.py
    keras on torch _check: torch.empty_like(each) -> each
    keras on torch _check: -math.inf < read <= -1.0 -> read <= -1.0
tests/backends/test_handover.py
    keras_common ScaleLedger._scaled_or_unscaled: min(times) < record.losses -> False
    keras_common _Record.count: times + 1 -> times
    keras_common ScaleLedger._check_not_of_another: ... and is_here and not is_ready
        -> False
    keras_common ScaleLedger._left_by_another: (None, self._last_at_apply) -> (None,)
    keras_common _Record.is_elsewhere: self.graph is not None and graph is None -> False
        -k groups
    keras_common ScaleLedger._scaled_or_unscaled: len(kinds) > 1 -> False  -k says_what_to_write
tests/conformance/test_keras_files.py
    keras load_own_variables: numbered[4:] -> numbered  -k what_fits
    keras load_own_variables: not any(...) -> True  -k layers_are_loaded
tests/conformance/test_random_programs.py
    keras_common WithSlots.set_weights: len(values) == len(weights) -> True
        -k keras-tensorflow-eager
tests/diagnosis/test_measurement.py
    diagnosis on tensorflow _Batches._explained: hidden and found.operation -> False
        -k made_finite
    diagnosis _beyond: error ** 2 - best ** 2 -> error ** 2
    diagnosis _Batches.measured: g.largest > least -> False
    diagnosis _predicted_highest: LARGEST / largest -> largest
    diagnosis _Batches._highest_finite: high - low > 1 -> high - low > 2
    diagnosis _Batches._backward: max(predicted, second) -> _HIGHEST
    diagnosis _differing: error > _SAME -> False
    diagnosis _Batches._correct_reference: lower[name] <= TOLERANCE -> True
    diagnosis _Batches._worst: filter(math.isfinite, beyond) -> beyond
    diagnosis _Batches._worst: best[name] < NOISE -> True
    diagnosis _is_finite: (found.losses, *found.gradients.values())
        -> found.gradients.values()
    diagnosis recommend: highest - 1 -> highest + 1
    diagnosis recommend: highest >= MARGIN -> True
    diagnosis recommend: min((lowest + highest) // 2, first) -> (lowest + highest) // 2
    diagnosis recommend: first - _BELOW -> first
    diagnosis Measurement.ranked: -each.excess_error(0) -> each.excess_error(0)
tests/documented_interface/test_documented_members.py
    arguments rule_from_arguments: min(1.0, settings['initial_scale']) -> 1.0  -k floor
    tensorflow widened: tf.cast(tensor, tf.float32) -> tensor  -k float32_or_wider
    tensorflow unscaled: divided(gradient.values) -> gradient.values  -k indexed_slices
tests/conformance/test_page_matrix.py
    keras LossScaleOptimizer._differentiated: self.get_scaled_loss
        -> lambda loss: loss() if callable(loss) else loss  -k minimize_is_a_step
    keras_common KerasCommonOptimizer.get_updates: self._apply_unscaled(location, pairs, None)
        -> self._apply_unscaled(location, pairs[:0], None)  -k gradients_are_returned
    keras_common KerasCommonOptimizer.get_gradients: callable(loss) -> True
        -k gradients_of_a_tensor
tests/conformance/test_keras_files.py
    keras CounterOfPlain._restore_from_tensors: sum(restored_tensors.values()) > 0 -> False
        -k without_loss_scaling
    keras LossScaleOptimizer._trackable_children: saving.named_variables(self) -> {}
        -k brings_all
tests/conformance/test_replicas.py
    tensorflow all_replicas_finite: ... < 0.5 -> ... < 1.5  -k overflow_on_one_replica
    keras_common KerasCommonOptimizer.apply_gradients: all(asked) -> True  -k summed
tests/frameworks/keras/test_training.py
    tensorflow _can_keep_old_values: not getattr(part, 'use_ema', False) -> True  -k xla_function
    tensorflow _as_one_operation: len(tf.config.list_logical_devices()) > 1 -> False
        -k one_device
    keras_common without_overwritten: getattr(variable, 'overwrite_with_gradient', False)
        -> False  -k overwritten
tests/conformance/test_page_matrix.py -k iterations_count
    keras StepCounter.assign: ops.minimum(self._skipped.value, value) -> self._skipped.value
    keras StepCounter.assign: value - skipped -> value
tests/conformance/test_programs.py -k translated
    common do_not_convert: function.autograph_info__ = {} -> pass
    tensorflow translated: tf.executing_eagerly() -> True
tests/conformance/test_keras_files.py
    keras_common load: fits and np.array_equal(found, expected) -> fits  -k layers_are_loaded
    keras_common load: _show_inner(optimizer, fits) -> pass  -k layers_are_loaded
    keras_common save: _show_inner(optimizer, True) -> pass  -k layers_are_loaded
    keras_common load: tuple(variable.shape) == values[name].shape -> True  -k another_shape
    keras named_variables: name += '_' -> break  -k variables_of_one_name
    keras_common ScaleVariables.restored: self.rule.restored(...) -> ...  -k saved_scale
    keras_common on tf_keras ScaleVariables.restored: self.rule.restored(...) -> ...
        -k saved_scale
tests/conformance/test_what_rules_see.py
    keras_common on torch _counted: not parts.state.rule.checks_gradients
        -> isinstance(finite, bool)
tests/frameworks/jax/test_state_form.py
    jax _gated_equation: jax.lax.cond(finite, run, silent) -> run()  -k callbacks
    jax state_dtype: new.dtype if _kind(new) > _kind(old) else old.dtype -> old.dtype
    optax form_change: before.get(path) != after.get(path) -> False  -k cannot_be_kept
tests/frameworks/jax/test_skipping.py
    optax skipped_like: complex(-0.0, -0.0) if ... else -0.0 -> 0.0  -k momentum
    jax gated: set(wanted.values()) -> set(old_values)  -k adamw_clip
    jax _gated_branches: gated(branch, given, own, finite) -> gated(branch, given, {}, finite)
        -k MultiSteps
    optax without_shared_buffers: id(leaf) in known and isinstance(leaf, Array) -> False
        -k cocob
    optax _check_and_unscale: [jnp.where(...) for part in gradients] -> gradients  -k nothing_inside
tests/frameworks/jax/test_loops.py
    optax check_extra_args: callable(value) -> False  -k extra_arguments
    optax check_inner: nodes(state, *_SEARCHING) -> []  -k line_searches
tests/frameworks/jax/test_orders.py
    optax state_in: len(found) > 1 -> False  -k not_the_state
tests/frameworks/jax/test_platforms.py
    jax _extremes: ('int', 'uint') -> ('int', 'int')  -k where_xla
    jax _all_finite: jnp.where(finite, numbers, jnp.zeros_like(numbers)) -> numbers  -k checkify
    jax gated: variable.aval.shape -> True  -k checkify
    optax _check_and_unscale: [jnp.where(...) for part in gradients] -> gradients  -k checkify
    jax may_be_divided: has_sharding(array) -> False  -k several_devices
    jax _magnitude: np.iinfo(bits).max >> 1 -> np.iinfo(bits).max  -k that_of_a_cpu
    jax nonfinite_by_row: nans << 16 -> nans  -k in_each_gradient
    jax update: jax.lax.platform_dependent(...) -> branched()  -k branch
tests/frameworks/jax/test_platforms.py
    jax _branches: equation.params.get('branches_platforms') -> False  -k another_platform
tests/frameworks/jax/test_memory.py
    jax _gated_equation: called is not None -> False
tests/frameworks/jax/test_devices.py
    optax _all_devices_finite: jax.lax.pmin(...) > 0 -> finite  -k counts_of_all_devices
    optax _all_devices_finite: varying_axes(finite) - varying_axes(scale)
        -> varying_axes(scale) - varying_axes(finite)
        -k would_part
tests/frameworks/jax/test_leaves.py
    optax _untraced: np.zeros(...) -> leaf  -k masked
    optax LossScaled.update: gating.has_elements(gradients) -> True  -k without_a_gradient
    optax _narrowed: all(map(gating.is_narrow, here)) -> True  -k rounded_last
    optax LossScaled.init: self._widened(params) -> params
        -k float16 or narrow or half or dtype
tests/frameworks/jax/test_master_weights.py
    optax _followed: jnp.where(_is_rounded(param, master), master, param.astype(jnp.float32))
        -> master
        -k written
    optax _has_master: param.dtype in (jnp.float16, jnp.bfloat16) -> True  -k quantized
    optax _change: gating.is_narrow(param) and gating.is_gradient(update) -> False  -k quantized
    optax _difference: jnp.where(bits == _bits(param), -0.0, difference) -> difference  -k written
    optax _rounded: jnp.where(...) -> bits  -k whatever_the_bits
    optax LossScaled._widened: self.has_masters -> False  -k random_program
    optax trains_float16: all(map(shows_one, masked)) -> True  -k named_once
tests/frameworks/jax/test_monitor.py
    optax check_state: rows != wanted -> False  -k cannot_be_tracked
    optax _name: not is_key -> True  -k put_down_to_its_own
    optax Monitor.step: watched.steps_skipped is self._watched.steps_skipped -> False  -k is_shown
tests/frameworks/jax/test_diagnose.py
    diagnosis on jax JaxGradientFunction._owned_ones: path in self._owned -> True
tests/frameworks/jax/test_wrong_calls.py
    optax is_array: isinstance(...) -> True  -k functions_in_it
    optax _check_single: jnp.ndim(value) -> False  -k state_of_several
tests/frameworks/jax/test_leaves.py tests/frameworks/jax/test_loops.py
    optax _check_and_unscale: finite & usable -> finite
tests/frameworks/torch/test_steps.py
    torch makes_state: any(p.grad is not None for p in lacking) -> False
        -k on_a_skip
    torch attributes: vars(optimizer).pop -> vars(optimizer).setdefault  -k raises
tests/frameworks/torch/test_master_weights.py
    torch MasterWeights._check_is_newest: not all(...) -> False  -k older_one_refuses
    torch MasterWeights.check_can_step: not NARROW.issuperset(...) -> False  -k float32_in_between
    torch _where_rounded: torch.where(...) -> parameter  -k float32_now
tests/frameworks/torch/test_averages.py
    torch HeldBack._as_averaged: masters.get(now, now) -> now  -k of_the_masters
    torch _wide: masters.get(tensor, tensor) -> tensor  -k loads_the_masters
tests/frameworks/torch/test_monitor.py
    torch OverflowTracker._track: number == self.last_step == self._skip[0] -> False
        -k share_a_scaler
tests/frameworks/torch/test_trainers.py
    torch wrapper_in: isinstance(...) -> False  -k accelerate_prepares
tests/frameworks/torch/test_backward.py
    torch step_with_closure: torch.enable_grad() -> torch.no_grad()  -k evaluated_once
tests/frameworks/torch/test_every_optimizer.py
    torch GradScaler.step: self._share_overflows(...) -> pass  -k unscaled_together
tests/frameworks/torch/test_scaled_gradients.py
    torch put_on: record.settle() -> pass  -k all_sequences_of
    torch put_on: info.first_gradient() is not None -> False  -k all_sequences_of
    torch GradientRecord.receive: self.decision, self.is_cleared = (None, False) -> pass
        -k wrong_once
    torch GradientRecord._unscale: info.without(divided) -> info  -k random_programs
    torch GradientRecord.note_zero_grad: record.settle() -> pass  -k random_programs
    torch sharing: rest += owning(record.info.ids & _shared) -> pass  -k random_programs
    torch GradientRecord._check_no_new_gradients: id(p) not in _owners -> False  -k next_call
    torch GradientRecord.__del__: _divide(info, multiplier, checks=False) -> pass
        -k random_programs
    torch GradientRecord.__del__: r is not self -> False  -k random_programs
    torch GradientRecord.check_can_be_saved: r.is_scaled and ... -> False  -k random_programs
tests/frameworks/torch/test_several_wrappers.py
    torch GradientRecord.receive: self.has_own_loss |= own -> self.has_own_loss = own
        -k left_out_counts
    torch GradientRecord.settle: _multiplied_by(multiplier) -> [self]  -k the_scale_falls
    torch GradientRecord._fresh: overflow * (...) -> overflow  -k critics_loss
    torch Engine.decision_if_left_out: not record.has_own_loss -> False  -k no_step
    torch GradientRecord.check_can_receive: -1 not in (task, running.task) -> True
        -k within_the_backward
    torch GradientRecord._unscale: checks and rest is not info -> False  -k left_behind
    torch GradientRecord._take: record.settle() -> pass  -k different_scales
    torch GradientRecord.account_for_last_step: key == [id(last), last._version] -> True
        -k the_scale_falls
    torch GradientRecord.account_for_last_step: leave_out() -> pass  -k left_out
    torch GradientRecord.__del__: multiplier.divided |= info.ids -> pass  -k same_time
    torch GradientRecord.check_no_pass: self.pass_now() is not None -> False  -k in_a_backward_pass
    torch LossScaleOptimizer.zero_grad: record.check_can_clear() -> pass  -k in_a_backward_pass
    torch GradientRecord.pass_now: found is not None and found.runs -> False  -k before_the_pass
    torch GradientRecord.settle: any(...) -> False  -k earlier_pass
    torch GradientRecord._adopt_unseen_loss: now.number != scale.number -> False  -k unseen
tests/frameworks/torch/test_state.py
    torch GradientRecord.check_can_be_saved: [self, *others] -> [self]  -k right_after_a_group
    torch has_numbers: any(...) -> False  -k taken_over
    torch take_numbers: group.pop(name, None) -> pass  -k taken_over
    torch LossScaleOptimizer._check_load: not self._record.no_loss_scaled() -> False
        -k taken_over
    torch checked_scaler_state: 'growth_tracker' in saved -> False  -k cannot_be_loaded
tests/frameworks/torch/test_beside_torch.py
    torch GradScaler._move: super().update() -> pass  -k four_calls
    torch GradScaler._step_that_skips_by_itself: entry['stage'] = OptState.STEPPED; return result
        -> return result  -k four_calls
tests/frameworks/torch/test_grad_scaler.py
    torch unscale_and_check_: recheck -> False  -k d20
    torch GradScaler._move: scale.clamp_(...) -> pass  -k put_back
    torch GradScaler._move: scale.nan_to_num_(...) -> pass  -k put_back
    torch GradScaler._step_that_skips_by_itself: fused.attributes(...)
        -> fused.attributes([optimizer], divisor, None)  -k d25
tests/frameworks/torch/test_clipping.py
    torch coefficient: 1.0 -> 2.0
tests/frameworks/torch/test_buffers.py
    torch BufferGuard._step_over: now.abs() < math.inf -> now == now  -k rule_says
    torch BufferGuard._step_over: repaired if has_several else now -> now  -k rule_says
    torch BufferGuard._step_over: copy if is_own else repaired -> copy  -k rule_says
    torch BufferGuard._step_over: torch.where(flag, copy, now) -> copy  -k rule_says
    torch BufferGuard._look: name in passing -> False  -k rule_says
    torch BufferGuard._look: None if is_lazy(each) else each -> each  -k lazy
    torch GradScaler._notify: len(self._records) > 1 -> False  -k rule_says
tests/frameworks/torch/test_guard.py
    torch GuardedScheduler._holds: now[0] > made and now[1] == applied -> False
    torch GuardedScheduler._holds: now >= self._seen -> True
tests/frameworks/torch/test_processes.py
    torch Engine._overflow: not self.record.has_own_loss -> False  -k were_cleared
    torch GradScaler._unscale_grads_: overflow.item() >= 0 -> False
        -k orders_of_scalers
    torch GradScaler._share_overflows: any(len(own) < len(union) for own in groups) -> False
        -k groups_of_all
    torch grad_norm: info.copies(gradient) -> 1  -k clipped
    torch _groups_along: placement.is_replicate() -> not placement.is_shard()
        -k spread_over
tests/frameworks/torch/test_explain.py
    explain on torch explain: found.cause is Cause.UNKNOWN -> False  -k cannot_be_used
    explain on torch _watching: _is_torchs(h[1]) -> True  -k put_back
    explain on torch as_it_was: parameter.grad = gradient -> pass  -k put_back
    explain on torch _is_small: abs(inputs) < NEAR -> abs(inputs) >= 0  -k advised
    explain on torch Evaluation._failure: any(each.size for each in inputs) -> True  -k advised
    explain on torch Evaluation._failure: call.in_backward and of_them -> False  -k advised
    explain on torch _why_not: isinstance(module, torch.jit.ScriptModule) -> False  -k scripted
tests/frameworks/torch/test_wrong_calls.py
    torch check_needs_no_closure: name.endswith(_IN_STEP) -> False  -k mistakes
    torch step_with_closure: _is_sam(part) -> False  -k mistakes
    torch step_with_closure: 'closure' in str(error) -> False  -k mistakes
    torch InnerAttributes.__setattr__: self._check_no_setting(name) -> pass  -k mistakes
    torch InnerAttributes.__getattr__: name in _INSTEAD -> False  -k mistakes
    torch _dense: not gradient.is_coalesced() -> False  -k one_index
    torch collect: any(map(Tensor.is_neg, grads)) -> False  -k share_memory
    torch LossScaleOptimizer._unscale_: if decision.empty: return decision
        -> pass  -k before_there_are_gradients
lossscale-migration/tests/test_checkpoints.py -k what_the_rule_has
    migration KerasRestorePlan._set_scale_values: field in named -> True
lossscale-migration/tests/test_migrate.py -k killed_command
    migration on tensorflow _remove_abandoned: _locked(owner) -> True
    migration on tensorflow _remove_abandoned: owner.read(2**16) == _mark(new) -> True
    migration on tensorflow _remove_abandoned: shutil.rmtree(folder) -> pass
lossscale-migration/tests/test_untrusted_files.py
    migration on tensorflow _shown: _UNSEEN.sub(...) -> str(value)
        -k hostile_settings
    migration on tensorflow check_size: expanded > _ANY_ZIP + _LARGEST_ZIP_RATIO * held -> False
        -k small_zip
    migration on tensorflow parsed: range(_DEEPEST) -> range(10**6)  -k nested_deep
tests/monitoring/test_recorder.py
    monitoring on tensorflow Recorder._add: return record -> return None  -k once
    monitoring on tensorflow Recorder.open: open(path, "xb") -> open(path, "ab")  -k exists
    monitoring on tensorflow is_lowest: 1 + 2.0 ** -20 -> 1.0  -k rounds
lossscale-migration/tests/test_models.py
    migration _described_optimizer: begins_as_keras_own(arrays) -> False  -k arrives and SGD
    migration _described_optimizer: begins_as_keras_own(arrays) -> len(arrays) > 4
        -k is_not_taken
    migration ModelFile.of_keras_own: len(self.arrays) > _UNBUILT_KERAS_OWN -> True
        -k before_its_first
    migration load_arrays: len(_KERAS_OWN) if begins_as_keras_own(arrays) else 0 -> 0
        -k arrives and SGD
"""

_MUTANT = re.compile(
    r"(?P<part>[\w.]+)(?: on (?P<backend>\w+))? (?P<function>[\w.]+): (?P<old>.+) -> (?P<new>.+?)"
    r"(?: +-k (?P<words>.+))?"
)


def _read(table: str) -> Iterator[Mutant]:
    selection: list[str] = []
    for line in re.sub(r"\n {8}", " ", table).strip("\n").split("\n"):
        if not line.startswith(" "):
            selection = shlex.split(line)
            continue
        found = _MUTANT.fullmatch(line.strip())
        assert found, f"`{line}` is no mutant."
        fields = found.groupdict()
        words, backend = fields.pop("words"), fields.pop("backend")
        tests = (*selection, *(("-k", words) if words else ()))
        yield Mutant(
            **fields,
            backend=backend or BACKEND_OF_PART.get(fields["part"], TENSORFLOW),
            tests=tests,
        )


ALL = list(_read(KILLED_BY))
