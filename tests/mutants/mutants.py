"""Wrong versions of the sources, and the tests that have to notice each.

A mutant is one edit: a text that stands in a file exactly once, and what stands there instead.
`make mutants` runs them (tests/mutants/run.py).
"""

from __future__ import annotations

import dataclasses

# The backends of the process in which a mutant's tests run.
TENSORFLOW, TF_KERAS, JAX, TORCH = "tensorflow", "tf_keras", "jax", "torch"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One wrong edit.

    Attributes:
        file: Path below src/lossscale.
        old: Text that stands there once.
        new: What replaces it.
        tests: Arguments of pytest that select the tests which must fail.
        backend: Which process runs them.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    backend: str = TENSORFLOW


_RULE = "rules.py"
_ARRAYS = "tensorflow/arrays.py"
_REPLICAS = "tensorflow/replicas.py"
_STEP_TENSORFLOW = "tensorflow/step.py"
_GATE = "tensorflow/gate.py"
_FINITE = "tensorflow/finite.py"
_FINITE_JAX = "jax/finite.py"
_STEP = "keras/step.py"
_LEDGER = "keras/state.py"
_BACKEND_JAX = "keras/backends/jax.py"
_BACKEND_TORCH = "keras/backends/torch.py"
_HANDOVER = "common/handover.py"
_VERBS = "keras/verbs.py"
_STEP_TF_KERAS = "tf_keras/training.py"
_SAVING = "keras/persistence.py"

PROMISES = "tests/conformance/test_promises.py"
DOCUMENTS = "tests/documents/test_documented_members.py"
FILES = "tests/frameworks/keras/test_persistence.py"
TRAINING = "tests/frameworks/keras/test_training.py"
REPLICAS = "tests/frameworks/keras/test_distribution.py"

_RULES = ("tests/core/test_rules.py",)
_EAGER = (PROMISES, "-k", "tensorflow-eager")
_FUNCTION = (PROMISES, "-k", "tensorflow-function")
_XLA = (PROMISES, "-k", "tensorflow-xla")
_JAX_EAGER = (PROMISES, "-k", "jax-eager")
_JAX_JIT = (PROMISES, "-k", "jax-jit")
_TORCH = (PROMISES,)
_TF_KERAS = (PROMISES, "-k", "tf_keras-new-function")
_TF_KERAS_LEGACY = (PROMISES, "-k", "tf_keras-legacy-eager")
_COUNTERS = (
    "tests/frameworks/keras/test_keras_defects.py",
    "tests/frameworks/keras/test_settings.py",
    "-k",
    "iterations or counter or number_of_steps",
)


def _fast(shell: str) -> tuple[str, ...]:
    return ("tests/conformance/test_fast_path.py", "-k", f"{shell} and momentum")


def _documented(words: str) -> tuple[str, ...]:
    return (DOCUMENTS, "-k", words)


RULES = [
    Mutant(_RULE, "counted < self.growth_interval", "counted <= self.growth_interval", _EAGER),
    Mutant(_RULE, "scale * self.backoff_factor\n", "scale / self.growth_factor\n", _EAGER),
    Mutant(_RULE, "waiting | (grown > self.ceiling)", "waiting", _EAGER),
    Mutant(_RULE, "waiting | (grown >", "waiting | (grown >=", _EAGER),
    Mutant(
        _RULE,
        "xp.where(waiting, counted, 0), 0)",
        "xp.where(waiting, counted, 0), counted)",
        _EAGER,
    ),
    Mutant(
        _RULE, "xp.where(seen.finite, kept, lowered)", "xp.where(seen.finite, kept, scale)", _EAGER
    ),
    Mutant(_RULE, "xp.where(lowered > self.min_scale, lowered, self.min_scale)", "lowered", _EAGER),
    Mutant(_RULE, "xp.where(lowered < self.ceiling, lowered, self.ceiling)", "lowered", _RULES),
    Mutant(_RULE, "math.isfinite(scale) and scale > 0", "math.isfinite(scale)", _RULES),
    Mutant(
        _RULE, "min(max(scale, self.min_scale), self.ceiling)", "max(scale, self.min_scale)", _RULES
    ),
    Mutant(
        _RULE,
        "override the number in the code.\n        return self.scale\n",
        "override the number in the code.\n        return state.scale\n",
        _RULES,
    ),
    Mutant(_RULE, "        return self.skip_nonfinite\n", "        return True\n", _EAGER),
    Mutant(
        "arguments.py",
        'min(1.0, settings["initial_scale"])',
        "1.0",
        _documented("floor"),
    ),
]

