"""Wrong versions of the sources, and the tests that have to notice each.

`make mutants` runs them (tests/mutants/run.py).
"""

from __future__ import annotations

import dataclasses
import functools
import shlex

from mutants.edits import Edit

# The backends of the process in which a mutant's tests run.
TENSORFLOW, TF_KERAS, JAX, TORCH = "tensorflow", "tf_keras", "jax", "torch"


@dataclasses.dataclass(frozen=True)
class Mutant(Edit):
    """One wrong edit.

    Attributes:
        words: Which of the tests must fail, as `-k` of pytest has it; all may if it is empty.
        backend: Which process runs them.
        selection: The tests, as they are named on the command line of pytest.
    """

    words: str = ""
    backend: str = TENSORFLOW
    selection: str = ""

    @property
    def tests(self) -> tuple[str, ...]:
        """Arguments of pytest that select the tests which must fail."""
        return (*shlex.split(self.selection), *(("-k", self.words) if self.words else ()))


_rules = functools.partial(Mutant, "rules")
_update = functools.partial(_rules, "DynamicScale.update")
_common = functools.partial(Mutant, "common")
_keras = functools.partial(Mutant, "keras")
_keras_common = functools.partial(Mutant, "keras_common")
_tensorflow = functools.partial(Mutant, "tensorflow")
_tf_keras = functools.partial(Mutant, "tf_keras", backend=TF_KERAS)
_jax = functools.partial(Mutant, "jax", backend=JAX)
_optax = functools.partial(Mutant, "optax", backend=JAX)
_torch = functools.partial(Mutant, "torch", backend=TORCH)

_STEP = "KerasLossScaleOptimizer._step"
_UPDATE = "KerasLossScaleOptimizer._update_scale"
_TFK_UPDATE = "TFKerasCommonOptimizer._update_scale"

