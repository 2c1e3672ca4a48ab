"""Numbers as they are written on a command line."""

from __future__ import annotations

import argparse


def integer(text: str, lowest: int, highest: int) -> int:
    """Returns the integer that a text shows.

    Raises:
        argparse.ArgumentTypeError: If it shows none, or one that is out of the range.
    """
    # isdecimal() keeps out what int() would take: "1_0", " 7", "-1".
    if not (text.isascii() and text.isdecimal() and lowest <= int(text) <= highest):
        raise argparse.ArgumentTypeError(
            f"must be an integer from {lowest} to {highest}, not {text!r}"
        )
    return int(text)


def seed(text: str) -> int:
    """Returns the seed of random numbers that a text shows, from 0 to 2**32 - 1."""
    return integer(text, 0, 2**32 - 1)


def probability(text: str) -> float:
    """Returns the probability that a text shows, from 0 to 1.

    Raises:
        argparse.ArgumentTypeError: If it shows none.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, not {text!r}")
    return number
