import pytest

from lossscale import errors


def defined():
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }


@pytest.mark.parametrize("name", defined())
def test_an_error_says_what_it_is_given_and_is_caught_by_the_base_class(name):
    assert issubclass(defined()[name], errors.LossScaleError) == name.endswith("Error")
    assert str(defined()[name]("What happened.")) == "What happened."


def test_the_message_of_an_unknown_slot_is_a_sentence_without_quotes_around_it():
    message = "The optimizer has no slot 'momentum'.\nIts slots: 'm', 'v'."
    assert str(errors.UnknownSlotError(message)) == message
    assert str(errors.UnknownSlotError()) == ""
