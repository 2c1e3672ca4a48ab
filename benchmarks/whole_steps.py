"""The temporary memory of whole training steps on JAX, and the time to compile them.

    python -m benchmarks.whole_steps [keras|optax]

prints a table. The numbers are the bytes that XLA plans for temporary buffers, as a multiple of the
size of the parameters, for a step that is compiled as one program with donated state, as in `fit`.

"floor" is a bare step that waits for a check of all gradients before its update, and does nothing
else with the result.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, CHANNELS, TOKENS, HEADS = 256, 64, 8, 4
_HALF, _WIDE = WIDTH // 2, 2 * WIDTH
NETS = ("mlp", "cnn", "transformer")
OPTIMIZERS = ("adam", "adamw, clipped", "adam, accumulated")
PRECISIONS = ("float32", "mixed_float16")
METHODS = ("bare", "floor", "lossscale")


class Taken(NamedTuple):
    """The cost of a compiled step.

    Attributes:
        memory: Temporary memory, as a multiple of the size of the parameters.
        seconds: CPU time to trace and compile it.
    """

    memory: float
    seconds: float


def taken(step: Callable[..., Any], arguments: tuple[Any, ...], donated: int, size: int) -> Taken:
    """Compiles a step whose first arguments are donated.

    Args:
        step: The function.
        arguments: Arrays, or their shapes and dtypes.
        donated: Number of donated arguments.
        size: Number of parameters, float32.
    """
    begin = time.process_time()
    program = jax.jit(step, donate_argnums=tuple(range(donated))).lower(*arguments).compile()
    seconds = time.process_time() - begin
    return Taken(program.memory_analysis().temp_size_in_bytes / (4 * size), seconds)


def with_verdict(gradients: Any) -> Any:
    """Gradients that nothing reads before all are checked; 0 if one is not finite."""
    finite = jnp.all(
        jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradients)])
    )
    gradients, finite = jax.lax.optimization_barrier((gradients, finite))
    return jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), gradients)


# --- With Optax -----------------------------------------------------------------------------------


def of_optax(net: str, precision: str, optimizer: str, method: str) -> Taken:
    """A step of a function of arrays, with `lossscale.optax`."""
    import optax

    from benchmarks.frameworks.optax import MODELS
    from lossscale.optax import loss_scaled, value_and_grad

    shapes, logits, *given = MODELS[net](small=False)
    dtype = jnp.float16 if precision == "mixed_float16" else jnp.float32
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    inputs = jax.ShapeDtypeStruct(given[0], dtype)
    tx = {
        "adam": lambda: optax.adam(1e-2),
        "adamw, clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        "adam, accumulated": lambda: optax.MultiSteps(
            optax.adam(1e-2), 2
        ).gradient_transformation(),
    }[optimizer]()
    ours = method == "lossscale"
    tx = loss_scaled(tx) if ours else tx

    def loss_fn(params: Any, inputs: Any) -> Any:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return jnp.mean((logits(params, inputs).astype(jnp.float32) - 1.0) ** 2)

    def step(params: Any, state: Any, inputs: Any) -> Any:
        if ours:
            loss, gradients = value_and_grad(loss_fn)(state, params, inputs)
        else:
            loss, gradients = jax.value_and_grad(loss_fn)(params, inputs)
        gradients = with_verdict(gradients) if method == "floor" else gradients
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    arguments = params, jax.eval_shape(tx.init, params), inputs
    return taken(step, arguments, 2, sum(int(np.prod(shape)) for shape in shapes.values()))


# --- With Keras -----------------------------------------------------------------------------------


def _keras_net(name: str) -> tuple[Any, Any, Any]:
    """The input and output of a network, and a batch of its inputs."""
    import keras

    layers, ops = keras.layers, keras.ops
    if name == "mlp":
        hidden = first = layers.Input((WIDTH,))
        for _ in range(2):
            hidden = layers.Dense(WIDTH, activation="relu")(hidden)
        return first, layers.Dense(WIDTH, dtype="float32")(hidden), np.ones((4, WIDTH), np.float32)
    if name == "cnn":
        first = layers.Input((8, 8, CHANNELS))
        hidden = layers.Conv2D(CHANNELS, 3, padding="same", activation="relu")(first)
        hidden = layers.Conv2D(CHANNELS, 3, padding="same")(hidden)
        hidden = layers.GlobalAveragePooling2D()(hidden)
        batch = np.ones((2, 8, 8, CHANNELS), np.float32)
        return first, layers.Dense(CHANNELS, dtype="float32")(hidden), batch

    class Attention(layers.Layer):  # type: ignore[misc, name-defined]
        """Attention without Keras' layer, which needs a precision that JAX lacks on a CPU."""

        def call(self, *given: Any) -> Any:
            def by_head(x: Any) -> Any:
                return ops.transpose(ops.reshape(x, (-1, TOKENS, HEADS, 32)), (0, 2, 1, 3))

            query, key, value = map(by_head, given)
            scores = ops.cast(ops.matmul(query, ops.swapaxes(key, 2, 3)), "float32")
            attended = ops.matmul(ops.cast(ops.softmax(scores), value.dtype), value)
            return ops.reshape(ops.transpose(attended, (0, 2, 1, 3)), (-1, TOKENS, _HALF))

    first = layers.Input((TOKENS,), dtype="int32")
    hidden = layers.Embedding(64, _HALF)(first)
    normalized = layers.LayerNormalization()(hidden)
    attended = Attention()(*(layers.Dense(_HALF)(normalized) for _ in range(3)))
    hidden = hidden + layers.Dense(_HALF)(attended)
    normalized = layers.LayerNormalization()(hidden)
    hidden = hidden + layers.Dense(_HALF)(layers.Dense(_WIDE, activation="gelu")(normalized))
    return first, layers.Dense(64, dtype="float32")(hidden), np.ones((2, TOKENS), np.int32)


