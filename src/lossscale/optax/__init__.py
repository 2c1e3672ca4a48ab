"""Loss scaling for JAX as an Optax transformation, without Keras.

```python
tx = lossscale.optax.loss_scaled(optax.adamw(1e-3))
opt_state = tx.init(params)

@jax.jit
def step(params, opt_state, batch):
    loss, grads = lossscale.optax.value_and_grad(loss_fn)(opt_state, params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lossscale import registry

with registry.naming_missing_packages("jax", "optax"):
    from lossscale.optax.loops import loss_scale, scale_loss, unless_skipped, value_and_grad
    from lossscale.optax.masters import MasterWeightsState, master_weights
    from lossscale.optax.monitor import Monitor
    from lossscale.optax.scale_state import LossScaleState
    from lossscale.optax.transformation import loss_scaled

__all__ = [
    "LossScaleState",
    "MasterWeightsState",
    "Monitor",
    "diagnose",
    "explain",
    "loss_scale",
    "loss_scaled",
    "master_weights",
    "scale_loss",
    "unless_skipped",
    "value_and_grad",
]

if TYPE_CHECKING:
    from lossscale.diagnosis.jax import diagnose as diagnose
    from lossscale.diagnosis.jax import explain as explain
else:
    _module = "lossscale.diagnosis.jax"
    __getattr__ = registry.imported_late(__name__, diagnose=_module, explain=_module)


def __dir__() -> list[str]:
    # Public names, for completion.
    return sorted(__all__)
