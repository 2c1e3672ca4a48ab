"""Programs made at random do what NumPy computes; `tools.soak` runs more and longer ones."""

import gc
import os
import pathlib
import random
import subprocess
import sys
import time

import pytest

from conformance.random_programs import Run

# Each wrapper compiles two steps, which takes longer than hundreds of them. So a program is long,
# and in the place of many short ones. `tools.soak` sets these.
IS_SOAK = "LOSSSCALE_SOAK_PROGRAMS" in os.environ
PROGRAMS = int(os.environ.get("LOSSSCALE_SOAK_PROGRAMS", "1"))
ACTIONS = 250 if IS_SOAK else 120
STEPS = int(os.environ.get("LOSSSCALE_SOAK_STEPS", "20000"))
KILLS = int(os.environ.get("LOSSSCALE_SOAK_KILLS", "3"))

soak = pytest.mark.skipif(not IS_SOAK, reason="tools.soak runs it")
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


def held():
    """Returns how much this process holds: memory in MiB, objects of Python, open files."""
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    files = len(os.listdir("/proc/self/fd"))
    return int(resident.split()[1]) / 1024, len(gc.get_objects()), files


@soak
def test_a_long_run_is_exact_and_holds_no_more_at_its_end(wrapper, tmp_path):
    program = Run(wrapper, 0, tmp_path)

    def run(steps):
        for _ in range(steps):
            program.step()
            program.check()
            program.log.clear()
        return held()

    run(STEPS // 10)
    middle, end = run(STEPS * 4 // 10), run(STEPS // 2)
    print(f"{wrapper.name}: {STEPS} steps, {program.expected.skipped} skipped, {middle} -> {end}")
    # A byte a step would be this much.
    assert end[0] - middle[0] < 8
    assert end[1] - middle[1] < STEPS / 100
    assert end[2] <= middle[2]


KILLED = """
import sys, pathlib
from conformance.random_programs import Run
from conformance.wrappers import WRAPPERS

wrapper = next(each for each in WRAPPERS if each.name == sys.argv[1])
program = Run(wrapper, int(sys.argv[2]), pathlib.Path(sys.argv[3]))
for number in range(100_000):
    program.step()
    program.write_checkpoint(number)
"""


@soak
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_run_that_is_killed_while_it_saves_goes_on_exactly(wrapper, seed, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, wrapper.name, str(seed), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
    )
    started = time.monotonic()
    while not list(tmp_path.glob("checkpoint-*")):
        assert child.poll() is None, "the program has ended by itself"
        assert time.monotonic() - started < 120
        time.sleep(0.05)
    time.sleep(random.Random(seed).uniform(0.0, 1.0))
    child.kill()
    child.wait()
    program = Run(wrapper, seed, tmp_path)
    assert program.resume() + 1 == program.expected.steps
    for _ in range(20):
        program.act()