def of_keras(net: str, precision: str, optimizer: str, method: str) -> Taken:
    """The train step of `fit`, with `lossscale.LossScaleOptimizer`."""
    import keras

    import lossscale

    class Floor(keras.Model):  # type: ignore[misc]
        def train_step(self, state: Any, data: Any) -> Any:
            trained, others, optimizer_state, metrics = state
            compute = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
            (loss, (*_, others, metrics)), gradients = compute(
                *(trained, others, metrics, *data, None),
                training=True,
                optimizer_variables=optimizer_state,
            )
            trained, optimizer_state = self.optimizer.stateless_apply(
                optimizer_state, with_verdict(gradients), trained
            )
            return {"loss": loss}, (trained, others, optimizer_state, metrics)

    inner = {
        "adam": lambda: keras.optimizers.Adam(1e-2),
        "adamw, clipped": lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=1.0),
        "adam, accumulated": lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
    }[optimizer]()
    keras.config.set_dtype_policy(precision)
    try:
        first, last, batch = _keras_net(net)
        model = (Floor if method == "floor" else keras.Model)(first, last)
    finally:
        keras.config.set_dtype_policy("float32")
    wrapped = lossscale.LossScaleOptimizer(inner) if method == "lossscale" else inner
    model.compile(wrapped, "mse", auto_scale_loss=False)
    wrapped.build(model.trainable_variables)
    groups = ("trainable", "non_trainable", "optimizer", "metrics")
    state = model._get_jax_state(**{f"{group}_variables": True for group in groups})
    data = jnp.asarray(batch), jnp.ones((*batch.shape[:1], *last.shape[1:]))
    size = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    return taken(model.train_step, (state, data), 1, size)


def main(names: list[str]) -> None:
    """Prints a table for each of the two."""
    os.environ["KERAS_BACKEND"] = "jax"
    for name, measured in (("keras", of_keras), ("optax", of_optax)):
        if names and name not in names:
            continue
        # The first compilation takes longer.
        measured("mlp", "float32", "adam", "bare")
        print(f"| {name} | {' | '.join(METHODS)} | time to compile |\n|{'---|' * 5}")
        for net in NETS:
            for precision in PRECISIONS:
                for optimizer in OPTIMIZERS:
                    found = [measured(net, precision, optimizer, method) for method in METHODS]
                    cells = [f"{each.memory:.2f}" for each in found]
                    times = [each.seconds / found[0].seconds for each in found]
                    cells.append(f"{times[1]:.2f}, {times[2]:.2f}")
                    print(f"| {net}, {precision}, {optimizer} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
