"""`lossscale diagnose`: says whether a saved model needs loss scaling."""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lossscale.cli.arguments import choose_backend, integer
from lossscale.cli.console import silenced, waiting
from lossscale.cli.files import UsageError, check_picture, usage_errors
from lossscale.errors import LossScaleError, first_line, visible
from lossscale.packages import BACKENDS, require

_MOST = 2**31 - 1
_COMPILE_FIRST = "call model.compile(optimizer, loss) before model.save(path)"


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the command."""
    parser = verbs.add_parser(
        "diagnose",
        help="say whether a saved model needs loss scaling, and the rule to use",
        description="Computes the gradients of a compiled Keras model on a few batches, in float32 "
        "and in float16 at several loss scales, and says whether training in float16 needs loss "
        "scaling, and with which rule. No step is taken and no file is changed.",
    )
    count = functools.partial(integer, lowest=1, highest=_MOST)
    parser.add_argument(
        "model", metavar="MODEL", type=Path, help="a compiled model that was saved: .keras or .h5"
    )
    parser.add_argument(
        "--data",
        metavar="DATA.npz",
        type=Path,
        required=True,
        help="arrays saved with numpy.savez: x and y, and sample_weight if there are weights. If "
        "the model has several inputs or outputs, arrays with their names take the place of x "
        "and y",
    )
    parser.add_argument(
        "--batches", type=count, default=2, metavar="N", help="batches at most (default: 2)"
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        default=32,
        metavar="N",
        help="rows in each batch, as many as in training: the loss is averaged over them "
        "(default: 32)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.1,
        metavar="P",
        help="how wrong a gradient may be, as a share of it (default: 0.1)",
    )
    parser.add_argument(
        "--backend",
        metavar="|".join(BACKENDS),
        help="what Keras computes with (default: the environment variable KERAS_BACKEND, or "
        "tensorflow)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a text")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the gradients: .png, .pdf or .svg"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as a page that opens offline"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Diagnoses a model.

    Args:
        arguments: As parsed.

    Returns:
        The exit status, 0.

    Raises:
        CommandError: If an argument or a file cannot be used.
        MissingPackageError: If a package is missing.
    """
    if arguments.plot is not None:
        check_picture("--plot", arguments.plot)
    if arguments.html is not None:
        check_picture("--html", arguments.html, (".html",))
    pictures = () if arguments.plot is None else ("matplotlib",)
    backend = choose_backend(arguments.backend)
    done = 0

    def after_batch(number: int) -> None:
        nonlocal done
        done = number

    with waiting(lambda: "loading the model"):
        require("keras", backend, "numpy", *pictures)
        _check_model_file(arguments.model)
        arrays = _read_arrays(arguments.data)
        with silenced():
            model = _load_model(arguments.model)
    x, y, sample_weight = _matched(model, arrays, arguments.data)
    from lossscale.diagnosis import diagnose

    with (
        waiting(lambda: f"measuring gradients, batch {done + 1} of {arguments.batches} at most"),
        usage_errors(),
    ):
        try:
            report: Any = diagnose(
                model,
                x,
                y,
                sample_weight=sample_weight,
                batches=arguments.batches,
                batch_size=arguments.batch_size,
                tolerance=arguments.tolerance,
                after_batch=after_batch,
            )
        except LossScaleError:
            raise
        # Each framework raises errors of its own where arrays do not fit the model.
        except Exception as error:
            raise UsageError(
                f"{arguments.data}: the model cannot compute its loss on these arrays: "
                f"{first_line(error)}"
            ) from error
    # Before the files, which may fail.
    lines = [report.to_json()] if arguments.json else map(visible, str(report).splitlines())
    print("\n".join(lines), flush=True)
    with usage_errors():
        if arguments.plot is not None:
            _draw(report, arguments.plot)
        if arguments.html is not None:
            report.to_html(arguments.html)
    return 0


def _draw(report: Any, path: Path) -> None:
    from matplotlib.figure import Figure

    from lossscale.plots import plot_diagnosis

    # Not pyplot: a Figure of its own needs no window.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    plot_diagnosis(report, figure.subplots())
    figure.savefig(path, dpi=120)


