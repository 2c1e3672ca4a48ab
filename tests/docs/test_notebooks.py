"""The notebooks of examples/notebooks run as they are, and print what is stored in them."""

import os
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

from pages import OF_THE_MACHINE

BACKENDS = {"torch_digits": "torch", "keras_fit": "tensorflow", "flax_digits": "jax"}
FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "notebooks"


def outputs_of(notebook):
    """What each cell prints, without figures that rounding decides; and the types of pictures."""
    found = []
    for cell in notebook.cells:
        # A slow cell's stream comes in several parts.
        streams, shown = {"stdout": "", "stderr": ""}, []
        for output in cell.get("outputs", ()):
            if "text" in output:
                streams[output["name"]] += output["text"]
            else:
                shown += sorted(output.get("data", ()))
        lines = streams["stderr"].splitlines(keepends=True)
        streams["stderr"] = "".join(line for line in lines if not OF_THE_MACHINE.match(line))
        found += [re.sub(r"[\d.]+", "N", text) for text in streams.values() if text] + shown
    return found


def test_every_notebook_has_a_backend():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(BACKENDS)


@pytest.mark.parametrize(
    "name", [name for name, backend in BACKENDS.items() if backend == os.environ["KERAS_BACKEND"]]
)
def test_a_notebook_prints_what_is_stored_in_it(name):
    stored = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    run = nbformat.from_dict(stored)
    # A warning of ours is an error, wherever in the program it is raised.
    first = "import warnings\nwarnings.filterwarnings('error', module='lossscale|__main__')"
    run.cells.insert(0, nbformat.v4.new_code_cell(first))
    NotebookClient(run, timeout=300).execute()
    assert outputs_of(run) == outputs_of(stored)
    assert len(outputs_of(stored)) >= 3
