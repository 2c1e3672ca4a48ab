"""`lossscale diagnose`: says whether a saved model needs loss scaling."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lossscale.cli.backend import choose_backend, silenced
from lossscale.cli.console import new_console
from lossscale.cli.errors import UsageError
from lossscale.cli.files import check_picture, usage_errors
from lossscale.cli.numbers import integer
from lossscale.cli.progress import progress
from lossscale.diagnostics.formats import FORMATS
from lossscale.packages import BACKENDS, is_installed, require

_BATCHES, _BATCH_SIZE, _ROWS = 4, 32, 20
_MOST = 2**31 - 1
_COMPILE_FIRST = "call model.compile(optimizer, loss) before model.save(path)"


def add_parser(verbs: Any) -> None:
    """Adds the verb to the subparsers of the command."""
    parser = verbs.add_parser(
        "diagnose",
        help="say whether a saved model needs loss scaling, and which scale",
        description="Computes the gradients of a compiled Keras model on a few batches, in float32 "
        "and in float16 at several loss scales, and says whether training in float16 needs loss "
        "scaling, which fixed scale suits, and what each gradient loses without. No step is taken "
        "and no file is changed.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=Path,
        help="a model that was saved with what it was compiled with: .keras or .h5",
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
        "--batches",
        type=lambda text: integer(text, 1, _MOST),
        default=_BATCHES,
        metavar="N",
        help=f"how many batches to measure on, at most (default: {_BATCHES})",
    )
    parser.add_argument(
        "--batch-size",
        type=lambda text: integer(text, 1, _MOST),
        default=_BATCH_SIZE,
        metavar="N",
        help="rows in each batch, as many as in training: the loss is averaged over them "
        f"(default: {_BATCH_SIZE})",
    )
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="float16",
        metavar="|".join(FORMATS),
        help="what the gradients will be computed in (default: float16)",
    )
    parser.add_argument(
        "--backend",
        metavar="|".join(BACKENDS),
        help="what Keras computes with (default: the environment variable KERAS_BACKEND, or "
        "tensorflow)",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"list every gradient, not only the worst {_ROWS}"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compute in float32 only, and predict what float16 would lose: about a tenth of the "
        "time, and less sure",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a text")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the gradients: .png, .pdf or .svg"
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
    pictures = () if arguments.plot is None else ("matplotlib",)
    require("keras", choose_backend(arguments.backend), "numpy", *pictures)
    _check_model_file(arguments.model)
    arrays = _read_arrays(arguments.data)
    with _waiting("Loading the model"), silenced():
        model = _load_model(arguments.model)
    x, y, sample_weight = _matched(model, arrays, arguments.data)
    report = _diagnosed(model, x, y, sample_weight, arguments)
    if not arguments.json:
        # Before the picture, which may fail.
        print(report.to_text(rows=None if arguments.all else _ROWS), flush=True)
    picture = None
    try:
        if arguments.plot is not None and _has_bins(report):
            draw(report, arguments.plot)
            picture = str(arguments.plot)
    finally:
        if arguments.json:
            print(json.dumps({**report.to_dict(), "picture": picture}, allow_nan=False))
    if picture is not None and not arguments.json:
        print(f"\nPicture: {picture}")
    if arguments.plot is not None and picture is None:
        print(
            "lossscale: there is no picture, because no gradient has an element that is finite "
            "and not zero",
            file=sys.stderr,
        )
    return 0


def _has_bins(report: Any) -> bool:
    return any(tensor.histogram.bins for tensor in report.ranges)


def draw(report: Any, path: Path) -> None:
    """Draws a report into a file.

    Args:
        report: A `GradientReport`.
        path: The file to write; its suffix says in which format.

    Raises:
        UsageError: If there is nothing to draw, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    from lossscale.plots import plot_fidelity, plot_gradient_range, plot_layers
    from lossscale.plots.fidelity import fidelity_height
    from lossscale.plots.layers import figure_height

    heights = [4.5, figure_height(report)]
    if report.measured_variables:
        heights.insert(0, fidelity_height(report))
    # Not pyplot: a Figure of its own needs no window.
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    *first, above, below = figure.subplots(len(heights), height_ratios=heights)
    with usage_errors():
        for ax in first:
            plot_fidelity(report, ax)
        plot_gradient_range(report, above)
        plot_layers(report, below)
        # Above the names of the ranges, in however many lines they stand.
        figure.suptitle(f"Gradients of {report.model}: loss scaling {report.verdict}")
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
    for missing, what in (
        (not file.training, "what it was compiled with"),
        (file.optimizer is None, "an optimizer"),
    ):
        if missing:
            raise UsageError(f"{path}: the model was saved without {what}; {_COMPILE_FIRST}")


