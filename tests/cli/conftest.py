"""What the tests of the commands share."""

import pytest

from lossscale.cli import main


@pytest.fixture
def refused(capsys):
    """Runs a command that cannot do what it is asked to; returns its one line of error."""

    def run(*arguments):
        assert main(list(map(str, arguments))) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("lossscale: ")
        assert err.count("\n") == 1
        assert err[:-1].isprintable()
        assert len(err) < 3000
        return err

    return run
