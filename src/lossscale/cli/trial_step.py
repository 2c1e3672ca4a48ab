"""One training step on each framework, in a process of its own: a crash there ends nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from lossscale.cli.environment import Stack

_SECONDS = 300

_KERAS = """
import keras, lossscale
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5))
weight = keras.Variable(1.0)
optimizer.apply([keras.ops.convert_to_tensor(optimizer.scale_loss(1.0))], [weight])
applied = float(keras.ops.convert_to_numpy(weight.value))
"""
_TF_KERAS = """
import tf_keras, tensorflow, lossscale
optimizer = lossscale.LossScaleOptimizer(tf_keras.optimizers.SGD(0.5))
weight = tensorflow.Variable(1.0)
optimizer.apply_gradients([(tensorflow.constant(1.0), weight)])
applied = float(weight)
"""
_TORCH = """
import torch, lossscale
weight = torch.nn.Parameter(torch.tensor(1.0))
optimizer = lossscale.LossScaleOptimizer(torch.optim.SGD([weight], 0.5))
optimizer.scale_loss(weight).backward()
optimizer.step()
applied = float(weight)
for name in lossscale.torch.__all__:
    getattr(lossscale.torch, name)
"""
_OPTAX = """
import optax, lossscale.optax
tx = lossscale.optax.loss_scaled(optax.sgd(0.5))
state = tx.init(1.0)
_, gradient = lossscale.optax.value_and_grad(lambda weight: weight)(state, 1.0)
applied = 1.0 + float(tx.update(gradient, state, 1.0)[0])
"""
_PROGRAMS = {"keras": _KERAS, "tf_keras": _TF_KERAS, "torch": _TORCH, "optax": _OPTAX}
_DEVICES = {
    "tensorflow": """
import tensorflow
devices = [device.name.replace("/physical_device:", "") for device in
           tensorflow.config.list_physical_devices()]
""",
    "jax": """
import jax
devices = [str(device) for device in jax.devices()]
""",
    "torch": """
import torch
devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] or ["cpu"]
""",
}
_LAST = """
import json
assert applied == 0.5, f"a step of 0.5 from 1.0 led to {applied}"
print(json.dumps(devices))
"""


def take_trial_step(stack: Stack) -> dict[str, Any]:
    """Takes one step with loss scaling on a framework.

    Args:
        stack: The framework; its packages are installed.

    Returns:
        `error`, None or what the process said last; `devices`, what the framework computes on;
        `seconds`, how long it took, imports included.
    """
    library, backend = stack.packages[0], stack.packages[-1]
    program = _PROGRAMS[library] + _DEVICES[backend] + _LAST
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=environment,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_SECONDS} seconds", "devices": [], "seconds": _SECONDS}
    seconds = round(time.perf_counter() - started, 1)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": said[-1], "devices": [], "seconds": seconds}
    devices = json.loads(done.stdout.strip().splitlines()[-1])
    return {"error": None, "devices": devices, "seconds": seconds}
