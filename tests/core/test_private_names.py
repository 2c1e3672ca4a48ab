"""What is taken from a framework that does not document it says so where it has gone."""

import pytest

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
