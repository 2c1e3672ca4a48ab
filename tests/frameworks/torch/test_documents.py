"""The examples in docstrings, and the programs on the pages, of what serves PyTorch itself."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import warnings

import pytest
import torch

import lossscale
import lossscale.torch
from pages import programs

PACKAGE = lossscale.torch
# That of the wrapper is found where its class says that it is.
# Its names are loaded when they are first used; the examples of two belong to the package.
PUBLIC = {name: getattr(PACKAGE, name) for name in PACKAGE.__all__}
MODULES = [PACKAGE.__name__]
MODULES += [m.name for m in pkgutil.walk_packages(PACKAGE.__path__, f"{PACKAGE.__name__}.")]
TRIED = {}

BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("from_gradscaler.md", "trainers.md")
    for number, block in enumerate(programs(page), start=1)
    # These run in several processes, in cases_of_parallel.py.
    if not re.search("^(import ray|from torchtitan)", block, re.MULTILINE)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_show(name):
    module = importlib.import_module(name)
    names = {**vars(module), "torch": torch, "lossscale": lossscale}
    failed, TRIED[name] = doctest.testmod(
        module, globs=names, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0


def test_the_examples_are_found_and_all_that_is_public_has_some():
    with_examples = {name.rpartition(".")[2] for name, tried in TRIED.items() if tried}
    assert with_examples >= {"installation", "scheduler", "state_dict", "scale", "torch", "ranks"}
    for name, member in PUBLIC.items():
        assert ">>>" in (member.__doc__ or ""), name
    assert len(BLOCKS) >= 9


@pytest.mark.parametrize("source", BLOCKS)
def test_a_program_on_a_page_prints_what_it_says(source):
    expected = re.search(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)[1]
    # Where PyTorch alone is installed, there are no trainers.
    for name in re.findall(
        r"^(?:import|from) (accelerate|lightning|transformers)", source, re.MULTILINE
    ):
        pytest.importorskip(name)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        # Lightning and Accelerate warn of their surroundings; a page must not show our warnings.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="lossscale")
        exec(compile(source, "<page>", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip().splitlines()[-1] == expected
