"""Programs of the years of TensorFlow 2.2 to 2.11 run unedited on Keras 2; two CPUs are virtual."""

import pytest

import old_programs


@pytest.fixture(autouse=True)
def _two_replicas(monkeypatch, two_replicas):
    old_programs.on_two_replicas(monkeypatch, two_replicas)


@old_programs.every_program
def test_an_old_program_learns(name, caplog, capsys):
    old_programs.run(name, caplog, capsys)
