"""Programs made at random do what NumPy computes; `tools.soak` runs more and longer ones."""

import os

import pytest

from conformance.random_programs import Run

# Each wrapper compiles two steps, which takes longer than hundreds of them. So a program is long,
# and in the place of many short ones. `tools.soak` sets these.
IS_SOAK = "LOSSSCALE_SOAK_PROGRAMS" in os.environ
PROGRAMS = int(os.environ.get("LOSSSCALE_SOAK_PROGRAMS", "1"))
ACTIONS = 250 if IS_SOAK else 120

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist"),
    pytest.mark.filterwarnings("ignore:A step was skipped at the minimum loss scale"),
]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program_does_what_numpy_computes(wrapper, seed, tmp_path):
    if wrapper.like and not IS_SOAK:
        pytest.skip(f"what is inside of it is run as in {wrapper.like}")
    program = Run(wrapper, seed, tmp_path)
    program.copies_at_random = IS_SOAK or not wrapper.compiles
    program.take_what_is_hard_to_read()
    for number in range(ACTIONS):
        program.act()
        if number == ACTIONS // 2 and not program.copies_at_random:
            program.copy()
    assert program.expected.skipped > ACTIONS / 20
