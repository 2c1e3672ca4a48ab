import builtins
import re

import pytest

from lossscale import errors

DRAWN = re.compile(r"^(?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+)(?:\((?P<parents>[\w, ]+)\))?")


def drawn_parents():
    """The parents of every class in the tree of the module's docstring, by name."""
    tree = errors.__doc__.split("```")[1]
    parents, above = {}, []
    for line in tree.strip("\n").splitlines():
        match = DRAWN.match(line)
        # The lines without a class continue the text beside the one before.
        if not match or len(match["indent"]) > 12:
            continue
        depth = len(match["indent"])
        above = [(d, name) for d, name in above if d < depth]
        beside = re.split(r",\s*", match["parents"]) if match["parents"] else []
        parents[match["name"]] = [name for _, name in above[-1:]] + beside
        above.append((depth, match["name"]))
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
