"""Writes what a release of lossscale leaves on disk: pickles, model files, checkpoints.

    KERAS_BACKEND=jax python tests/earlier_files/write.py keras-jax tests/earlier_files/0.1.0

Each release's files stay in the tests and load ever after (`test_earlier_files.py` in the folder of
each framework). Beside them stands, in `<set>.json`, what this release itself read back from them.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import sys

import numpy as np

TESTS = pathlib.Path(__file__).parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import lossscale  # noqa: E402
from earlier_files import of_users  # noqa: E402

INPUTS = np.array([[1.0, 2.0], [3.0, -1.0]], "float32")
TARGETS = np.array([[1.0], [2.0]], "float32")
OVERFLOW = np.array([[np.inf], [2.0]], "float32")
BATCHES = (TARGETS, OVERFLOW, TARGETS, TARGETS)
"""What a model is trained on before it is saved: one step is skipped, if anything checks."""

OPTIMIZERS = {
    "dynamic": lambda inner: lossscale.LossScaleOptimizer(inner, dynamic_growth_steps=2),
    "floor": lambda inner: lossscale.LossScaleOptimizer(
        inner, rule=lossscale.DynamicScale(initial_scale=8, min_scale=4, growth_interval=3)
    ),
    "fixed": lambda inner: lossscale.LossScaleOptimizer(inner, dynamic=False, initial_scale=8),
    "fixed_skipping": lambda inner: lossscale.LossScaleOptimizer(
        inner, rule=lossscale.FixedScale(8, skip_nonfinite=True)
    ),
    "own_rule": lambda inner: lossscale.LossScaleOptimizer(inner, rule=of_users.Halving(64.0)),
    "subclass": lambda inner: of_users.Counting(inner, initial_scale=16),
    "experimental_dynamic": lambda inner: lossscale.experimental.LossScaleOptimizer(
        inner, "dynamic"
    ),
    "experimental_fixed": lambda inner: lossscale.experimental.LossScaleOptimizer(inner, 8.0),
    "experimental_object": lambda inner: lossscale.experimental.LossScaleOptimizer(
        inner, lossscale.experimental.DynamicLossScale(64, 2, 4.0)
    ),
    "experimental_own": lambda inner: lossscale.experimental.LossScaleOptimizer(
        inner, of_users.Cautious()
    ),
}
"""The wrappers of both generations of Keras."""

RULES = {
    "dynamic": lossscale.DynamicScale(initial_scale=8, min_scale=4, growth_interval=3),
    "fixed": lossscale.FixedScale(8, skip_nonfinite=True),
    "own": of_users.Halving(64.0),
    "state": lossscale.ScaleState(8.0, 3),
    "needs": lossscale.StatsRequest(largest=True, counts_from=(2.0,)),
    "seen": lossscale.GradientStats(True, 2.0),
    "error": lossscale.LossScaleError("said"),
    "fixed_loss_scale": lossscale.experimental.FixedLossScale(8.0),
    "dynamic_loss_scale": lossscale.experimental.DynamicLossScale(64, 2, 4.0),
    "own_loss_scale": of_users.Cautious(),
}
"""What is pickled without an optimizer, and shown the same when it is read."""


def facts(optimizer):
    """What there is to know of an optimizer of Keras that was built, in numbers and words."""
    scale = optimizer.loss_scale
    weights = [np.asarray(weight) for weight in optimizer.get_weights()]
    return {
        "classes": of_users.classes_of(optimizer),
        "rule": repr(optimizer.rule),
        "scale": float(scale() if callable(scale) else scale),
        "steps": int(optimizer.iterations),
        "skipped": int(optimizer.steps_skipped),
        "last_skipped": bool(optimizer.last_step_skipped),
        "applied": int(optimizer.inner_optimizer.iterations),
        "counter": int(optimizer.dynamic_counter) if optimizer.dynamic_counter is not None else -1,
        # In float64, so that JSON holds every bit.
        "weights": [np.asarray(weight, "float64").ravel().tolist() for weight in weights],
        "tag": getattr(optimizer, "tag", None),
    }


def trained(keras, make, inner, batches=BATCHES, **options):
    """Returns a compiled model after some batches."""
    layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.5), name="dense")
    model = keras.Sequential([keras.layers.Input((2,), name="input"), layer], name="model")
    if keras.__version__[0] == "3":
        options["jit_compile"] = False
    model.compile(make(inner), "mse", **options)
    for targets in batches:
        if targets is not OVERFLOW or model.optimizer.rule.checks_gradients:
            model.train_on_batch(INPUTS, targets)
    return model


def unpickled(path, variables):
    """Returns the optimizer in a pickle, built for variables."""
    optimizer = pickle.loads(path.read_bytes())
    optimizer.build(list(variables))
    return optimizer


def facts_of_model(keras, path):
    """Returns what is known of a model file."""
    custom = {"custom_objects": of_users.CUSTOM_OBJECTS}
    model = keras.models.load_model(path, **custom)
    before = facts(model.optimizer)
    model.run_eagerly = True
    model.train_on_batch(INPUTS, TARGETS)
    after = [np.asarray(weight, "float64").ravel().tolist() for weight in model.get_weights()]
    return {**before, "next_weights": after}


def restored(tf, keras, make, inner, path):
    """Returns a model and an optimizer like those of a checkpoint, with its values."""
    model = trained(keras, make, inner, (TARGETS + 1,), run_eagerly=True)
    status = tf.train.Checkpoint(optimizer=model.optimizer, model=model).restore(str(path))
    status.assert_existing_objects_matched()
    return model


def write_keras(folder, keras, inner_of, kinds, forms):
    """Writes and reads back each kind of optimizer in each form."""
    found = {}
    for kind in kinds:
        make = OPTIMIZERS[kind]
        model = trained(keras, make, inner_of())
        if "pickle" in forms:
            path = folder / f"{kind}.pickle"
            path.write_bytes(pickle.dumps(model.optimizer))
            found[path.name] = facts(unpickled(path, model.trainable_variables))
        for form in set(forms) & {"keras", "h5"}:
            path = folder / f"{kind}.{form}"
            model.save(path)
            found[path.name] = facts_of_model(keras, path)
        if "checkpoint" in forms:
            import tensorflow as tf

            saved = tf.train.Checkpoint(optimizer=model.optimizer, model=model)
            path = pathlib.Path(saved.save(str(folder / f"{kind}_checkpoint")))
            (folder / "checkpoint").unlink()
            again = restored(tf, keras, make, inner_of(), path)
            found[path.name] = facts(again.optimizer)
    return found


def write_torch(folder):
    import torch

    found = {}
    for kind, make in of_users.TORCH_OPTIMIZERS.items():
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = make(torch.optim.Adam([weight], lr=0.1))
        of_users.torch_steps(weight, optimizer)
        (folder / f"{kind}.pickle").write_bytes(pickle.dumps(optimizer))
        torch.save(optimizer.state_dict(), folder / f"{kind}.pt")
        for name in (f"{kind}.pickle", f"{kind}.pt"):
            found[name] = of_users.torch_facts(folder / name, make)
    for kind, make in of_users.TORCH_SCALERS.items():
        scaler = make()
        of_users.scaler_steps(scaler)
        (folder / f"{kind}.pickle").write_bytes(pickle.dumps(scaler))
        found[f"{kind}.pickle"] = of_users.scaler_facts(folder / f"{kind}.pickle")
    return found


def write_optax(folder):
    found = {}
    for kind, make in of_users.TRANSFORMATIONS.items():
        state = of_users.optax_state(make(), kind != "fixed")
        (folder / f"{kind}.pickle").write_bytes(pickle.dumps(state))
        found[f"{kind}.pickle"] = of_users.optax_facts(folder / f"{kind}.pickle", make())
    return found


def write_rules(folder):
    for kind, value in RULES.items():
        (folder / f"{kind}.pickle").write_bytes(pickle.dumps(value))
    return {
        f"{kind}.pickle": repr(pickle.loads((folder / f"{kind}.pickle").read_bytes()))
        for kind in RULES
    }


def written(what, folder):
    """Writes a set of files, and returns what was read back from them."""
    if what == "rules":
        return write_rules(folder)
    if what == "torch":
        return write_torch(folder)
    if what == "optax":
        return write_optax(folder)
    if what.startswith("keras"):
        import keras

        forms = ["pickle", "keras"] + ["checkpoint"] * (what == "keras-tensorflow")
        return write_keras(folder, keras, lambda: keras.optimizers.Adam(0.05), OPTIMIZERS, forms)
    import tf_keras as keras

    if what == "tf_keras-new":
        forms, family = ["pickle", "keras", "h5", "checkpoint"], keras.optimizers
    else:
        forms, family = ["pickle", "h5", "checkpoint"], keras.optimizers.legacy
    return write_keras(folder, keras, lambda: family.Adam(0.05), OPTIMIZERS, forms)


def main(what, target):
    folder = pathlib.Path(target, what)
    folder.mkdir(parents=True, exist_ok=True)
    found = written(what, folder)
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(v)}" for name, v in found.items())
    pathlib.Path(target, f"{what}.json").write_text("{" + text + "}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