ARRAYS = [
    Mutant(
        _ARRAYS, "else tf.cast(tensor, tf.float32)", "else tensor", _documented("float32_or_wider")
    ),
    Mutant(
        _ARRAYS,
        "else gradient / factor",
        "else gradient * tf.math.reciprocal(factor)",
        _documented("divides_exactly"),
    ),
    Mutant(_ARRAYS, "divided(gradient.values)", "gradient.values", _documented("indexed_slices")),
    Mutant(
        _FINITE,
        "unscaled(parts, scale, powers_of_two)",
        "parts",
        ("tests/backends/test_finite.py",),
    ),
    Mutant(
        _REPLICAS,
        "tf.distribute.ReduceOp.SUM, overflowed) < 0.5",
        "tf.distribute.ReduceOp.SUM, overflowed) < 1.5",
        (REPLICAS, "-k", "overflow_on_one_replica"),
    ),
    Mutant(
        _STEP_TENSORFLOW,
        "lambda: _done(move(seen._replace(finite=tf.constant(False))))",
        "_done",
        _FUNCTION,
    ),
    Mutant(
        _STEP_TENSORFLOW,
        "_done(apply(gradients, scale), move(seen._replace(finite=tf.constant(True))))",
        "_done(apply(gradients, scale))",
        _FUNCTION,
    ),
    Mutant(_STEP_TENSORFLOW, "gated(gate(), finite)", "gated(gate(), tf.constant(True))", _XLA),
    Mutant(_GATE, "variable.read_value() - delta", "variable.read_value() + delta", _XLA),
    Mutant(_GATE, "write(tf.where(finite, value, old)", "write(value", _XLA),
    Mutant(
        _GATE,
        '"assign_add": assign_add, "assign_sub": assign_sub}',
        '"assign_add": assign_add}',
        _XLA,
    ),
    Mutant(_GATE, 'and not getattr(part, "use_ema", False)', "", (TRAINING, "-k", "xla_function")),
    Mutant(
        _FINITE,
        "tf.logical_and(fits, tf.logical_not(scale < 1.0))",
        "fits",
        ("tests/backends/test_finite.py",),
    ),
    Mutant(
        _FINITE,
        "lambda: ask_again(each_finite, large)",
        "lambda: tf.constant(False)",
        _fast("function"),
    ),
    Mutant(_FINITE, "tf.reduce_all(finite[0] if", "tf.reduce_any(finite[0] if", _fast("function")),
    Mutant(
        _FINITE,
        "tf.reduce_all(tf.stack(verdicts))",
        "tf.reduce_any(tf.stack(verdicts))",
        _fast("function"),
    ),
    Mutant(
        _FINITE,
        "each_finite([part])[0], lambda: tf.constant(False)",
        "each_finite([part])[0], lambda: tf.constant(True)",
        _fast("xla"),
    ),
    Mutant(
        _FINITE_JAX,
        "looked, lambda: jnp.asarray(False)",
        "looked, lambda: jnp.asarray(True)",
        _fast("jit"),
        JAX,
    ),
    Mutant(
        _FINITE_JAX, "for part in parts])).all()", "for part in parts])).any()", _fast("jit"), JAX
    ),
    Mutant(
        _FINITE_JAX,
        "jax.lax.cond(fits, lambda: jnp.asarray(True), in_turn)",
        "fits",
        _fast("jit"),
        JAX,
    ),
    Mutant(_FINITE_JAX, "jnp.all(jnp.stack(verdicts))", "verdicts[0]", _fast("jit"), JAX),
    Mutant(
        "torch/finite.py",
        "fits if bool(fits) else _each_finite(parts)",
        "fits",
        ("tests/backends/test_finite.py",),
        TORCH,
    ),
    Mutant(
        "jax/arrays.py",
        "    loss = widened(loss)",
        "    loss = jnp.asarray(loss)",
        _JAX_JIT,
        JAX,
    ),
    Mutant(
        _BACKEND_JAX,
        "(*inner.variables, *trained, *variables)",
        "(*inner.variables, *trained[1:], *variables[1:])",
        _JAX_JIT,
        JAX,
    ),
    Mutant(_BACKEND_JAX, "    elif bool(finite):\n", "    else:\n", _JAX_EAGER, JAX),
    Mutant(_BACKEND_TORCH, "may_grow = not state.scale >= 1.0", "may_grow = False", _TORCH, TORCH),
    Mutant(
        _BACKEND_TORCH,
        "copy = torch.empty_like(gradient)",
        "copy = gradient",
        ("tests/backends/test_loops.py",),
        TORCH,
    ),
    Mutant(
        _BACKEND_TORCH,
        "found + torch.logical_not(all_finite(others)).to(found)",
        "found",
        _TORCH,
        TORCH,
    ),
    Mutant(
        _HANDOVER,
        "return self._are_scaled_by(mark, mark.counts(variables), place, conflict)",
        "return False",
        ("tests/backends/test_handover.py",),
    ),
    Mutant(
        _HANDOVER,
        "self.times[id(variable)] = variable, times + 1",
        "self.times[id(variable)] = variable, times",
        ("tests/backends/test_handover.py",),
    ),
    Mutant(
        _HANDOVER,
        "return graph is None or graph is not place.graph",
        "return False",
        (TRAINING, "-k", "wherever_they_run"),
    ),
]

