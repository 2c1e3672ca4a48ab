"""The monitor's arguments, which are checked before any framework is imported."""

import pytest

from lossscale.callbacks import LossScaleMonitor
from lossscale.errors import ArgumentError, ArgumentTypeError


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ArgumentError, "every=0"),
        ({"every": 2.5}, ArgumentError, r"every=2\.5"),
        ({"every": True}, ArgumentError, "every=True"),
        ({"path": 3}, ArgumentTypeError, "path=3 of type int"),
        ({"path": b"run.jsonl"}, ArgumentTypeError, "of type bytes"),
        ({"on_floor": "stop"}, ArgumentError, "on_floor='stop'"),
        ({"evry": 3}, TypeError, "unexpected keyword argument 'evry'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_bad_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        LossScaleMonitor(**arguments)
