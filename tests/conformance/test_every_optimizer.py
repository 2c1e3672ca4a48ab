"""What every optimizer of the framework keeps inside of ours: its updates and its state.

Its files: test_keras_files.py.
"""

import numpy as np
import pytest

import lossscale
from conformance.every_optimizer import makers, of_optax, state_of
from conformance.harness import IS_TF_KERAS, array
from conformance.recordings import same_bits, same_but_for_rounding
from conformance.wrappers import BACKEND, WRAPPERS

RULE = lossscale.DynamicScale(8.0, growth_interval=100)
VALUES = [np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)]
STEPS = [
    [np.full((2, 3), 0.5, np.float32), np.array([4.0, -0.125, 1.0], np.float32)],
    [np.array([[0.25, -1.0, 2.0], [0.5, 1.0, -4.0]], np.float32), np.ones(3, np.float32)],
    [np.full((2, 3), -0.75, np.float32), np.array([0.5, 0.5, -2.0], np.float32)],
]
BAD = [STEPS[0][0], np.array([1.0, np.inf, 1.0], np.float32)]

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def state(optimizer):
    found = state_of(getattr(optimizer, "inner_optimizer", optimizer))
    return {place: array(variable) for place, variable in found.items()}


def same(left, right, compare=same_bits):
    assert list(left) == list(right)
    compare(list(left.values()), list(right.values()))


def state_inside(harness):
    if OF_OPTAX and not hasattr(harness.optimizer, "apply_gradients"):
        return dict(enumerate(harness.inner_state()))
    return state(harness.optimizer)


# A skipped step of a `tf.function` runs nothing of the optimizer, whichever it is. XLA runs all of
# it and puts back what it keeps, so that each has to be asked there.
IN_A_FUNCTION = ("SGD", "Nadam", "MultiOptimizer", "a user's")


OF_KERAS = [
    row for row in WRAPPERS if "keras" in row.family and (not row.like or row.name.endswith("xla"))
]
if BACKEND == "jax":
    OF_KERAS = [row for row in OF_KERAS if row.compiles]
CASES = [
    pytest.param(make, row, id=f"{name}-{row.name}")
    for name, make in makers().items()
    for row in OF_KERAS
    if not IS_TF_KERAS or row.family == f"tf_keras-{name.partition('-')[0]}"
    if not row.name.endswith("function") or name.rpartition("-")[2] in IN_A_FUNCTION
]
OF_OPTAX = [row for row in WRAPPERS if row.name in ("optax-native-jit", "optax-native-eager")]
CASES += [
    pytest.param(make, row, id=f"{name}-{row.name}")
    for name, make in (of_optax() if OF_OPTAX else ())
    for row in OF_OPTAX
]


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")
@pytest.mark.parametrize(("make", "row"), CASES)
def test_it_trains_as_bare_and_a_skipped_step_changes_none_of_its_state(make, row):
    bare = row.harness(VALUES, make)
    try:
        for gradients in STEPS:
            bare.step(gradients)
    except Exception as error:
        # A legacy Adam with amsgrad.
        if row.name != "tf_keras-legacy-xla" or "unsupported operations" not in str(error):
            raise
        pytest.skip("XLA has no operation for it, bare or wrapped")
    ours = row.harness(VALUES, make, RULE)
    for number, gradients in enumerate(STEPS):
        if number == 1:
            before = ours.parameters(), state_inside(ours)
            ours.step(BAD)
            same_bits(ours.parameters(), before[0])
            same(state_inside(ours), before[1])
        ours.step(gradients)
    # A compiler may round an update otherwise as soon as something multiplies the gradient.
    compare = same_but_for_rounding if row.compiles else same_bits
    compare(ours.parameters(), bare.parameters())
    same(state_inside(ours), state_inside(bare), compare)
    assert ours.counters()[1] == 1