STEPS = [
    Mutant(_STEP, "if not self.checks_gradients:", "if False:", _EAGER),
    Mutant(_LEDGER, "self.last_step_skipped.assign(skipped)", "pass", _FUNCTION),
    Mutant(
        _LEDGER,
        "                self.steps_skipped.assign_add(1)",
        "                pass",
        _FUNCTION,
    ),
    Mutant(
        _LEDGER,
        "self.steps_skipped.assign_add(ops.cast(skipped, self.steps_skipped.dtype))",
        "pass",
        _XLA,
    ),
    Mutant(_LEDGER, "        self.iterations.follow()\n", "", _FUNCTION),
    Mutant(
        _STEP,
        'if getattr(variable, "overwrite_with_gradient", False)',
        "if False",
        (TRAINING, "-k", "overwritten"),
    ),
    Mutant(
        "keras_common/training.py",
        "experimental_aggregate_gradients and not skip_gradients_aggregation",
        "True",
        (REPLICAS, "-k", "summed"),
    ),
    Mutant(
        _VERBS,
        "loss, var_list, self.get_scaled_loss, tape",
        "loss, var_list, lambda loss: loss() if callable(loss) else loss, tape",
        _documented("minimize"),
    ),
    Mutant(
        "keras_common/verbs.py",
        "return [self._apply_unscaled(place, pairs, None)]",
        "return [self._apply_unscaled(place, pairs[:0], None)]",
        _documented("get_updates"),
    ),
    Mutant(
        "keras_common/verbs.py",
        "        if callable(loss):\n            gradients, _",
        "        if True:\n            gradients, _",
        _documented("works_in_a_graph"),
    ),
    Mutant(
        "keras/backends/torch_state.py",
        "            skipped.add_(1)",
        "            pass",
        _TORCH,
        TORCH,
    ),
    Mutant(
        "keras/iterations.py",
        "keras.ops.minimum(self._skipped, value)",
        "self._skipped + 0",
        _COUNTERS,
    ),
    Mutant(
        "keras/iterations.py",
        "self._applied.assign(value - skipped)",
        "self._applied.assign(value)",
        _COUNTERS,
    ),
    Mutant(
        "keras/weights.py",
        "targets = everything",
        "targets = counted",
        _documented("set_weights"),
    ),
    Mutant(_STEP_TF_KERAS, "if self._rule.checks_gradients else True", "", _TF_KERAS, TF_KERAS),
    Mutant(
        _STEP_TF_KERAS,
        "done.append(self._steps_skipped.assign_add(count, read_value=False))",
        "pass",
        _TF_KERAS,
        TF_KERAS,
    ),
    Mutant(_STEP_TF_KERAS, "else [self._state.update(seen)]", "else []", _TF_KERAS, TF_KERAS),
    Mutant(
        _STEP_TF_KERAS,
        "done.append(self._last_step_skipped.assign(skipped, read_value=False))",
        "pass",
        _TF_KERAS_LEGACY,
        TF_KERAS,
    ),
    Mutant(
        "common/autograph.py",
        "function.autograph_info__ = {}  # type: ignore[attr-defined]",
        "pass",
        ("tests/frameworks/keras/test_autograph.py",),
    ),
    Mutant(
        "tensorflow/tracing.py",
        "if tf.executing_eagerly():\n        return function",
        "if True:\n        return function",
        ("tests/frameworks/keras/test_autograph.py",),
    ),
]

