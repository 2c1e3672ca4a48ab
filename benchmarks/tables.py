"""The tables: results in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.methods import METHODS
from benchmarks.plan import SKIPPED

Row = dict[str, Any]
_DYNAMIC = ("ours_dynamic", "peer_dynamic")


def page(results: dict[str, Any]) -> str:
    """Returns all tables, each under a heading, and what they were measured with."""
    sections = (
        ("The optimizer alone", ("big", "small", "sparse"), ratios),
        ("Other optimizers", ("optimizers",), ratios),
        ("Whole training steps", ("mlp", "cnn"), ratios),
        ("Skipped steps", ("skip",), skips),
        ("As work grows", ("variables", "parameters", "replicas"), growth),
        ("Memory, compilation and graphs", ("big", "small"), structure),
    )
    parts = []
    for title, cases, table in sections:
        rows = [row for row in results["rows"] if row["case"] in cases]
        if rows:
            parts.append(f"### {title}\n\n{table(rows)}")
    if results["host_syncs"]:
        parts.append(f"### PyTorch: host syncs and graph breaks\n\n{syncs(results['host_syncs'])}")
    if results["collectives"]:
        parts.append(f"### Sums over devices\n\n{collectives(results['collectives'])}")
    parts.append(f"### Measured with\n\n{circumstances(results)}")
    return "\n\n".join(parts)


def short(results: dict[str, Any]) -> str:
    """Returns the table for the README: the dynamic scale, ours and the peer's."""
    cases = ("big", "small", "mlp", "cnn")
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in results["rows"]:
        compiled = row["mode"] != "eager" or row["shell"] == "keras-torch"
        if row["case"] in cases and compiled:
            found.setdefault((row["shell"], _where(row)), {})[row["case"]] = row
    lines = _header(["", *cases])
    for (shell, where), rows in found.items():
        cells = [
            f"{_median(rows.get(case), 'ours_dynamic')} / {_median(rows.get(case), 'peer_dynamic')}"
            for case in cases
        ]
        lines.append(_line([f"{shell}, {where}", *cells]))
    return "\n".join(lines)


def _median(row: Row | None, method: str) -> str:
    ratio = row["methods"].get(method, {}).get("ratio") if row else None
    return f"{ratio['median']:.2f}" if ratio else "-"


def ratios(rows: Sequence[Row]) -> str:
    """Returns times as ratios to the bare optimizer: the median and the quartiles."""
    names = [name for name in METHODS if any(name in row["methods"] for row in rows)]
    return _by_method(rows, names, _time)


def _time(method: Row, name: str) -> str:
    if name == "bare":
        return _milliseconds(method)
    return _quartiles(method["ratio"])


def skips(rows: Sequence[Row]) -> str:
    """Returns what a skipped step costs, beside the bare optimizer and beside an applied step."""
    titles = [
        f"{METHODS[name].title}: {what}"
        for name in _DYNAMIC
        for what in ("applied", "skipped", "skipped to applied")
    ]
    lines = _header(["", "bare, ms", *titles])
    for row in rows:
        cells = [_title(row), _milliseconds(row["methods"]["bare"])]
        for name in _DYNAMIC:
            applied, skipped = row["methods"][name], row["methods"][name + SKIPPED]
            cells += [_quartiles(applied["ratio"]), _quartiles(skipped["ratio"])]
            cells.append(_quartiles(skipped["ratio_to_applied"]))
        lines.append(_line(cells))
    return "\n".join(lines)


def growth(rows: Sequence[Row]) -> str:
    """Returns how the time of the bare optimizer, and the ratios to it, grow with the work."""
    lines = _header(["", "", "bare, ms", *(METHODS[name].title for name in _DYNAMIC)])
    for row in sorted(rows, key=lambda row: (row["case"], row["shell"], _where(row))):
        methods = row["methods"]
        cells = [_quartiles(methods[name]["ratio"]) if name in methods else "" for name in _DYNAMIC]
        name = f"{row['shell']}, {_where(row)}"
        point = f"{row['point']} {row['case']}"
        lines.append(_line([name, point, _milliseconds(methods["bare"]), *cells]))
    return "\n".join(lines)


