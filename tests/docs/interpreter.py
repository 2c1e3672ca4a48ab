"""Runs programs one after another in one interpreter: a framework is imported once for all.

Each line of the input is a program, as a JSON string; each line of the output says what became of
it, as a JSON object with what it printed and its error, if any. A program finds the global
settings of lossscale and Keras as the first one found them, and a `__main__` of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
import types
import warnings

import keras

from lossscale import installation


def outcome(source: str) -> dict[str, str | None]:
    """Returns what a program prints, and its traceback if it fails."""
    printed, error = io.StringIO(), None
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    policy = keras.config.dtype_policy()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            # A page must not show a program that warns.
            warnings.filterwarnings("error", module="lossscale")
            exec(compile(source, "<program>", "exec"), vars(sys.modules["__main__"]))
    except Exception:
        error = traceback.format_exc()
    finally:
        sys.modules["__main__"] = main
        keras.config.set_dtype_policy(policy)
        while installation._standing:
            installation._standing[-1].undo()
    return {"printed": printed.getvalue(), "error": error}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(outcome(json.loads(line))), flush=True)
    # Taking the frameworks down in order takes seconds and tests nothing.
    os._exit(0)


if __name__ == "__main__":
    main()
