"""The first line of a history: what is known about the run as a whole."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from lossscale.diagnostics.json_forms import Conversion, FormatVersion, JsonForm, parsed
from lossscale.errors import ArgumentError
from lossscale.rules import RULES, ScaleRule

FORMAT_VERSION = 1
"""What the key "lossscale_history" of the first line says."""


@dataclasses.dataclass(frozen=True)
class HistoryHeader:
    """What is known about a run as a whole.

    Attributes:
        rule: The rule of the loss scale: its class name and its configuration, JSON-ready.
        versions: Name of a package to its version.
        started: When the run started, in ISO 8601 with a time zone.

    Example:
        >>> from lossscale import DynamicScale
        >>> header = HistoryHeader.of(DynamicScale(initial_scale=8), {"keras": "3.15.1"})
        >>> header.rule["class_name"], header.versions["keras"]
        ('DynamicScale', '3.15.1')
        >>> header.scale_rule() == DynamicScale(initial_scale=8)
        True
    """

    rule: Mapping[str, Any]
    versions: Mapping[str, str]
    started: str

    @classmethod
    def of(cls, rule: ScaleRule, versions: Mapping[str, str] | None = None) -> HistoryHeader:
        """Returns the header of a run that starts now.

        Args:
            rule: The rule of its loss scale.
            versions: Versions of the packages in use. Those of Python and lossscale are added.
        """
        return cls(
            rule={"class_name": type(rule).__name__, "config": rule.get_config()},
            versions={
                "python": platform.python_version(),
                "lossscale": metadata.version("lossscale"),
                **(versions or {}),
            },
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def scale_rule(self) -> ScaleRule | None:
        """Returns the rule, or None if it is not one of this library."""
        if self.rule["class_name"] not in RULES:
            return None
        rule: ScaleRule = RULES[self.rule["class_name"]](**self.rule["config"])
        return rule

    def to_json(self) -> dict[str, Any]:
        """Returns the header as a dictionary of strict JSON."""
        return _FORM.write(self)

    @classmethod
    def from_json(cls, line: Any) -> HistoryHeader:
        """Returns the header that `to_json` has described.

        Raises:
            ArgumentError: If it is no such dictionary; the message says what is wrong with it.
        """
        found = _FORM.read(line)
        try:
            found.scale_rule()
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"the rule of the first line cannot be made: {error}") from error
        return found


def _read_rule(found: Any) -> dict[str, Any]:
    if not (
        isinstance(found, dict)
        and isinstance(found.get("class_name"), str)
        and isinstance(found.get("config"), dict)
    ):
        raise TypeError(f"`rule` must be an object with `class_name` and `config`, not {found!r}")
    return found


def _read_versions(found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        raise TypeError(f"`versions` must be an object, not {found!r}")
    return found


def _read_started(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"`started` must be a text, not {found!r}")
    return found


_FORM = JsonForm(
    cls=HistoryHeader,
    what="a history",
    subject="the first line",
    conversions={
        "rule": Conversion(dict, _read_rule),
        "versions": Conversion(dict, _read_versions),
        "started": Conversion(str, _read_started),
    },
    version=FormatVersion("lossscale_history", FORMAT_VERSION, begins="a history starts with"),
)


def parsed_header(line: bytes, name: str) -> HistoryHeader:
    """Returns the header that the first line of a file describes.

    Raises:
        ArgumentError: If it describes none; the message has the name of the file.
    """
    try:
        value = parsed(line)
    except ValueError as error:
        raise ArgumentError(
            f"{name}: this is no history of a training run: its first line is no JSON ({error})."
        ) from error
    try:
        return HistoryHeader.from_json(value)
    except Exception as error:
        raise ArgumentError(f"{name}, line 1: {error}") from error
