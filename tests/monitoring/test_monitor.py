"""Files of a run that cannot be written: said once, and training goes on."""

from __future__ import annotations

import os
import threading
import warnings

import pytest

from lossscale import DynamicScale
from lossscale.errors import LossScaleWarning, RecordingError
from lossscale.monitoring import Monitor, MonitorSettings, StepStats, TrainingHistory

RULE = DynamicScale()


def recorder(path=None, **settings):
    return Monitor(MonitorSettings(path, **settings), RULE)


def record(step):
    return StepStats(step, 32768.0, 32768.0, 0, False, loss=0.5)


def fill_the_disk(found):
    """Has every later write to the history fail as on a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    (writer,) = (each for each in found._writers.values() if hasattr(each, "_file"))
    os.dup2(full, writer._file.fileno())
    os.close(full)


def test_a_full_disk_is_said_once_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "run.jsonl"
    found = recorder(path)
    found.open()
    found.observe(record(1))
    fill_the_disk(found)
    message = r"The history '.*run\.jsonl' cannot be written any more: No space left on device\. "
    with pytest.warns(LossScaleWarning, match=message + r"From step 2 on.*Training goes on"):
        found.observe(record(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.observe(record(3))
        found.flush()
        # A second fit, and going back to a checkpoint.
        found.close()
        found.open()
        found.observe(record(2))
        found.close()
    assert TrainingHistory.read(path).steps == [1]


def test_on_write_error_raise_ends_training_with_the_name_of_the_file(tmp_path):
    found = recorder(tmp_path / "run.jsonl", on_write_error="raise")
    found.open()
    fill_the_disk(found)
    with pytest.raises(RecordingError, match=r"run\.jsonl' cannot be written.*No space left"):
        found.observe(record(1))
    found.close()


def test_alarms_go_on_without_the_file(tmp_path):
    found = recorder(tmp_path / "run.jsonl")
    found.open()
    fill_the_disk(found)
    with pytest.warns(LossScaleWarning, match="cannot be written"):
        found.observe(record(1))
    with pytest.warns(LossScaleWarning, match="The loss of step 2 is nan"):
        found.observe(StepStats(2, 32768.0, 16384.0, 1, True, loss=float("nan")))


@pytest.mark.parametrize("folder", ["nowhere", "run.jsonl"])
def test_a_file_that_cannot_be_made_is_an_error_before_the_first_step(tmp_path, folder):
    (tmp_path / "run.jsonl").touch()
    found = recorder(tmp_path / folder / "run.jsonl")
    with pytest.raises(RecordingError, match="cannot be recorded in the history") as caught:
        found.open()
    assert isinstance(caught.value, OSError)


def test_a_header_that_does_not_fit_the_disk(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(RecordingError, match="full': No space left on device"):
        recorder(tmp_path / "full", append=True).open()


def test_a_file_that_vanishes_while_the_run_goes_back(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    found = recorder(folder / "run.jsonl")
    found.open()
    found.observe(record(5))
    (folder / "run.jsonl").unlink()
    folder.rmdir()
    with pytest.warns(LossScaleWarning, match="No such file or directory"):
        found.observe(record(3))
    found.close()


def test_tensorboard_on_a_full_disk_neither_blocks_nor_takes_the_history_along(
    tmp_path, monkeypatch
):
    pytest.importorskip("tensorboardX")
    path = tmp_path / "run.jsonl"
    found = recorder(path, tensorboard=tmp_path / "board")
    found.open()
    (board,) = (each for each in found._writers.values() if hasattr(each, "_thread"))
    # What the thread says of its end would be an error of the test.
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(board._thread._record_writer, "write_event", fail)
    found.observe(record(1))
    board._thread.join(timeout=30)
    with pytest.warns(LossScaleWarning, match="The folder for TensorBoard '.*board' cannot be"):
        found.observe(record(2))
    for step in range(3, 40):
        found.observe(record(step))
    found.close()
    assert TrainingHistory.read(path).steps == list(range(1, 40))