def _check_model_file(path: Path) -> None:
    """Raises unless Keras can make a compiled model of the file, or only trying can tell."""
    from lossscale.migration.models import read_model_file

    if path.is_dir():
        raise UsageError(f"{path}: it is a folder; MODEL must be a .keras or .h5 file")
    with usage_errors():
        file = read_model_file(path)
    # Keras tells files by their names.
    if path.suffix.lower() not in (".keras", ".h5", ".hdf5"):
        raise UsageError(f"MODEL must end in .keras, .h5 or .hdf5. Received: {str(path)!r}")
    if not file.training:
        raise UsageError(
            f"{path}: the model was saved without what it was compiled with; {_COMPILE_FIRST}"
        )


def _read_arrays(path: Path) -> dict[str, Any]:
    import numpy as np

    from lossscale.migration.hdf5_reader import check_size

    if not path.is_file():
        kind = "it is a folder" if path.is_dir() else "no such file"
        raise UsageError(f"{path}: {kind}; --data must be an .npz file")
    try:
        check_size(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    # What a damaged file raises depends on the byte that is wrong.
    except Exception as error:
        raise UsageError(
            f"{path}: no .npz file, or it is damaged: {first_line(error)}; save x and y with "
            "numpy.savez(path, x=, y=)"
        ) from error
    if not arrays:
        raise UsageError(f"{path}: there is no array in it; it must hold x and y")
    # NumPy returns the bytes of what else a zip file may hold.
    if other := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise UsageError(
            f"{path}: no .npz file: {other[0]!r} in it is no array; save x and y with "
            "numpy.savez(path, x=, y=)"
        )
    # Before the model is loaded, which takes longer.
    rows = {array.shape[:1] for array in arrays.values()}
    if len(rows) != 1 or rows & {(), (0,)}:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise UsageError(
            f"{path}: all arrays must have the same number of rows, at least one. Found: {shapes}"
        )
    return arrays


def _load_model(path: Path) -> Any:
    import keras

    import lossscale

    # Keras was imported after lossscale, whose optimizers the file may name.
    lossscale.register()
    with warnings.catch_warnings():
        # Of optimizer states that do not fit, which are of no interest here.
        warnings.simplefilter("ignore")
        try:
            return keras.models.load_model(path)
        # What a damaged file or an unknown layer raises depends on the layer.
        except Exception as error:
            raise UsageError(f"{path}: Keras cannot load it: {first_line(error)}") from error


def _matched(model: Any, arrays: Mapping[str, Any], path: Path) -> tuple[Any, Any, Any]:
    """The arrays in the structures that the model takes."""
    inputs = [tensor.name for tensor in getattr(model, "inputs", None) or ()]
    outputs = [
        tensor._keras_history.operation.name for tensor in getattr(model, "outputs", None) or ()
    ]
    rest = dict(arrays)
    weights = rest.pop("sample_weight", None)
    x = _taken(rest, "x", inputs, getattr(model, "_inputs_struct", None), path)
    y = _taken(rest, "y", outputs, getattr(model, "_outputs_struct", None), path, optional=True)
    if rest:
        raise UsageError(
            f"{path}: the model has no input or output of the name {', '.join(map(repr, rest))}; "
            f"{_expected('x', inputs)}, {_expected('y', outputs)}"
        )
    return x, y, weights


def _taken(
    rest: dict[str, Any],
    general: str,
    names: Sequence[str],
    structure: Any,
    path: Path,
    *,
    optional: bool = False,
) -> Any:
    """Takes the arrays of the inputs, or of the outputs, out of the rest."""
    import keras

    if general in rest and len(names) < 2:
        taken = [rest.pop(general)]
    else:
        missing = [name for name in names if name not in rest]
        if optional and len(missing) == len(names) and general not in rest:
            return None
        if missing or not names:
            raise UsageError(
                f"{path}: there is no array {', '.join(map(repr, missing or [general]))}; "
                f"{_expected(general, names)}. Found: {', '.join(rest) or 'no other array'}"
            )
        taken = [rest.pop(name) for name in names]
    if structure is not None and keras.tree.is_nested(structure):
        return keras.tree.pack_sequence_as(structure, taken)
    return taken[0] if len(taken) == 1 else taken


def _expected(general: str, names: Sequence[str]) -> str:
    kind = "input" if general == "x" else "output"
    if len(names) < 2:
        return f"the {kind} is called {general}" + (f" or {names[0]}" if names else "")
    return f"the {kind}s are called {', '.join(names)}"