def structure(rows: Sequence[Row]) -> str:
    """Returns the seconds of the first step, the size of the graph and the peak of memory."""
    rows = [row for row in rows if "memory_bytes" in row["methods"]["bare"]]
    names = [name for name in METHODS if any(name in row["methods"] for row in rows)]
    names = [name for name in names if name != "bare_again"]

    def cell(method: Row, name: str) -> str:
        parts = [f"{method['first_step_seconds']:.1f} s"]
        parts.append(f"{method['graph_size']:,}" if "graph_size" in method else "-")
        memory = method["memory_bytes"]
        parts.append("-" if memory is None else _bytes(memory))
        return " · ".join(parts)

    return _by_method(rows, names, cell)


def syncs(found: Iterable[Row]) -> str:
    """Returns the counts of a PyTorch step, in the optimizer alone and in a training step."""
    columns = {
        "apply_host_syncs": "host syncs",
        "train_host_syncs": "in a training step",
        "apply_graph_breaks": "graph breaks",
        "train_graph_breaks": "in a training step",
        "apply_calls": "operations",
        "train_calls": "in a training step",
    }
    lines = _header(["", *columns.values()])
    for row in found:
        cells = [f"{row[column]:,}" if column in row else "-" for column in columns]
        lines.append(_line([METHODS[row["method"]].title, *cells]))
    return "\n".join(lines)


def collectives(found: Iterable[Row]) -> str:
    """Returns how many sums over devices a step does, and how many bytes each device gives."""
    lines = _header(["", "devices", "sums in a step", "bytes"])
    for row in found:
        name = f"{row['backend']}, {METHODS[row['method']].title}"
        lines.append(_line([name, str(row["devices"]), f"{row['sums']:,}", f"{row['bytes']:,}"]))
    return "\n".join(lines)


def circumstances(results: dict[str, Any]) -> str:
    """Returns the machine, the versions, the date, and what was not run."""
    machine = results["machine"]
    memory = machine["memory_bytes"]
    about = [
        f"- {machine['processor']}, {machine['cores']} cores"
        + (f", {memory / 2**30:.0f} GiB of memory" if memory else "")
        + f", {machine['system']} {machine['architecture']}"
    ]
    about += [f"- GPU for {backend}: {name}" for backend, name in machine["gpus"].items()]
    versions = {"Python": machine["python"], **results["versions"]}
    about.append("- " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    about.append(f"- {results['date'][:10]}")
    about += [f"- Wrong, and left out: {message}" for message in results["wrong"]]
    about += [f"- Not run: {left['what']}, because {left['why']}" for left in results["not_run"]]
    return "\n".join(about)


def _by_method(rows: Sequence[Row], names: Sequence[str], cell: Callable[[Row, str], str]) -> str:
    titles = [METHODS[name].title + (", ms" if name == "bare" else "") for name in names]
    if cell is not _time:
        titles = [METHODS[name].title for name in names]
    lines = _header(["", *titles])
    for row in rows:
        cells = []
        for name in names:
            method = row["methods"].get(name, {})
            if "does_not_run" in method:
                cells.append(f"does not run: {method['does_not_run'].partition(':')[0]}")
            else:
                cells.append(cell(method, name) if method else "")
        lines.append(_line([_title(row), *cells]))
    return "\n".join(lines)


def _title(row: Row) -> str:
    parts = (row["shell"], _where(row), row["case"], row["point"])
    optimizer = "" if row["optimizer"] == "Adam" else row["optimizer"]
    return ", ".join(part for part in (*parts, optimizer) if part)


def _where(row: Row) -> str:
    return row["mode"] if row["device"] == "cpu" else f"{row['mode']}, {row['device'].upper()}"


def _milliseconds(method: Row) -> str:
    return f"{1e3 * method['seconds']['median']:.3g}"


def _bytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB" if number >= 1e5 else f"{number / 1e3:,.1f} kB"


def _quartiles(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['q1']:.2f}-{found['q3']:.2f})"


def _header(titles: Sequence[str]) -> list[str]:
    return [_line(titles), "|---" * len(titles) + "|"]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
