"""The tables: results in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.methods import METHODS, MONITORS, OPTAX, SKIPPED, TORCH

Row = dict[str, Any]
Cells = dict[str, str]
"""A row of a table, by the titles of its columns."""
_DYNAMIC = ("ours_dynamic", "peer_dynamic")


def page(results: dict[str, Any]) -> str:
    """Returns all tables under headings; then machine and versions."""
    parts = {title: markdown(rows) for title, rows in sections(results).items()}
    parts["Measured with"] = "\n".join(f"- {line}" for line in circumstances(results))
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in parts.items())


def sections(results: dict[str, Any]) -> dict[str, list[Cells]]:
    """Returns the rows of all tables by title; tables without rows are left out."""
    found = {}
    for title, values, written in SECTIONS:
        rows = [row for row in results["rows"] if row["case"] in values or row["wrapper"] in values]
        if rows:
            found[title] = written(rows)
    return found


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in Markdown, with the columns of the first row."""
    return table(list(rows[0]), (list(map(str, row.values())) for row in rows))


def _ratios(rows: Sequence[Row]) -> list[Cells]:
    """Times as ratios to the bare optimizer: the median and the quartiles."""
    names = [name for name in _present(rows) if name != "bare"]
    lines = [[_title(row), _bare(row), *_cells(row, names, _ratio)] for row in rows]
    return _named(["step", "bare, ms", *_titles(names)], lines)


def _skips(rows: Sequence[Row]) -> list[Cells]:
    """The cost of a skipped step, relative to the bare optimizer and to an applied step."""
    what = ("applied", "skipped", "skipped to applied")
    lines = []
    for row in rows:
        lines.append([_title(row), _bare(row)])
        for name in _DYNAMIC:
            applied, skipped = row["methods"][name], row["methods"][name + SKIPPED]
            to_applied = _ratio(skipped, "ratio_to_applied")
            lines[-1] += [_ratio(applied), _ratio(skipped), to_applied]
    titles = [f"{title}: {each}" for title in _titles(_DYNAMIC) for each in what]
    return _named(["step", "bare, ms", *titles], lines)


def _growth(rows: Sequence[Row]) -> list[Cells]:
    """How the time of the bare optimizer, and the ratios to it, grow with the work."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["case"], row["wrapper"], _where(row))):
        names = f"{row['wrapper']}, {_where(row)}", f"{row['point']} {row['case']}"
        lines.append([*names, _bare(row), *_cells(row, _DYNAMIC, _ratio)])
    return _named(["step", "work", "bare, ms", *_titles(_DYNAMIC)], lines)


def _structure(rows: Sequence[Row]) -> list[Cells]:
    """The seconds of the first step, the size of the graph and the peak of memory."""

    def text(method: Row) -> str:
        size, memory = method.get("graph_size"), method["memory_bytes"]
        parts = ("-" if size is None else f"{size:,}", "-" if memory is None else _bytes(memory))
        return " · ".join([f"{method['first_step_seconds']:.1f} s", *parts])

    names = [name for name in _present(rows) if name != "bare_again"]
    lines = [[_title(row), *_cells(row, names, text)] for row in rows]
    return _named(["step", *_titles(names)], lines)


def _monitors(rows: Sequence[Row]) -> list[Cells]:
    """The cost of a monitor in `fit`, relative to none."""
    base, *names = MONITORS
    lines = []
    for row in sorted(rows, key=lambda row: row["wrapper"].startswith("tf_keras")):
        backend = row["wrapper"].removeprefix("keras-").removesuffix("-new")
        place = "" if row["device"] == "cpu" else f", {row['device'].upper()}"
        milliseconds = _milliseconds(row["methods"][base])
        lines.append([backend + place, milliseconds, *_cells(row, names, _ratio)])
    return _named(["Keras on", f"ms a step, {base}", *names], lines)


def _optax(rows: Sequence[Row]) -> list[Cells]:
    """Ratios to the transformation alone."""
    names = OPTAX[1:]
    lines = []
    for row in rows:
        point = row["point"] if row["device"] == "cpu" else f"{row['point']}, GPU"
        lines.append([point, *_cells(row, names, _median)])
    return _named(["step", *names], lines)


def _torch(rows: Sequence[Row]) -> list[Cells]:
    """Ratios to PyTorch's optimizer alone."""
    names = [name for name in TORCH if not name.startswith("bare")]
    lines = []
    for row in rows:
        milliseconds = _milliseconds(row["methods"]["bare"])
        point = row["point"] if row["device"] == "cpu" else f"{row['point']}, GPU"
        lines.append([point, milliseconds, *_cells(row, names, _median, "-")])
    return _named(["AdamW", "ms a step, bare", *names], lines)


