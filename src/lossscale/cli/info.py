"""`lossscale info`: versions, and what loss scaling runs on here."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

from lossscale import __version__
from lossscale.cli.console import progress
from lossscale.cli.environment import (
    STACKS,
    gpus,
    installed_versions,
    keras_backend,
    why_not,
)
from lossscale.cli.trial_step import take_trial_step


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the command."""
    parser = verbs.add_parser(
        "info",
        help="print versions, and what loss scaling runs on here",
        description="Prints versions and which frameworks loss scaling runs on, and why not on "
        "the others. Nothing is imported for that. It needs no package but lossscale.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also import each framework and take one step with it, in a process of its own "
        "(several seconds each)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints what is installed.

    Args:
        arguments: `check` and `json`, as parsed.

    Returns:
        The exit status: 0, or 1 if a framework that is installed does not work.
    """
    found = _found()
    if arguments.check:
        _check(found["frameworks"])
    if arguments.json:
        print(json.dumps(found, allow_nan=False, indent=2))
    else:
        print("\n".join(_lines(found)))
    return int(any(framework.get("error") for framework in found["frameworks"]))


def _found() -> dict[str, Any]:
    versions = installed_versions()
    backend, source = keras_backend()
    reasons = [why_not(stack, versions) for stack in STACKS]
    return {
        "lossscale": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "keras_backend": {"name": backend, "set_by": source},
        "gpus": gpus(),
        "frameworks": [
            {"name": stack.name, "available": reason is None, "reason": reason}
            for stack, reason in zip(STACKS, reasons, strict=True)
        ],
    }


def _check(frameworks: list[dict[str, Any]]) -> None:
    available = [
        (stack, entry)
        for stack, entry in zip(STACKS, frameworks, strict=True)
        if entry["available"]
    ]
    with progress("Checking", len(available), at_once=True) as show:
        for done, (stack, entry) in enumerate(available, start=1):
            entry.update(take_trial_step(stack))
            show(done)


def _lines(found: dict[str, Any]) -> list[str]:
    backend = found["keras_backend"]
    frameworks = found["frameworks"]
    return [
        f"lossscale {found['lossscale']}",
        f"Python {found['python']} on {found['platform']}",
        f"GPUs: {_gpus(found['gpus'])}",
        "",
        "Packages",
        *_columns([(name, version or "-") for name, version in found["packages"].items()]),
        "",
        f"Keras 3 would compute with {backend['name']} (set by {backend['set_by']}).",
        "Loss scaling runs on",
        *_columns([(framework["name"], _verdict(framework)) for framework in frameworks]),
    ]


def _gpus(names: list[str] | None) -> str:
    if names is None:
        return "none seen (there is no nvidia-smi)"
    return ", ".join(names) or "none"


def _verdict(framework: dict[str, Any]) -> str:
    if not framework["available"]:
        return f"no: {framework['reason']}"
    if "error" not in framework:
        return "yes"
    if framework["error"] is not None:
        return f"no, it failed: {framework['error']}"
    return (
        f"yes, checked in {framework['seconds']:.0f} seconds on {', '.join(framework['devices'])}"
    )


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:{width}}  {value}" for name, value in rows]