ASKED = [
    Mutant(
        "jax/magnitudes.py",
        "if needs == Needs():",
        "if False:",
        ("tests/conformance/test_needs_nothing.py",),
        JAX,
    ),
    Mutant(
        _STEP,
        "if self.needs == Needs():",
        "if False:",
        ("tests/conformance/test_needs_nothing.py",),
        TORCH,
    ),
    Mutant(
        "common/checks.py",
        "return UnknownSettingError(message)",
        "return UnknownSettingError(message())",
        ("tests/core/test_errors.py",),
    ),
    Mutant(
        "migration/targets.py",
        "for field, value in values.items() if field in named",
        "for field, value in values.items()",
        ("tests/migration/test_own_rules.py",),
    ),
]

SAVED = [
    Mutant(
        _SAVING,
        "self._restore_scale(own)",
        "pass",
        ("tests/backends/test_files.py", "-k", "keras_own_class"),
    ),
    Mutant(
        "keras_common/files.py",
        'frozenset({"inner_optimizer", "get_slot_names"})',
        'frozenset({"get_slot_names"})',
        ("tests/backends/test_files.py", "-k", "plain_optimizer"),
    ),
    Mutant(
        "keras_common/files.py",
        "            store[name] = value\n",
        "            pass\n",
        _EAGER,
    ),
    Mutant(
        _SAVING,
        "            self.inner_optimizer.save_own_variables(store)",
        "            pass",
        _EAGER,
    ),
    Mutant(
        _SAVING,
        "inner_optimizer.load_own_variables(values)\n        self._iterations.follow()",
        "inner_optimizer.load_own_variables(values)",
        ("tests/backends/test_files.py", "-k", "plain_optimizer or own_class"),
    ),
    Mutant(
        "keras/state.py",
        "self.write(self.rule.restored(state))",
        "self.write(state)",
        (FILES, "-k", "saved_scale"),
    ),
    Mutant(
        "tf_keras/persistence.py",
        "self._rule.restored(state.first._replace(**read))",
        "state.first._replace(**read)",
        ("tests/frameworks/tf_keras/test_files.py", "-k", "outside_the_limits"),
        TF_KERAS,
    ),
    Mutant(
        "tf_keras/state.py",
        "self._extras[name].assign(value, read_value=False)",
        "tf.no_op()",
        (PROMISES, "-k", "tf_keras-new-eager and loaded"),
        TF_KERAS,
    ),
]

_HOST = (PROMISES, "-k", "torch-native-host")
_DEVICE = (PROMISES, "-k", "torch-native-device")
_OWN_STEPS = "tests/frameworks/torch/test_steps.py"

