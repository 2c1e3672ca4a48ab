"""What is taken from a framework that does not document it says so where it has gone."""

import ast
import re

import pytest

from core.source_tree import PACKAGE
from lossscale.common.private_names import private_module, private_name
from lossscale.errors import UnsupportedError


def test_a_name_that_is_gone_is_named_with_what_needs_it():
    with pytest.raises(UnsupportedError, match=r"^json .* has no json\.decoder\.Gone\.away, which"):
        private_name("json.decoder", "Gone.away", "read what nobody wrote")
    with pytest.raises(UnsupportedError, match=r"json\.gone.* needs to be read\."):
        private_module("json.gone", "be read")
    assert private_name("json.decoder", "Gone", "be replaced", fallback=3) == 3
    assert private_name("json", "decoder.JSONDecoder", "read").__name__ == "JSONDecoder"


def test_a_framework_that_is_not_installed_says_so_itself():
    with pytest.raises(ModuleNotFoundError, match="no_such_framework"):
        private_name("no_such_framework.src", "name", "be found", fallback=3)


def lookups():
    """The calls of these functions in the sources; of an f-string, only the first part is known."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            name = getattr(getattr(node, "func", None), "id", None)
            if name in ("private_name", "private_module") and path.name != "private_names.py":
                yield ast.unparse(ast.Call(node.func, node.args, [])), text


LOOKUPS = dict(lookups())


def test_the_lookups_are_found():
    assert len(LOOKUPS) > 10


@pytest.mark.parametrize("call", LOOKUPS)
def test_this_release_of_a_framework_has_every_name(call):
    """Fallbacks are for other releases: where one serves here, a name has moved unnoticed."""
    constants = re.findall(r'^_\w+ = ".*"$', LOOKUPS[call], re.MULTILINE)
    names = {"private_name": private_name, "private_module": private_module}
    exec("\n".join(constants), names)
    eval(call, names)


def test_a_step_that_a_scheduler_counts_is_pytorchs_own():
    torch = pytest.importorskip("torch")
    from lossscale.torch.fused import steps_as_torch

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer)
    assert steps_as_torch(optimizer)
