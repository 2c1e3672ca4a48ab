import pytest

from lossscale import errors


def defined():
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }


BUILT_IN = {
    errors.LossScaleError: [Exception],
    errors.ArgumentError: [ValueError],
    errors.ArgumentTypeError: [TypeError],
    errors.AlreadyWrappedError: [TypeError, ValueError],
    errors.GradientsError: [ValueError],
    errors.MalformedGradientsError: [TypeError],
    errors.UnknownSlotError: [KeyError],
    errors.UnknownSettingError: [AttributeError],
    errors.ScalerArgumentError: [ValueError, AssertionError],
    errors.CallOrderError: [RuntimeError, AssertionError],
    errors.StateDictError: [RuntimeError, KeyError],
    errors.UnsupportedError: [NotImplementedError],
    errors.LossScaleWarning: [UserWarning],
}


@pytest.mark.parametrize("raised", BUILT_IN)
def test_code_that_catches_the_built_in_exception_goes_on_working(raised):
    for caught_by in BUILT_IN[raised]:
        with pytest.raises(caught_by, match=r"^What happened\.$"):
            raise raised("What happened.")


@pytest.mark.parametrize("name", defined())
def test_every_error_and_no_warning_is_caught_by_the_base_class(name):
    assert issubclass(defined()[name], errors.LossScaleError) == name.endswith("Error")


def test_the_message_of_an_unknown_slot_is_a_sentence_without_quotes_around_it():
    message = "The optimizer has no slot 'momentum'.\nIts slots: 'm', 'v'."
    assert str(errors.UnknownSlotError(message)) == message
    assert str(errors.UnknownSlotError()) == ""
