"""Records a float16 run whose loss scale starts too high, and names the gradients that overflow."""

import json
import tempfile
import time

import keras
import numpy as np

import lossscale
from lossscale.callbacks import LossScaleMonitor

keras.utils.set_random_seed(0)
keras.mixed_precision.set_dtype_policy("mixed_float16")

model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(64, activation="relu", name="hidden"),
        keras.layers.Dense(1, dtype="float32", name="out"),
    ],
    name="net",
)
rule = lossscale.DynamicScale(initial_scale=2.0**22, growth_interval=50)
model.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.01), rule=rule), loss="mse")

x = np.random.default_rng(0).normal(size=(512, 16)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True))

with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/run-{time.time():.0f}.jsonl"
    monitor = LossScaleMonitor(path)
    model.fit(x, y, batch_size=32, epochs=2, verbose=2, callbacks=[monitor])
    with open(path) as file:
        records = [json.loads(line) for line in file]

for record in records:
    if record["skipped"]:
        tensors = ", ".join(f"{each['name']} ({each['infs']} inf)" for each in record["nonfinite"])
        print(
            f"step {record['step']} at scale {record['scale']:.0f}, {record['reason']}: {tensors}"
        )
print("overflowed:", *sorted({each["name"] for record in records for each in record["nonfinite"]}))
