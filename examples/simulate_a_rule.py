"""How many bad batches a loss scale can bear, before anything is trained."""

import numpy as np

from lossscale import DynamicScale
from lossscale.monitoring import critical_probability, simulate_gradients, simulate_random

# Some batches overflow whatever the scale is: bad data, or float16 in the forward pass.
for growth_interval in (2000, 1000, 200):
    rule = DynamicScale(growth_interval=growth_interval)
    runs = simulate_random(rule, probability=1e-3, steps=20_000, runs=32)
    print(
        f"growth_interval={growth_interval}: {1000 * runs.drift:+.2f} powers of two in 1000 steps "
        f"(expected {1000 * runs.expected_drift:+.2f}), median final scale "
        f"{runs.summary()['final_scale']['median']:g}"
    )

# Gradients of known size: here they shrink from 8 to 0.08 in 5000 steps.
rule = DynamicScale(initial_scale=2**20, growth_interval=500)
run = simulate_gradients(rule, np.geomspace(8, 0.08, 5000))
print(f"{int(run.skipped.sum())} skips, final scale {run.final_scales[0]:g}")

print(f"{critical_probability(DynamicScale()):.2e} of all steps is what the default rule can bear")
