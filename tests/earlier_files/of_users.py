"""What users of a release have written themselves, and their programs with PyTorch and Optax."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle

import lossscale


@dataclasses.dataclass(frozen=True)
class Halving(lossscale.ScaleRule):
    """Halves the scale on overflow and never raises it."""

    first: float

    def init(self):
        return lossscale.ScaleState(scale=self.first, good_steps=0)

    def update(self, state, seen, *, xp):
        return lossscale.ScaleState(
            scale=xp.where(seen.finite, state.scale, state.scale * 0.5),
            good_steps=state.good_steps + 1,
        )

    def get_config(self):
        return {"first": self.first}


class Counting(lossscale.LossScaleOptimizer):
    """Has an attribute of its own."""

    tag = "of the class"


def _tensor(number):
    if os.environ.get("LOSSSCALE_TEST_KERAS") == "tf_keras":
        import tensorflow as tf

        return tf.constant(number)
    import keras

    return keras.ops.convert_to_tensor(number, "float32")


def _all_finite(gradient):
    if os.environ.get("LOSSSCALE_TEST_KERAS") == "tf_keras":
        import tensorflow as tf

        return tf.reduce_all(tf.math.is_finite(gradient))
    import keras

    return keras.ops.all(keras.ops.isfinite(gradient))


class Cautious(lossscale.experimental.LossScale):
    """A loss scale of 32 that says itself whether a step is applied."""

    def __call__(self):
        return _tensor(32.0)

    def update(self, grads):
        finite = [_all_finite(gradient) for gradient in grads if gradient is not None]
        return None, functools.reduce(lambda one, other: one & other, finite)

    def get_config(self):
        return {}

    def __repr__(self):
        return "Cautious()"


def classes_of(optimizer):
    """Which of the public classes and of those above an optimizer is of, and that inside it."""
    classes = (Counting, lossscale.experimental.LossScaleOptimizer, lossscale.LossScaleOptimizer)
    of = next(cls.__qualname__ for cls in classes if isinstance(optimizer, cls))
    is_older = isinstance(optimizer, lossscale.experimental.LossScaleOptimizer)
    inner = type(optimizer.inner_optimizer).__name__
    return ["experimental." * is_older + of, inner]


CUSTOM_OBJECTS = {cls.__name__: cls for cls in (Halving, Counting, Cautious)}


def _torch_optimizer(inner, **arguments):
    import lossscale.torch

    return lossscale.torch.LossScaleOptimizer(inner, **arguments)


TORCH_OPTIMIZERS = {
    "dynamic": functools.partial(_torch_optimizer, dynamic_growth_steps=2),
    "fixed": functools.partial(_torch_optimizer, dynamic=False, initial_scale=8.0),
    "own_rule": functools.partial(_torch_optimizer, rule=Halving(64.0)),
    "clipping": functools.partial(_torch_optimizer, clip_norm=1.0),
    "subclass": functools.partial(Counting, initial_scale=16.0),
}


def torch_steps(weight, optimizer):
    """Two steps that are applied, and between them one that is skipped."""
    for factor in (1.0, float("inf"), 1.0) if optimizer.rule.checks_gradients else (1.0, 1.0):
        optimizer.zero_grad()
        optimizer.scale_loss((weight**2).sum() * factor).backward()
        optimizer.step()


def torch_facts(path, make):
    """What is known of an optimizer that was saved, and where its next step leads."""
    import torch

    if path.suffix == ".pickle":
        optimizer = pickle.loads(path.read_bytes())
        [weight] = optimizer.param_groups[0]["params"]
    else:
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = make(torch.optim.Adam([weight], lr=0.1))
        optimizer.load_state_dict(torch.load(path, weights_only=True))
    found = {
        "classes": classes_of(optimizer),
        "rule": repr(optimizer.rule),
        "scale": float(optimizer.loss_scale),
        "steps": int(optimizer.iterations),
        "skipped": int(optimizer.steps_skipped),
        "last_skipped": bool(optimizer.last_step_skipped),
        "before": weight.detach().tolist(),
    }
    optimizer.zero_grad()
    optimizer.scale_loss((weight**2).sum()).backward()
    optimizer.step()
    return {**found, "after": weight.detach().tolist()}


def _scaler(**arguments):
    import lossscale.torch

    return lossscale.torch.GradScaler("cpu", **arguments)


TORCH_SCALERS = {
    "scaler": functools.partial(_scaler, growth_interval=2),
    "scaler_rule": functools.partial(_scaler, rule=lossscale.DynamicScale(8, min_scale=4)),
    "scaler_disabled": functools.partial(_scaler, enabled=False),
}


def scaler_steps(scaler):
    import torch

    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (1.0, float("inf"), 1.0) if scaler.is_enabled() else (1.0,):
        optimizer.zero_grad()
        scaler.scale((weight**2).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()


def scaler_facts(path):
    scaler = pickle.loads(path.read_bytes())
    state, before = scaler.state_dict(), scaler.get_scale()
    scaler_steps(scaler)
    return {"state": state, "scale": before, "next_scale": scaler.get_scale()}


def _transformation(rule=None, *, noted=False):
    import optax

    import lossscale.optax

    made = lossscale.optax.loss_scaled(optax.adam(0.1), rule=rule)
    return lossscale.optax.noted(made) if noted else made


TRANSFORMATIONS = {
    "dynamic": _transformation,
    "fixed": functools.partial(_transformation, lossscale.FixedScale(8.0)),
    "own_rule": functools.partial(_transformation, Halving(64.0)),
    "noted": functools.partial(_transformation, noted=True),
}


def _optax_steps(transformation, state, parameters, factors):
    import jax
    import optax

    def loss(parameters, factor):
        return (parameters["weight"] ** 2).sum() * factor

    for factor in factors:
        _, gradients = lossscale.optax.value_and_grad(loss)(state, parameters, factor)
        updates, state = transformation.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return jax.device_get((state, parameters))


def optax_state(transformation, checks):
    import jax.numpy as jnp

    parameters = {"weight": jnp.array([1.0, 2.0])}
    state = transformation.init(parameters)
    factors = (1.0, float("inf"), 1.0) if checks else (1.0, 1.0)
    return _optax_steps(transformation, state, parameters, factors)


def optax_facts(path, transformation):
    import jax

    state, parameters = pickle.loads(path.read_bytes())
    _, after = _optax_steps(transformation, state, parameters, (1.0,))
    return {
        "leaves": [leaf.tolist() for leaf in jax.tree.leaves(state)],
        "structure": str(jax.tree.structure(state)),
        "after": after["weight"].tolist(),
    }