TORCH_ITSELF = [
    Mutant(
        "torch/optimizer/judging.py",
        "return _BAD if factors.found.item() else _GOOD",
        "return _GOOD",
        _HOST,
        TORCH,
    ),
    Mutant(
        "torch/optimizer/step.py",
        "returned = self.inner_optimizer.step() if quickly.applied else None",
        "returned = self.inner_optimizer.step()",
        _HOST,
        TORCH,
    ),
    Mutant(
        "torch/optimizer/judging.py",
        "may_grow = scales.scale < 1.0",
        "may_grow = False",
        _HOST,
        TORCH,
    ),
    Mutant(
        "torch/optimizer/judging.py",
        "        return layout.started >= stepped\n",
        "        return True\n",
        (_OWN_STEPS, "-k", "garbage or joins_late"),
        TORCH,
    ),
    Mutant(
        "torch/optimizer/handing.py",
        "inner.found_inf = found",
        "pass",
        _DEVICE,
        TORCH,
    ),
    Mutant(
        "torch/optimizer/handing.py",
        "inner.__dict__.pop(name, None)",
        "inner.__dict__.setdefault(name, None)",
        (_OWN_STEPS, "-k", "raises"),
        TORCH,
    ),
    Mutant(
        "torch/optimizer/closures.py",
        "            scales.move(seen)\n",
        "            pass\n",
        ("tests/frameworks/torch/test_closures.py",),
        TORCH,
    ),
    Mutant(
        "torch/optimizer/clipping.py",
        "max=1.0",
        "max=2.0",
        ("tests/frameworks/torch/test_clipping.py",),
        TORCH,
    ),
    Mutant(
        "torch/optimizer/saving.py",
        "        self._restore_numbers(checked)\n",
        "",
        _HOST,
        TORCH,
    ),
    Mutant(
        "torch/optimizer/guard.py",
        "now.made > before.made and now.applied == before.applied",
        "False",
        ("tests/frameworks/torch/test_guard.py",),
        TORCH,
    ),
    Mutant(
        "torch/optimizer/scales.py",
        "        if scale != self.scale:\n            self._show(scale)\n",
        "",
        _HOST,
        TORCH,
    ),
    Mutant(
        "torch/optimizer/step.py",
        "if any(as_they_were) and not all(as_they_were):",
        "if False:",
        (_OWN_STEPS, "-k", "gradients_of_some"),
        TORCH,
    ),
]


_GATING = "optax/gating.py"
_JUDGING = "optax/judging.py"

OPTAX = [
    Mutant(
        _GATING,
        "complex(-0.0, -0.0) if jnp.issubdtype(update.dtype, jnp.complexfloating) else -0.0",
        "0.0",
        ("tests/frameworks/jax/test_skipping.py", "-k", "momentum"),
        JAX,
    ),
    Mutant(
        _GATING,
        "finite = finite & each_finite(outputs[: traced.updates])",
        "pass",
        ("tests/frameworks/jax/test_loops.py", "-k", "of_its_own"),
        JAX,
    ),
    Mutant(
        "jax/jaxprs.py",
        "if not chosen_already:",
        "if False:",
        ("tests/frameworks/jax/test_jaxprs.py", "-k", "kept_old"),
        JAX,
    ),
    Mutant(
        "jax/jaxprs.py",
        "        if called is not None:\n            below",
        "        if False:\n            below",
        ("tests/frameworks/jax/test_memory.py",),
        JAX,
    ),
    Mutant(
        _JUDGING,
        "jax.lax.pmin(finite.astype(jnp.int32), axis_names) > 0",
        "finite",
        ("tests/frameworks/jax/test_devices.py", "-k", "anywhere"),
        JAX,
    ),
    Mutant(
        _JUDGING,
        "apart = varying(finite) - varying(scale)",
        "apart = varying(scale) - varying(finite)",
        ("tests/frameworks/jax/test_devices.py", "-k", "would_part"),
        JAX,
    ),
    Mutant(
        "optax/scale_state.py",
        "if id(leaf) in known and isinstance(leaf, jax.Array):",
        "if False:",
        ("tests/frameworks/jax/test_skipping.py", "-k", "lbfgs"),
        JAX,
    ),
    Mutant(
        "optax/transformation.py",
        "if judging.has_elements(gradients):",
        "if True:",
        ("tests/frameworks/jax/test_leaves.py", "-k", "without_a_gradient"),
        JAX,
    ),
]

_SCALER = "torch/grad_scaler/scaler.py"
_DEFECTS = "tests/frameworks/torch/test_grad_scaler_defects.py"

