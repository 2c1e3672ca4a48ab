"""Long runs and runs that are killed, on every wrapper: `python -m tools.soak` runs them by pytest.

They take some hours, and need the test environment.
"""

import gc
import os
import pathlib
import pickle
import random
import subprocess
import sys
import time

import pytest

from conformance.random_programs import Run

STEPS = int(os.environ.get("LOSSSCALE_SOAK_STEPS", "20000"))
KILLS = int(os.environ.get("LOSSSCALE_SOAK_KILLS", "3"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist"),
    pytest.mark.filterwarnings("ignore:A step was skipped at the minimum loss scale"),
]


def write_checkpoint(program, number):
    """Writes where a program stands, so that a folder of that name is whole or is not there."""
    unfinished = program.folder / f"unfinished-{number}"
    unfinished.mkdir()
    program.harness.save(unfinished / "state.weights.h5")
    (unfinished / "expected.pickle").write_bytes(pickle.dumps(program.expected))
    unfinished.rename(program.folder / f"checkpoint-{number}")


def resume(program):
    """Continues from the newest checkpoint, and returns its number."""
    found = program.folder.glob("checkpoint-*")
    number, newest = max((int(path.name.rpartition("-")[2]), path) for path in found)
    program.harness.load(newest / "state.weights.h5")
    program.expected = pickle.loads((newest / "expected.pickle").read_bytes())
    program.has_loaded()
    return number


def held():
    """Returns how much this process holds: memory in MiB, objects of Python, open files."""
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    files = len(os.listdir("/proc/self/fd"))
    return int(resident.split()[1]) / 1024, len(gc.get_objects()), files


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
from tools import soak_runs as here

wrapper = next(each for each in WRAPPERS if each.name == sys.argv[1])
program = Run(wrapper, int(sys.argv[2]), pathlib.Path(sys.argv[3]))
for number in range(100_000):
    program.step()
    here.write_checkpoint(program, number)
"""


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
    assert resume(program) + 1 == program.expected.steps
    for _ in range(20):
        program.act()
