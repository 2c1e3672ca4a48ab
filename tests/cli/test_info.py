"""`lossscale info`: versions without imports, and why a framework is not available."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata

import pytest

from lossscale.cli import environment, info
from lossscale.cli.console import progress
from lossscale.cli.main import main
from lossscale.cli.trial_step import take_trial_step

NAMES = [stack.name for stack in environment.STACKS]


def found(capsys, *arguments):
    assert main(["info", "--json", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_versions_are_those_of_the_packages(capsys):
    import matplotlib
    import numpy

    report = found(capsys)
    assert report["python"] == platform.python_version()
    assert report["lossscale"] == metadata.version("lossscale")
    assert report["packages"]["numpy"] == numpy.__version__
    assert report["packages"]["matplotlib"] == matplotlib.__version__
    assert list(report["packages"]) == list(environment.PACKAGES)


def installed(monkeypatch, **versions):
    every = dict.fromkeys(environment.PACKAGES, None) | versions
    monkeypatch.setattr(info, "installed_versions", lambda: every)


def test_a_machine_with_nothing(monkeypatch, capsys):
    installed(monkeypatch)
    report = found(capsys)
    assert [framework["available"] for framework in report["frameworks"]] == [False] * len(NAMES)
    assert report["frameworks"][1]["reason"] == (
        'keras is not installed: pip install "lossscale[keras,jax]"'
    )
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "tensorflow  -" in out
    assert 'tf_keras is not installed: pip install "lossscale[tf-keras]"' in out


@pytest.mark.parametrize(
    ("versions", "available"),
    [
        ({"keras": "3.15.1", "jax": "0.10.2"}, ["Keras 3 on JAX"]),
        ({"keras": "3.9.0", "tensorflow": "2.18.0", "tf_keras": "2.18.0"}, [NAMES[0], NAMES[3]]),
        ({"keras": "3.9.0", "torch": "2.13.0+cpu"}, ["Keras 3 on PyTorch", NAMES[4]]),
        ({"keras": "unknown", "torch": "unknown"}, ["Keras 3 on PyTorch", NAMES[4]]),
        ({"keras": "3.10.0rc1", "jax": "0.6.0.dev20250101"}, ["Keras 3 on JAX"]),
        ({"keras": "3.8.0", "tensorflow": "2.21.0"}, []),
        ({"keras": "2.15.0", "tensorflow": "2.21.0"}, []),
        ({"keras": "4.0.0", "jax": "0.10.2"}, []),
        ({"jax": "0.10.2", "torch": "2.13.0"}, ["PyTorch, without Keras"]),
        ({"jax": "0.10.2", "optax": "0.2.8"}, ["JAX with Optax"]),
        ({"torch": "2.0.0", "optax": "0.2.8"}, []),
    ],
)
def test_which_frameworks_are_available(monkeypatch, versions, available, capsys):
    installed(monkeypatch, **versions)
    frameworks = found(capsys)["frameworks"]
    assert [framework["name"] for framework in frameworks] == NAMES
    assert [framework["name"] for framework in frameworks if framework["available"]] == available
    assert all((framework["reason"] is None) == framework["available"] for framework in frameworks)


def test_the_reason_names_the_version(monkeypatch, capsys):
    installed(monkeypatch, keras="3.8.0", jax="0.10.2", tensorflow="2.21.0", tf_keras="3.0.0")
    reasons = [framework["reason"] for framework in found(capsys)["frameworks"]]
    assert reasons[1].startswith("keras 3.8.0 is too old, it needs 3.9 or later: pip install")
    assert reasons[3].startswith("tf_keras 3.0.0 is not supported, only tf_keras 2: pip install")


def test_a_package_without_metadata_and_one_that_is_blocked(monkeypatch, tmp_path):
    (tmp_path / "tf_keras").mkdir()
    (tmp_path / "tf_keras" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr(environment.metadata, "packages_distributions", dict)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tf_keras", raising=False)
    monkeypatch.setitem(sys.modules, "jax", None)
    versions = environment.installed_versions()
    assert versions["tf_keras"] == "unknown"
    assert versions["jax"] is None


def test_metadata_that_names_no_version(monkeypatch):
    def version(name):
        if name == "gone":
            raise metadata.PackageNotFoundError(name)
        return {"nothing": None, "tensorflow-cpu": "2.21.0"}[name]

    monkeypatch.setattr(environment.metadata, "version", version)
    assert environment._version(["gone", "nothing", "tensorflow-cpu"]) == "2.21.0"
    assert environment._version(["gone", "nothing"]) == "unknown"


@pytest.mark.parametrize(
    ("variable", "content", "expected"),
    [
        ("jax", '{"backend": "torch"}', ("jax", "KERAS_BACKEND")),
        (None, '{"backend": "torch"}', ("torch", "keras.json")),
        ("", '{"backend": "torch"}', ("torch", "keras.json")),
        (None, "{", ("tensorflow", "the default")),
        (None, "[]", ("tensorflow", "the default")),
        (None, '{"floatx": "float32"}', ("tensorflow", "the default")),
        (None, None, ("tensorflow", "the default")),
    ],
)
def test_the_backend_of_keras(monkeypatch, tmp_path, variable, content, expected):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if variable is not None:
        monkeypatch.setenv("KERAS_BACKEND", variable)
    if content is not None:
        (tmp_path / "keras.json").write_text(content)
    backend, source = environment.keras_backend()
    assert (backend, source.rpartition("/")[2]) == expected


def test_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.gpus() is None
    command = tmp_path / "nvidia-smi"
    command.touch(0o755)
    command.write_text("#!/bin/sh\necho 'NVIDIA H200'; echo 'NVIDIA H200'\n")
    assert environment.gpus() == ["NVIDIA H200", "NVIDIA H200"]
    command.write_text("#!/bin/sh\necho 'no driver' >&2; exit 9\n")
    assert environment.gpus() == []


STACK = environment.STACKS[1]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("raise ImportError('libcudart.so.11.0: not found')", "libcudart.so.11.0: not found"),
        ("import os; os.abort()", "exit status -6"),
        ("import sys; sys.exit(3)", "exit status 3"),
    ],
    ids=["import error", "crash", "exit"],
)
def test_a_broken_package_is_one_line(tmp_path, monkeypatch, line, error):
    (tmp_path / "keras.py").write_text(f"{line}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = take_trial_step(STACK)
    assert error in result["error"]
    assert "\n" not in result["error"]
    assert result["devices"] == []


def test_check_takes_a_step_and_a_failure_is_exit_status_1(tmp_path, monkeypatch, capsys):
    installed(monkeypatch, jax="0.10.2", optax="0.2.8", torch="2.13.0")
    checked = [s for s in found(capsys, "--check")["frameworks"] if s["available"]]
    assert [(s["error"], bool(s["devices"])) for s in checked] == [(None, True)] * 2
    # One with Keras.
    assert take_trial_step(STACK)["error"] is None
    for name in ("keras", "optax"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('it is broken')\n")
    installed(monkeypatch, keras="3.15.1", jax="0.10.2", optax="0.2.8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["info", "--check"]) == 1
    out, err = capsys.readouterr()
    assert out.count("no, it failed: ImportError: it is broken") == 2
    assert "Traceback" not in out + err


@pytest.mark.parametrize("has_rich", [True, False])
def test_progress_is_not_shown_without_a_terminal_and_works_without_rich(
    has_rich, monkeypatch, capsys
):
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    with progress("Working", 3, at_once=True) as show:
        show(2)
    assert capsys.readouterr() == ("", "")
