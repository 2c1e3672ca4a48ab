import builtins
import re

import pytest

from lossscale import errors

DRAWN = re.compile(r"^(?P<indent>[│├└─ ]{0,12})(?P<name>[A-Z]\w+)(?:\((?P<parents>[\w, ]+)\))?")


def drawn_parents():
    """The parents of every class in the tree of the module's docstring, by name."""
    parents, at_depth = {}, {}
    for match in map(DRAWN.match, errors.__doc__.split("```")[1].splitlines()):
        if match:
            depth, beside = len(match["indent"]) // 4, match["parents"]
            at_depth[depth] = match["name"]
            parents[match["name"]] = [at_depth[depth - 1]] if depth else []
            parents[match["name"]] += beside.split(", ") if beside else []
    return parents


def defined():
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }


def test_the_tree_in_the_docstring_is_that_of_the_classes():
    parents = {n: [base.__name__ for base in cls.__bases__] for n, cls in defined().items()}
    drawn = drawn_parents()
    assert {name: drawn[name] for name in drawn if not hasattr(builtins, name)} == parents
    assert len(parents) > 8


@pytest.mark.parametrize("name", defined())
def test_an_error_says_what_it_is_given_and_is_caught_by_the_base_class(name):
    assert issubclass(defined()[name], errors.LossScaleError) == name.endswith("Error")
    assert str(defined()[name]("What happened.")) == "What happened."


def test_the_message_of_an_unknown_slot_is_a_sentence_without_quotes_around_it():
    message = "The optimizer has no slot 'momentum'.\nIts slots: 'm', 'v'."
    assert str(errors.UnknownSlotError(message)) == message
    assert str(errors.UnknownSlotError()) == ""