def circumstances(results: dict[str, Any]) -> list[str]:
    """The machine, the versions, the date, and what was not run."""
    machine = results["machine"]
    memory = machine["memory_bytes"]
    about = [
        f"{machine['processor']}, {machine['cores']} cores"
        + (f", {memory / 2**30:.0f} GiB of memory" if memory else "")
        + f", {machine['system']} {machine['architecture']}"
    ]
    about += [f"GPU for {backend}: {name}" for backend, name in machine["gpus"].items()]
    versions = {"Python": machine["python"], **results["versions"]}
    about.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    about.append(results["date"][:10])
    about += [f"Wrong, and left out: {message}" for message in results["wrong"]]
    about += [f"Not run: {left['what']}, because {left['why']}" for left in results["not_run"]]
    return about


def _named(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> list[Cells]:
    return [dict(zip(titles, cells, strict=True)) for cells in lines]


def _present(rows: Sequence[Row]) -> list[str]:
    return [name for name in METHODS if any(name in row["methods"] for row in rows)]


def _titles(names: Iterable[str]) -> list[str]:
    return [METHODS[name].title for name in names]


def _cells(
    row: Row, names: Iterable[str], text: Callable[[Row], str], missing: str = ""
) -> list[str]:
    """The cells of a row, one for each method, formatted by `text`."""
    found = []
    for name in names:
        method = row["methods"].get(name)
        if method and "does_not_run" in method:
            found.append(f"does not run: {method['does_not_run'].partition(':')[0]}")
        else:
            found.append(text(method) if method else missing)
    return found


def _bare(row: Row) -> str:
    return f"{1e3 * row['methods']['bare']['seconds']['median']:.3g}"


def _milliseconds(method: Row) -> str:
    return f"{1e3 * method['seconds']['median']:.2f}"


def _median(method: Row) -> str:
    return f"{method['ratio']['median']:.2f}"


def _ratio(method: Row, key: str = "ratio") -> str:
    found = method[key]
    return f"{found['median']:.2f} ({found['q1']:.2f}-{found['q3']:.2f})"


def _title(row: Row) -> str:
    optimizer = "" if row["optimizer"] == "Adam" else row["optimizer"]
    parts = (row["wrapper"], _where(row), row["case"], row["point"], optimizer)
    return ", ".join(part for part in parts if part)


def _where(row: Row) -> str:
    return row["mode"] if row["device"] == "cpu" else f"{row['mode']}, {row['device'].upper()}"


def _bytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB" if number >= 1e5 else f"{number / 1e3:,.1f} kB"


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    texts = ["| " + " | ".join(cells) + " |" for cells in (titles, *lines)]
    return "\n".join([texts[0], "|---" * len(titles) + "|", *texts[1:]])


SECTIONS = (
    ("The optimizer alone", ("big", "small", "sparse"), _ratios),
    ("Other optimizers", ("optimizers",), _ratios),
    ("Whole training steps", ("mlp", "cnn"), _ratios),
    ("Skipped steps", ("skip",), _skips),
    ("As work grows", ("variables", "parameters"), _growth),
    ("Memory, compilation and graphs", ("big", "small"), _structure),
    ("Monitors", ("monitor",), _monitors),
    ("Optax", ("optax",), _optax),
    ("PyTorch alone", ("torch",), _torch),
)
"""For each table its title, its cases or wrappers, and the function that writes it."""