SCALER = [
    Mutant(_SCALER, "if look_again:", "if False:", (_DEFECTS, "-k", "d20"), TORCH),
    Mutant(
        _SCALER,
        "not self._scaled_since_update and is_dummy_step(optimizer)",
        "False",
        (_DEFECTS, "-k", "only_makes_state"),
        TORCH,
    ),
    Mutant(
        _SCALER,
        "return {} if found.item() < 0 else {found.device: found}",
        "return {}",
        ("tests/frameworks/torch/test_processes.py", "-k", "given_group"),
        TORCH,
    ),
    Mutant(
        "torch/grad_scaler/steps.py",
        "del optimizer.grad_scale, optimizer.found_inf",
        "pass",
        (_DEFECTS, "-k", "d25"),
        TORCH,
    ),
    Mutant(
        "torch/grad_scaler/scale.py",
        "and left[1] == scale._version",
        "",
        ("tests/frameworks/torch/test_grad_scaler.py", "-k", "others_write"),
        TORCH,
    ),
    Mutant(
        "torch/ranks.py",
        "if not placement.is_replicate() and mesh.size(dimension) > 1",
        "if placement.is_shard() and mesh.size(dimension) > 1",
        ("tests/frameworks/torch/test_ranks.py",),
        TORCH,
    ),
    *(
        Mutant(
            f"torch/{path}",
            right,
            wrong,
            ("tests/frameworks/torch/test_processes.py", "-k", which),
            TORCH,
        )
        for path, right, wrong, which in (
            ("magnitudes.py", "+= there / copies", "+= there", "on_a_mesh"),
            ("optimizer/clipping.py", "/ layout.copies(gradient)", "/ 1", "the_norm"),
            ("optimizer/clipping.py", "present == 0, -1.0,", "present == 0, 0.0,", "the_norm"),
        )
    ),
    Mutant(
        "torch/gradients.py",
        "and not gradient.is_coalesced():",
        "and False:",
        ("tests/frameworks/torch/test_mistakes.py", "-k", "one_index"),
        TORCH,
    ),
    Mutant(
        "torch/optimizer/guard.py",
        "if start is before.start:",
        "if True:",
        ("tests/frameworks/torch/test_guard.py",),
        TORCH,
    ),
    Mutant(
        "torch/optimizer/step.py",
        "            if verdict.empty:\n",
        "            if False:\n",
        ("tests/frameworks/torch/test_mistakes.py", "-k", "before_there_are_gradients"),
        TORCH,
    ),
]


_CONVERSIONS = ("tests/frameworks/jax/test_conversions.py", "-k")
_MISTAKES = ("tests/frameworks/jax/test_mistakes.py", "-k")
_WATCHED = ("tests/frameworks/jax/test_monitor.py", "-k")

