"""The page's program takes over loss scales of jmp and Flax: the same scales follow."""

import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale as FlaxScale

from frameworks.jax.support import signature
from pages import programs

(PROGRAM,) = programs("from_jmp.md")
VERDICTS = [True, True, False, True, True, True, False, False, True, True, True]


def taken_over(name, scale):
    """The transformation and the state that the page's program makes of a scale of this name."""
    program = PROGRAM if name == "flax_scale" else PROGRAM[: PROGRAM.index("flax_scale =")]
    found = {"given": scale}
    exec(re.sub(rf"^{name} = .*$", f"{name} = given", program, flags=re.M), found)
    return found


def ours(found):
    tx, state, scales = found["tx"], found["opt_state"], []
    with jax.disable_jit():
        for finite in VERDICTS:
            gradient = {"w": jnp.full(3, 1.0 if finite else np.inf)}
            _, state = tx.update(gradient, state, found["params"])
            scales.append((float(state.loss_scale), int(state.rule_state["good_steps"])))
    return scales


def theirs(scale):
    for finite in VERDICTS:
        if isinstance(scale, FlaxScale):
            factor = jnp.float32(1.0 if finite else np.inf)
            grad = scale.value_and_grad(lambda weight, factor=factor: weight * factor)
            scale = grad(jnp.float32(1.0)).dynamic_scale
            yield float(scale.scale), int(scale.fin_steps)
        else:
            scale = scale.adjust(jnp.asarray(finite))
            yield float(scale.loss_scale), int(scale.counter)


SCALES = {
    "jmp": ("jmp_scale", jmp.DynamicLossScale(jnp.float32(2.0**10), jnp.int32(1), 3, 2)),
    "jmp at its minimum": ("jmp_scale", jmp.DynamicLossScale(jnp.float32(2.0), jnp.int32(0), 2, 4)),
    "flax": ("flax_scale", FlaxScale(growth_interval=2, fin_steps=1, scale=2.0**10)),
    "flax, other factors": ("flax_scale", FlaxScale(1.5, 0.8, 1, 0, 2.0**10, 2.0**-8)),
    "flax without a minimum": ("flax_scale", FlaxScale(4.0, 0.25, 2, minimum_scale=None)),
}


@pytest.mark.parametrize("case", SCALES)
def test_a_run_goes_on_with_the_same_scales(case):
    name, scale = SCALES[case]
    found = taken_over(name, scale)
    with jax.disable_jit():
        assert ours(found) == list(theirs(scale))
    assert found["opt_state"].inner_state is found["state"]
    assert signature(found["opt_state"]) == signature(found["tx"].init(found["params"]))
