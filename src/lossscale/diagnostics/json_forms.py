"""Dataclasses as JSON objects: one way to write them, to read them, and to say what is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from lossscale.errors import ArgumentError, LossScaleError

T = TypeVar("T")


class Conversion(NamedTuple):
    """How a field stands in JSON.

    Attributes:
        written: From the value of the field to its JSON.
        read: And back. A `TypeError` or `ValueError` of it says what is wrong.
    """

    written: Callable[[Any], Any]
    read: Callable[[Any], Any]


class FormatVersion(NamedTuple):
    """The first key of a file, by which other JSON and later formats are told apart.

    Attributes:
        key: The key.
        number: The number of the format that is written, the only one that can be read.
        begins: The start of the sentence about JSON that lacks it.
    """

    key: str
    number: int
    begins: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonForm(Generic[T]):
    """The JSON objects that describe the instances of a dataclass: a key for each field.

    Attributes:
        cls: The dataclass. What its constructor refuses cannot be read.
        what: What an instance is called in messages.
        subject: What the JSON object is called in messages.
        conversions: For each field that is not JSON as it is.
        leaves_out: Whether a field that has its default is not written, and may be missing.
        version: The first key, if there is one.
        ignores: Whether other keys are passed over. Otherwise they are an error.
        newer: Fields with a default that objects of older releases lack.
    """

    cls: type[T]
    what: str
    subject: str
    conversions: Mapping[str, Conversion] = dataclasses.field(default_factory=dict)
    leaves_out: bool = False
    version: FormatVersion | None = None
    ignores: bool = False
    newer: frozenset[str] = frozenset()

    def write(self, value: T) -> dict[str, Any]:
        """Returns the object that describes an instance."""
        line: dict[str, Any] = {}
        if self.version is not None:
            line[self.version.key] = self.version.number
        for field in self._fields:
            found = getattr(value, field.name)
            if self.leaves_out and _has_default(field) and found == _default(field):
                continue
            conversion = self.conversions.get(field.name)
            line[field.name] = found if conversion is None else conversion.written(found)
        return line

    def read(self, line: Any) -> T:
        """Returns the instance that `write` has described.

        Raises:
            ArgumentError: If the object describes none; the message says what is wrong with it.
        """
        self._check_version(line)
        if not isinstance(line, Mapping):
            raise ArgumentError(f"{self.subject} must be a JSON object, not {line!r}")
        self._check_keys(line)
        described = {}
        try:
            for field in self._fields:
                if field.name in line:
                    conversion = self.conversions.get(field.name)
                    found = line[field.name]
                    described[field.name] = found if conversion is None else conversion.read(found)
            return self.cls(**described)
        except LossScaleError:
            raise
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"{self.subject} must have {self._keys}, as they are written: {error}"
            ) from error

    def text(self, value: T) -> str:
        """Returns the JSON of an instance.

        Raises:
            ArgumentError: If a value in it is no JSON.
        """
        return json_text(self.write(value))

    def from_text(self, text: str) -> T:
        """Returns the instance that `text` has described.

        Raises:
            ArgumentError: If it describes none; the message says what is wrong with it.
        """
        try:
            line = parsed(text)
        except ValueError as error:
            raise ArgumentError(f"This is not the JSON of {self.what}: {error}.") from error
        return self.read(line)

    @property
    def _fields(self) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(self.cls)  # type: ignore[arg-type]

    def _may_be_missing(self, field: dataclasses.Field[Any]) -> bool:
        return (self.leaves_out or field.name in self.newer) and _has_default(field)

    @property
    def _keys(self) -> str:
        optional = [field.name for field in self._fields if self._may_be_missing(field)]
        keys = _listed([f"`{f.name}`" for f in self._fields if f.name not in optional])
        if optional:
            keys += f", and may have {_listed([f'`{name}`' for name in optional])}"
        return keys

    def _check_version(self, line: Any) -> None:
        if self.version is None:
            return
        number = line.get(self.version.key) if isinstance(line, Mapping) else None
        if number is None:
            raise ArgumentError(
                f'{self.version.begins} a JSON object that has "{self.version.key}"; this does not'
            )
        if number != self.version.number:
            raise ArgumentError(
                f"this is {self.what} of format {number!r}, and only format {self.version.number} "
                "can be read: a newer lossscale may read it"
            )

    def _check_keys(self, line: Mapping[str, Any]) -> None:
        known = {field.name for field in self._fields}
        if self.version is not None:
            known.add(self.version.key)
        missing = [
            field.name
            for field in self._fields
            if field.name not in line and not self._may_be_missing(field)
        ]
        unknown = [] if self.ignores else [name for name in line if name not in known]
        if missing or unknown:
            said = [
                f"{_listed([repr(name) for name in names])} {why}"
                for names, why in ((missing, "missing"), (unknown, "not known"))
                if names
            ]
            raise ArgumentError(
                f"{self.subject} must have {self._keys}. Received the keys {list(line)}: "
                f"{', '.join(said)}"
            )


def json_text(value: Any, separators: tuple[str, str] | None = None) -> str:
    """Returns strict JSON, on one line of ASCII.

    Args:
        value: Nested dictionaries, lists, texts and numbers.
        separators: As of `json.dumps`.

    Raises:
        ArgumentError: If there is something else in it, such as an infinity.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=separators)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"This cannot be written as strict JSON: {error}.") from error


def parsed(text: str | bytes) -> Any:
    """Returns what strict JSON says.

    Args:
        text: The JSON; bytes are UTF-8.

    Raises:
        ArgumentError: If it has numbers that are no JSON, or brackets nested too deep.
        ValueError: If it is no JSON, such as the first half of some.
    """

    def refuse(constant: str) -> NoReturn:
        raise ArgumentError(f"{constant} is no JSON")

    whole = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        return json.loads(whole, parse_constant=refuse)
    except RecursionError as error:
        raise ArgumentError("the brackets are nested too deep") from error


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
