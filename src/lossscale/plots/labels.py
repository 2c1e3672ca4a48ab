"""Long names in a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest


def shortened(names: Sequence[str], length: int) -> list[str]:
    """Returns names without their middles, where they are too long; different ones stay different.

    Args:
        names: Names, such as the paths of variables. The end of a path says most.
        length: How many characters may be left of each.

    Examples:
        >>> shortened(["encoder/attention/query/kernel", "head/bias"], 20)
        ['encode…/query/kernel', 'head/bias']
        >>> shortened([f"encoder/block_{n}/attention/query/kernel" for n in (1, 2)], 24)
        ['…/block_1/…/query/kernel', '…/block_2/…/query/kernel']
    """
    short = [_without_middle(name, length, (length - 1) // 3) for name in names]
    for alike in _alike(names, short).values():
        for index in alike:
            tail = _where_they_differ(names[index], [names[other] for other in alike])
            short[index] = _without_middle(tail, length, 0)
    for alike in _alike(names, short).values():
        for number, index in enumerate(alike, start=1):
            mark = f"({number}) "
            short[index] = mark + _without_middle(short[index], length - len(mark), 0)
    return short


def _alike(names: Sequence[str], short: Sequence[str]) -> dict[str, list[int]]:
    """Where different names have become the same text, by that text."""
    places: dict[str, list[int]] = {}
    for index, text in enumerate(short):
        places.setdefault(text, []).append(index)
    return {
        text: found for text, found in places.items() if len({names[index] for index in found}) > 1
    }


def _where_they_differ(name: str, others: Sequence[str]) -> str:
    """The parts of a path that tell it apart from others, and its end."""
    columns = zip_longest(*(other.split("/") for other in others))
    parts = name.split("/")
    kept = [
        part if len(set(column)) > 1 or number >= len(parts) - 2 else ""
        for number, (part, column) in enumerate(zip(parts, columns, strict=False))
    ]
    # An ellipsis stands for the omitted parts, however many.
    text = "/".join(part or "…" for part in kept)
    while "…/…" in text:
        text = text.replace("…/…", "…")
    return text


def _without_middle(name: str, length: int, front: int) -> str:
    return name if len(name) <= length else f"{name[:front]}…{name[front + 1 - length :]}"