def _read_arrays(path: Path) -> dict[str, Any]:
    import numpy as np

    if not path.is_file():
        kind = "it is a folder" if path.is_dir() else "no such file"
        raise UsageError(f"{path}: {kind}; --data must be an .npz file")
    if path.stat().st_size == 0:
        raise UsageError(f"{path}: the file is empty")
    if not zipfile.is_zipfile(path):
        raise UsageError(
            f"{path}: no .npz file, or it was cut short; "
            "save x and y with numpy.savez(path, x=, y=)"
        )
    try:
        with np.load(path, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: its arrays cannot be read: {_line(error)}") from error
    if not arrays:
        raise UsageError(f"{path}: there is no array in it; it must hold x and y")
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
            model = keras.models.load_model(path)
        # What a damaged file or an unknown layer raises depends on the layer.
        except Exception as error:
            raise UsageError(f"{path}: Keras cannot load it: {_line(error)}") from error
    if model.loss is None and not _has_own_loss(model):
        raise UsageError(f"{path}: the model was saved without a loss; {_COMPILE_FIRST}")
    return model


def _has_own_loss(model: Any) -> bool:
    import keras

    return bool(model.losses) or type(model).compute_loss is not keras.Model.compute_loss


def _matched(model: Any, arrays: Mapping[str, Any], path: Path) -> tuple[Any, Any, Any]:
    """The arrays in the structures that the model takes."""
    inputs = {tensor.name: tensor for tensor in getattr(model, "inputs", None) or ()}
    outputs = [
        tensor._keras_history.operation.name for tensor in getattr(model, "outputs", None) or ()
    ]
    rest = dict(arrays)
    weights = rest.pop("sample_weight", None)
    x = _taken(rest, "x", list(inputs), getattr(model, "_inputs_struct", None), path)
    y = _taken(rest, "y", outputs, getattr(model, "_outputs_struct", None), path, optional=True)
    if rest:
        raise UsageError(
            f"{path}: the model has no input or output of the name {', '.join(map(repr, rest))}; "
            f"{_expected('x', list(inputs))}, {_expected('y', outputs)}"
        )
    if inputs:
        _check_shapes(x, list(inputs.values()), path)
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


def _check_shapes(x: Any, inputs: Sequence[Any], path: Path) -> None:
    import keras

    from lossscale.diagnostics.batch_checks import fits

    for array, tensor in zip(keras.tree.flatten(x), inputs, strict=True):
        if not fits(array.shape, tensor.shape):
            shape = ", ".join(str(size) for size in ("rows", *tensor.shape[1:]))
            raise UsageError(
                f"{path}: the array for the input {tensor.name!r} must have the shape ({shape}). "
                f"Received: {tuple(array.shape)}"
            )


def _diagnosed(
    model: Any, x: Any, y: Any, sample_weight: Any, arguments: argparse.Namespace
) -> Any:
    from lossscale.diagnostics import diagnose

    with usage_errors(), progress("Measuring gradients", arguments.batches) as show:
        try:
            return diagnose(
                model,
                x,
                y,
                sample_weight=sample_weight,
                batches=arguments.batches,
                batch_size=arguments.batch_size,
                format=arguments.format,
                quick=arguments.quick,
                after_batch=show,
            )
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            from lossscale.errors import LossScaleError

            if isinstance(error, LossScaleError):
                raise
            # Each framework raises errors of its own where targets do not fit the loss.
            raise UsageError(
                f"{arguments.data}: the model cannot compute its loss on these arrays: "
                f"{_line(error)}"
            ) from error


def _line(error: Exception) -> str:
    """The first line of what an error says that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Shows on standard error, if it is a terminal, that something takes its time."""
    if not is_installed("rich"):
        yield
        return
    # A stream of its own, because what frameworks write to standard error is dropped meanwhile.
    with (
        os.fdopen(os.dup(2), "w", encoding="utf-8") as stream,
        new_console(stream).status(text),
    ):
        yield