# Tests, and the mutants that they kill: function, old, new, and words if not all of these tests
# are needed.
KILLED_BY = {
    "tests/core/test_rules.py": [
        _update("xp.where(lowered < self.ceiling, lowered, self.ceiling)", "lowered"),
        _rules(
            "DynamicScale.restored", "math.isfinite(scale) and scale > 0", "math.isfinite(scale)"
        ),
        _rules(
            "DynamicScale.restored",
            "min(max(scale, self.min_scale), self.ceiling)",
            "max(scale, self.min_scale)",
        ),
        _rules("FixedScale.loss_scale", "self.scale", "state.scale"),
    ],
    "tests/core/test_errors.py": [
        _common(
            "unknown_setting", "UnknownSettingError(message)", "UnknownSettingError(message())"
        ),
    ],
    "tests/conformance/test_promises.py -k tensorflow-eager": [
        _update("counted < self.growth_interval", "counted <= self.growth_interval"),
        _update("scale * self.backoff_factor", "scale / self.growth_factor"),
        _update("waiting | (grown > self.ceiling)", "waiting"),
        _update("grown > self.ceiling", "grown >= self.ceiling"),
        _update("xp.where(seen.finite, ..., 0)", "xp.where(seen.finite, ..., counted)"),
        _update("xp.where(seen.finite, ..., lowered)", "xp.where(seen.finite, ..., scale)"),
        _update("xp.where(lowered > self.min_scale, lowered, self.min_scale)", "lowered"),
        _rules("FixedScale.checks_gradients", "self.skip_nonfinite", "True"),
        _keras("Backend.check", "not rule.checks_gradients", "False"),
        _keras_common("ValueStore.save_own_variables", "store[name] = value", "pass"),
        _keras(
            "save",
            "optimizer.inner_optimizer.save_own_variables(store)",
            "pass",
        ),
    ],
    "tests/conformance/test_promises.py -k tensorflow-function": [
        _tensorflow("apply_or_skip", "lambda: _finished(update_scale(...))", "_finished"),
        _tensorflow(
            "apply_or_skip",
            "_finished(apply(gradients, divisor), update_scale(...))",
            "_finished(apply(gradients, divisor))",
        ),
        _keras(_UPDATE, "self._last_step_skipped.assign(skipped)", "pass"),
        _keras(_UPDATE, "self._steps_skipped.assign_add(1)", "pass"),
        _keras(_UPDATE, "self._iterations.follow()", "pass"),
    ],
    "tests/conformance/test_promises.py -k tensorflow-xla": [
        _tensorflow(
            "apply_or_skip",
            "_keeping_old_values(kept(), finite)",
            "_keeping_old_values(kept(), tf.constant(True))",
        ),
        _tensorflow(
            "_choosing_assignments",
            "variable.read_value() - delta",
            "variable.read_value() + delta",
        ),
        _tensorflow("_choosing_assignments", "tf.where(finite, value, old)", "value"),
        _tensorflow(
            "_choosing_assignments",
            "{'assign': assign, 'assign_add': assign_add, 'assign_sub': assign_sub}",
            "{'assign': assign, 'assign_add': assign_add}",
        ),
        _keras(_UPDATE, "self._steps_skipped.assign_add(ops.cast(...))", "pass"),
    ],
    "tests/conformance/test_promises.py -k tf_keras-new-function": [
        _tf_keras("TFKerasCommonOptimizer._step", "... if rule.checks_gradients else True", "..."),
        _tf_keras(_TFK_UPDATE, "results.append(self._steps_skipped.assign_add(...))", "pass"),
        _tf_keras(_TFK_UPDATE, "[self._state.update(seen)]", "[]"),
    ],
    "tests/conformance/test_promises.py -k 'tf_keras-new-eager and loaded'": [
        _tf_keras(
            "LossScaleNode._restore_from_tensors", "self._extras[name].assign(...)", "tf.no_op()"
        ),
    ],
    "tests/conformance/test_promises.py -k tf_keras-legacy-eager": [
        _tf_keras(_TFK_UPDATE, "results.append(self._last_step_skipped.assign(...))", "pass"),
    ],
    "tests/conformance/test_promises.py -k jax-eager": [
        _keras("JaxBackend.apply_or_skip", "bool(seen.finite)", "True", backend=JAX),
    ],
    "tests/conformance/test_promises.py -k jax-jit": [
        _jax("scaled", "widened(loss)", "jnp.asarray(loss)"),
        _keras(
            "JaxBackend.apply_or_skip",
            "(*inner.variables, *inner._trainable_variables, *step.variables)",
            "(*inner.variables, *inner._trainable_variables[1:], *step.variables[1:])",
            backend=JAX,
        ),
    ],
    "tests/conformance/test_promises.py": [
        _keras("TorchBackend.check", "not state.scale >= 1.0", "False", backend=TORCH),
        _keras("TorchBackend.check", "found_inf + ...", "found_inf", backend=TORCH),
        _keras("TorchBackend.update_on_host", "skipped.add_(1)", "pass", backend=TORCH),
    ],
    "tests/conformance/test_promises.py -k torch-native-host": [
        _torch("Judging._judge_ordinary", "_BAD if factors.found.item() else _GOOD", "_GOOD"),
        _torch("Stepping._take_step", "... if quickly.applied else None", "..."),
        _torch("Judging._found", "scales.scale < 1.0", "False"),
        _torch("Saving.load_state_dict", "self._restore_numbers(checked)", "pass"),
        _torch("HostScales.move", "scale != self.scale", "False"),
    ],
    "tests/conformance/test_promises.py -k torch-native-device": [
        _torch("call", "inner.found_inf = found", "pass"),
    ],
    "tests/conformance/test_promises.py -k 'optax-native-jit and makes_infinite'": [
        _optax("may_be_below_one", "lowest is None or lowest < 1.0", "False"),
    ],
    "tests/conformance/test_fast_path.py": [
        _tensorflow("all_finite", "ask_again(...)", "tf.constant(False)", "function and momentum"),
        _tensorflow("_sums", "tf.reduce_all", "tf.reduce_any", "function and momentum"),
        _tensorflow("_all_true", "tf.reduce_all", "tf.reduce_any", "function and momentum"),
        _tensorflow("_in_turn", "tf.constant(False)", "tf.constant(True)", "xla and momentum"),
        _jax("_or_in_turn", "jnp.asarray(False)", "jnp.asarray(True)", "jit and momentum"),
        _jax("_sums", "(...).all()", "(...).any()", "jit and momentum"),
        _jax("_or_in_turn", "jax.lax.cond(fits, ..., ...)", "fits", "jit and momentum"),
        _jax("_all_true", "jnp.all(jnp.stack(verdicts))", "verdicts[0]", "jit and momentum"),
    ],
    "tests/conformance/test_what_rules_see.py -k for_a_rule_that_asks": [
        _optax("_move", "rule.needs != Needs()", "True"),
        _keras(_STEP, "rule.needs != Needs()", "True", backend=TORCH),
    ],
    "tests/conformance/test_own_steps.py": [
        _keras_common(
            "Recorder.keep",
            "1.0 if scaled else 1.0 / self.scale",
            "1.0",
            "gives_to_its_optimizers",
            TORCH,
        ),
        _keras_common(
            "StandIn._take",
            "self._recorder.forgotten[self._name] = verb",
            "pass",
            "forgets_to_scale",
            TORCH,
        ),
        _keras("_put_back", "tensor.data.copy_(value)", "pass", "left_as_it_was", TORCH),
        Mutant(
            "keras.backends.torch_own_steps",
            "_scaling_derivatives",
            "not all(id(each) in trained for each in _listed(inputs))",
            "False",
            "within_the_loss",
            TORCH,
        ),
        _tensorflow("_put_back", "variable.assign(value)", "pass", "left_as_it_was and Gan"),
        Mutant(
            "keras.backends.jax_own_steps",
            "_scaling_derivatives",
            "recorder.helped += 1",
            "pass",
            "forgets_to_scale and Contrastive",
            JAX,
        ),
    ],
    "tests/backends/test_finite.py": [
        _tensorflow("all_finite", "unscaled(parts, scale, powers_of_two)", "parts"),
        _tensorflow("all_finite", "tf.logical_and(fits, ...)", "fits"),
        _torch("all_finite", "fits if bool(fits) else _each_finite(parts)", "fits"),
    ],
    "tests/backends/test_torch.py": [
        _keras("_copies", "torch.empty_like(gradient)", "gradient", backend=TORCH),
    ],
    "tests/backends/test_handover.py": [
        _common(
            "ScaledGradientTracker.gradients_are_scaled",
            "self._are_scaled_by_record(...)",
            "False",
        ),
        _common("_ReplicaRecord.count", "times + 1", "times"),
    ],
    "tests/backends/test_files.py": [
        _keras("load_inner", "restore_scale(optimizer, own)", "pass", "keras_own_class"),
        _keras_common(
            "KerasCommonOptimizer",
            "{'inner_optimizer', 'get_slot_names'}",
            "{'get_slot_names'}",
            "plain_optimizer",
        ),
        _keras(
            "load_inner",
            "optimizer._iterations.follow()",
            "pass",
            "plain_optimizer or own_class",
        ),
    ],
    "tests/documents/test_documented_members.py": [
        Mutant(
            "arguments",
            "rule_from_arguments",
            "min(1.0, settings['initial_scale'])",
            "1.0",
            "floor",
        ),
        _tensorflow("widened", "tf.cast(tensor, tf.float32)", "tensor", "float32_or_wider"),
        _tensorflow(
            "unscaled",
            "gradient / factor",
            "gradient * tf.math.reciprocal(factor)",
            "divides_exactly",
        ),
        _tensorflow("unscaled", "divided(gradient.values)", "gradient.values", "indexed_slices"),
        _keras(
            "KerasLossScaleOptimizer._differentiated",
            "self.get_scaled_loss",
            "lambda loss: loss() if callable(loss) else loss",
            "minimize",
        ),
        _keras_common(
            "KerasCommonOptimizer.get_updates",
            "self._apply_unscaled(location, pairs, None)",
            "self._apply_unscaled(location, pairs[:0], None)",
            "get_updates",
        ),
        _keras_common(
            "KerasCommonOptimizer.get_gradients", "callable(loss)", "True", "works_in_a_graph"
        ),
        _keras(
            "set_weights",
            "targets = all_variables",
            "targets = weights",
            "set_weights",
        ),
    ],
    "tests/frameworks/keras/test_distribution.py": [
        _tensorflow("all_replicas_finite", "... < 0.5", "... < 1.5", "overflow_on_one_replica"),
        _keras_common(
            "KerasCommonOptimizer.apply_gradients",
            "experimental_aggregate_gradients and not skip_gradients_aggregation",
            "True",
            "summed",
        ),
    ],
    "tests/frameworks/keras/test_training.py": [
        _tensorflow(
            "can_keep_old_values", "not getattr(part, 'use_ema', False)", "True", "xla_function"
        ),
        _keras(
            "scaled_by_loss",
            "getattr(variable, 'overwrite_with_gradient', False)",
            "False",
            "overwritten",
        ),
    ],
    "tests/frameworks/keras/test_handover.py": [
        _common(
            "_is_in_another_graph",
            "graph is None or graph is not location.graph",
            "False",
            "wherever_they_run",
        ),
    ],
    "tests/frameworks/keras/test_settings.py -k 'iterations or counter'": [
        _keras("StepCounter.assign", "ops.minimum(self._skipped, value)", "self._skipped + 0"),
        _keras("StepCounter.assign", "value - skipped", "value"),
    ],
    "tests/frameworks/keras/test_programs.py -k translated": [
        _common("as_written", "function.autograph_info__ = {}", "pass"),
        _tensorflow("translated", "tf.executing_eagerly()", "True"),
    ],
    "tests/frameworks/keras/test_persistence.py": [
        _keras("KerasScaleVariables.restore", "self.rule.restored(state)", "state", "saved_scale"),
    ],
    "tests/frameworks/tf_keras/test_files.py": [
        _tf_keras("_make_valid", "state.rule.restored(...)", "...", "outside_the_limits"),
    ],
    "tests/conformance/test_what_rules_see.py": [
        _keras(
            _UPDATE,
            "self._rule.checks_gradients",
            "not isinstance(seen.finite, bool)",
            backend=TORCH,
        ),
    ],
    "tests/frameworks/jax/test_state_form.py": [
        _jax("gated.only_if_applied", "jax.lax.cond(finite, run, silent)", "run()", "callbacks"),
        _jax("lasting_dtype", "new.dtype if _kind(new) > _kind(old) else old.dtype", "old.dtype"),
        _optax("_old_values", "path not in after", "False", "cannot_be_kept"),
        _optax("_untraced", "np.zeros(...)", "leaf", "float0"),
    ],
    "tests/frameworks/jax/test_skipping.py": [
        _optax("skipped_like", "complex(-0.0, -0.0) if ... else -0.0", "0.0", "momentum"),
        _optax("of_its_own", "id(leaf) in known and isinstance(leaf, jax.Array)", "False", "lbfgs"),
        _optax("_judge", "[jnp.where(...) for part in divided]", "divided", "nothing_inside"),
    ],
    "tests/frameworks/jax/test_loops.py": [
        _optax("run", "finite = finite & ...", "pass", "of_its_own"),
    ],
    "tests/frameworks/jax/test_jaxprs.py": [
        _jax("evaluate", "not chosen_already", "False", "kept_old"),
    ],
    "tests/frameworks/jax/test_memory.py": [
        _jax("evaluate", "called is not None", "False"),
    ],
    "tests/frameworks/jax/test_devices.py": [
        _optax("agreed", "jax.lax.pmin(...) > 0", "finite", "anywhere"),
        _optax(
            "agreed",
            "varying(finite) - varying(scale)",
            "varying(scale) - varying(finite)",
            "would_part",
        ),
    ],
    "tests/frameworks/jax/test_leaves.py": [
        _optax(
            "LossScaled.update", "judging.has_elements(gradients)", "True", "without_a_gradient"
        ),
        _optax(
            "_counted",
            "jnp.where(count < most, ..., most)",
            "jnp.where(count < most, ..., count + 1)",
            "counter",
        ),
        _optax(
            "LossScaled.init",
            "jax.tree.map(_widened, params)",
            "params",
            "float16 or narrow or half or dtype",
        ),
    ],
    "tests/frameworks/jax/test_conversions.py": [
        _optax("from_flax", "int(...) + 1", "int(...)", "run_of_flax_goes_on"),
        _optax("from_jmp", "{'good_steps': good_steps}", "{}", "run_of_jmp_goes_on"),
    ],
    "tests/frameworks/jax/test_monitor.py": [
        _optax("_Noted.update", "unscaled(...)", "by_row", "exponents"),
        _optax(
            "Monitor.step", "self._scale = jnp.copy(shown.scale)", "pass", "recorded_with_its_scale"
        ),
        _common(
            "LoopMonitor._took", "self._unread = read, loss", "pass", "sampled_steps_count", JAX
        ),
        _common(
            "LoopMonitor._fidelity",
            "not self._has_probed or ...",
            "True",
            "fidelity_is_measured",
            JAX,
        ),
    ],
    "tests/frameworks/jax/test_diagnose.py": [
        _optax("_evaluated", "... + next(probes)", "... * 2 + next(probes)", "has_named"),
    ],
    "tests/frameworks/jax/test_mistakes.py": [
        _optax("is_array", "isinstance(...)", "True", "functions_in_it"),
        _optax("_single_scale", "scale.ndim", "False", "state_of_several"),
        _optax("value_and_grad", "isinstance(found[0][1], _Result)", "True", "returns_no_value"),
    ],
    "tests/frameworks/jax/test_leaves.py tests/frameworks/jax/test_loops.py": [
        _optax("_judge", "finite & scale_state.is_usable(rule, scale)", "finite"),
    ],
    "tests/frameworks/torch/test_steps.py": [
        _torch(
            "Judging._can_be_handed_a_verdict",
            "return layout.started >= stepped",
            "return True",
            "garbage or joins_late",
        ),
        _torch("call", "inner.__dict__.pop", "inner.__dict__.setdefault", "raises"),
        _torch(
            "Stepping._are_scaled",
            "any(as_they_were) and not all(as_they_were)",
            "False",
            "gradients_of_some",
        ),
    ],
    "tests/frameworks/torch/test_closures.py": [
        _torch("Closures._evaluate", "scales.move(seen)", "pass"),
    ],
    "tests/frameworks/torch/test_clipping.py": [
        _torch("coefficient", "1.0", "2.0"),
    ],
    "tests/frameworks/torch/test_guard.py": [
        _torch("Guarded.step", "now.made > before.made and now.applied == before.applied", "False"),
        _torch("_since", "start is before.start", "True"),
    ],
    "tests/frameworks/torch/test_grad_scaler_defects.py": [
        _torch("_unscale_", "look_again", "False", "d20"),
        _torch(
            "GradScaler.step",
            "not self._scaled_since_update and is_dummy_step(optimizer)",
            "False",
            "only_makes_state",
        ),
        _torch("handed_over", "del optimizer.grad_scale, optimizer.found_inf", "pass", "d25"),
    ],
    "tests/frameworks/torch/test_processes.py": [
        _torch(
            "GradScaler._agreed",
            "{} if found.item() < 0 else {found.device: found}",
            "{}",
            "given_group",
        ),
        _torch("seen_by_all", "there / copies", "there", "on_a_mesh"),
        _torch("_over_processes", "layout.copies(gradient)", "1", "the_norm"),
        _torch("_over_processes", "-1.0", "0.0", "the_norm"),
    ],
    "tests/frameworks/torch/test_grad_scaler.py": [
        _torch("ScaleOfScaler._read", "left[1] == scale._version", "True", "others_write"),
    ],
    "tests/frameworks/torch/test_ranks.py": [
        _torch("_groups_of_layout", "not placement.is_replicate()", "placement.is_shard()"),
    ],
    "tests/frameworks/torch/test_mistakes.py": [
        _torch("_numbers", "not gradient.is_coalesced()", "False", "one_index"),
        _torch("Stepping._divide_in_place", "verdict.empty", "False", "before_there_are_gradients"),
    ],
    "tests/migration/test_own_rules.py": [
        Mutant("migration", "KerasTarget.set_scale_values", "field in named", "True"),
    ],
}

ALL = [
    dataclasses.replace(mutant, selection=selection)
    for selection, mutants in KILLED_BY.items()
    for mutant in mutants
]