AROUND_OPTAX = [
    Mutant(
        "optax/conversions.py",
        "dynamic_scale.growth_interval)) + 1,",
        "dynamic_scale.growth_interval)),",
        (*_CONVERSIONS, "run_of_flax_goes_on"),
        JAX,
    ),
    Mutant(
        "optax/conversions.py",
        'return rule, converted_state(rule, {"good_steps": good_steps}, inner_state)\n    if',
        "return rule, converted_state(rule, {}, inner_state)\n    if",
        (*_CONVERSIONS, "run_of_jmp_goes_on"),
        JAX,
    ),
    Mutant(
        "optax/noting.py",
        "return unscaled(by_row, before.loss_scale, self.rule.powers_of_two)",
        "return by_row",
        (*_WATCHED, "exponents"),
        JAX,
    ),
    Mutant(
        "optax/monitor.py",
        "self._scale = jnp.copy(shown.scale)",
        "pass",
        (*_WATCHED, "recorded_with_its_scale"),
        JAX,
    ),
    Mutant(
        "common/loop_monitor.py",
        "            self._unread = read, loss",
        "            pass",
        (*_WATCHED, "sampled_steps_count"),
        JAX,
    ),
    Mutant(
        "common/loop_monitor.py",
        "if not self._has_probed or status.step // every > before.step // every:",
        "if True:",
        (*_WATCHED, "fidelity_is_measured"),
        JAX,
    ),
    Mutant(
        "optax/diagnosis/tapping.py",
        "made = [made[0] + next(probes)]",
        "made = [made[0] * 2 + next(probes)]",
        ("tests/frameworks/jax/test_diagnose.py", "-k", "has_named"),
        JAX,
    ),
    Mutant(
        _GATING,
        "return isinstance(leaf, (bool, int, float, complex))",
        "return True",
        (*_MISTAKES, "functions_in_it"),
        JAX,
    ),
    Mutant(
        "optax/loops.py",
        "    if scale.ndim:",
        "    if False:",
        (*_MISTAKES, "state_of_several"),
        JAX,
    ),
    Mutant(
        "optax/loops.py",
        "and isinstance(found[0][1], _Result)",
        "",
        (*_MISTAKES, "returns_no_value"),
        JAX,
    ),
    Mutant(
        "optax/scale_state.py",
        "count < most, count + jnp.asarray(1, count.dtype), most",
        "count < most, count + jnp.asarray(1, count.dtype), count + 1",
        ("tests/frameworks/jax/test_leaves.py", "-k", "counter"),
        JAX,
    ),
    Mutant(
        "optax/scale_state.py",
        "return lowest is None or lowest < 1.0",
        "return False",
        ("tests/conformance/test_promises.py", "-k", "optax-native-jit and makes_infinite"),
        JAX,
    ),
    Mutant(
        "optax/transformation.py",
        "finite = judging.agreed(finite & scale_state.is_usable(rule, scale), axis_names, scale)",
        "finite = judging.agreed(finite, axis_names, scale)",
        ("tests/frameworks/jax/test_leaves.py", "tests/frameworks/jax/test_loops.py"),
        JAX,
    ),
    Mutant(
        "optax/transformation.py",
        "inner_state = self._inner.init(jax.tree.map(_widened, params))",
        "inner_state = self._inner.init(params)",
        ("tests/frameworks/jax/test_leaves.py", "-k", "float16 or narrow or half or dtype"),
        JAX,
    ),
    Mutant(
        "optax/transformation.py",
        "[jnp.where(finite, part, jnp.zeros_like(part)) for part in divided]",
        "divided",
        ("tests/frameworks/jax/test_skipping.py", "-k", "nothing_inside"),
        JAX,
    ),
]

_OWN_STEPS = "tests/conformance/test_own_steps.py"

OWN_STEPS = [
    Mutant(
        "keras_common/stand_ins.py",
        "divisor = 1.0 if scaled else 1.0 / self.scale",
        "divisor = 1.0",
        (_OWN_STEPS, "-k", "gives_to_its_optimizers"),
        TORCH,
    ),
    Mutant(
        "keras_common/stand_ins.py",
        "self._recorder.forgotten[self._name] = verb",
        "pass",
        (_OWN_STEPS, "-k", "forgets_to_scale"),
        TORCH,
    ),
    Mutant(
        "keras/backends/torch_own_steps.py",
        "            tensor.data.copy_(value)\n",
        "",
        (_OWN_STEPS, "-k", "left_as_it_was"),
        TORCH,
    ),
    Mutant(
        "keras/backends/torch_own_steps.py",
        "if not all(id(each) in trained for each in _listed(inputs)):",
        "if False:",
        (_OWN_STEPS, "-k", "within_the_loss"),
        TORCH,
    ),
    Mutant(
        "tensorflow/own_steps.py",
        "            variable.assign(value)\n",
        "            pass\n",
        (_OWN_STEPS, "-k", "left_as_it_was and Gan"),
    ),
    Mutant(
        "keras/backends/jax_own_steps.py",
        "recorder.helped += 1\n            (_, found)",
        "(_, found)",
        (_OWN_STEPS, "-k", "forgets_to_scale and Contrastive"),
        JAX,
    ),
]

ALL = [
    *(*RULES, *ARRAYS, *STEPS, *ASKED, *SAVED),
    *(*TORCH_ITSELF, *SCALER, *OPTAX, *AROUND_OPTAX, *OWN_STEPS),
]
