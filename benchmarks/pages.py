"""Keeps results as JSON and writes the tables of the pages: `python -m benchmarks.pages`.

With the file that `python -m benchmarks` wrote as argument, it takes the times from there first.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import tables

Row = Mapping[str, Any]

ROOT = pathlib.Path(__file__).parents[1]
TIMES, COUNTS = ROOT / "benchmarks/results.json", ROOT / "benchmarks/gpu_counts.json"
CALIBRATION, ON_A_GPU = ROOT / "tools/calibration/results.json", ROOT / "tools/gpu.json"
RESULTS, USERS = ROOT / "docs/internals/results.md", ROOT / "docs/performance.md"
TORCH, JAX = "AdamW fused, 100 x 100,000", "Optax, 100 x 100,000"
FOR_USERS = (
    ("PyTorch: `optimizer.backward(loss)`", TORCH, "backward"),
    ("PyTorch: `optimizer.scale_loss(loss).backward()`", TORCH, "scale_loss"),
    ('PyTorch: `decide="device"`', TORCH, "device"),
    ("PyTorch: `lossscale.torch.GradScaler`", TORCH, "drop-in"),
    ("PyTorch: `torch.amp.GradScaler`", TORCH, "PyTorch's scaler"),
    ("PyTorch, clipped: `scale_loss`, `clip_norm=1.0`", f"{TORCH}, clipped", "scale_loss"),
    ("PyTorch, clipped: `torch.amp.GradScaler`", f"{TORCH}, clipped", "PyTorch's scaler"),
    ("JAX: `loss_scaled`", JAX, "lossscale"),
    ("JAX: `optax.apply_if_finite`", JAX, "apply_if_finite"),
    ("JAX: `flax.training.dynamic_scale`", JAX, "flax"),
)
"""The rows of counts for users: a title, a step and a way."""
COUNTED = (TORCH, "Transformer, AdamW fused, micro-batches: 1")
"""The steps of PyTorch whose counts the page of results has."""


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns the tables of a file of results: their rows, by title."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: pathlib.Path, found: Mapping[str, Sequence[Any]]) -> None:
    """Writes tables to a file of results, each row on a line; tables that are not given stay."""
    whole = {**(read(path) if path.exists() else {}), **found}
    texts = []
    for title, rows in whole.items():
        lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
        texts.append(f" {json.dumps(title)}: [\n{lines}\n ]")
    path.write_text("{\n" + ",\n".join(texts) + "\n}\n", encoding="utf-8")


def marks(name: str) -> tuple[str, str]:
    """Returns the markers before and after a table of a page."""
    return f"<!-- {name}: python -m benchmarks.pages -->", f"<!-- end of {name} -->"


def insert(page: pathlib.Path, text: str, begins: str, ends: str) -> None:
    """Replaces the text between two markers of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(begins)
    _, end, after = rest.partition(ends)
    if not begin or not end:
        print(f"{page} has no markers {begins} and {ends}; it stays as it is", file=sys.stderr)
        return
    page.write_text(f"{before}{begins}\n{text}\n{ends}{after}", encoding="utf-8")


def whole_steps() -> dict[str, list[dict[str, str]]]:
    """Returns medians of whole training steps on a CPU and on a GPU, by the name of their table."""
    times, gpu = read(TIMES), read(ON_A_GPU)
    torch = ("verb", "wrapper", "device", "drop-in", "GradScaler")
    optax = ("lossscale", "apply_if_finite", "jmp", "flax")
    keras = ("ours, dynamic", "peer, dynamic")
    of_keras = [title for title in gpu if title.endswith("Whole training steps")]
    return {
        "PyTorch": _chosen(times["PyTorch alone"], torch),
        "Optax": _chosen(times["Optax"], optax),
        "Keras": _chosen(times["Whole training steps"], keras),
        "PyTorch on a GPU": _chosen(gpu["PyTorch: benchmarks: PyTorch alone"], torch),
        "Optax on a GPU": _chosen(gpu["JAX with Optax: benchmarks: Optax"], optax),
        "Keras on a GPU": _chosen([row for title in of_keras for row in gpu[title]], keras),
    }


def _chosen(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, str]]:
    """Returns the whole steps among rows, with the medians of some columns."""
    found = []
    for name, row in ((next(iter(row.values())), row) for row in rows):
        if name.startswith("whole step") or name.endswith(("mlp", "cnn")):
            step = name.removeprefix("whole step").removesuffix(", GPU").lstrip(",: ")
            found.append({"step": step, **{title: row[title].split()[0] for title in columns}})
    return found


def counts() -> dict[str, list[dict[str, str]]]:
    """Returns the counts that a reader compares, by the name of their table."""
    found = read(COUNTS)
    known = {(row["step"], row["way"]): row for rows in found.values() for row in rows}
    users = []
    for title, step, way in FOR_USERS:
        row, bare = known[step, way], known[step, "bare"]
        name = "launches" if "launches" in row else "kernels"
        moved = f"{(row['bytes'] - bare['bytes']) / 1e6:+.0f}"
        added = {"waits": str(row["waits"]), "launches": f"{row[name] - bare[name]:+}"}
        users.append({"a step with": title, **added, "MB read and written": moved})
    pages = {"counts for users": users}
    for name, rows in found.items():
        chosen = [row for row in rows if row["step"] in (*COUNTED, JAX)]
        pages[f"counts of {name}"] = [_shown(row) for row in chosen]
    return pages


def _shown(row: Row) -> dict[str, str]:
    left_out = ("allocations", "graphs", "outside", "collectives", "temporary")
    return {
        f"{name}, MB" if name == "bytes" else name: f"{n / 1e6:,.2f}" if name == "bytes" else str(n)
        for name, n in row.items()
        if name not in left_out
    }


def verdicts() -> list[dict[str, str]]:
    """Returns how many verdicts of `diagnose` the training runs contradict."""
    found = []
    for title, rows in read(CALIBRATION).items():
        said = [row["wrong"] for row in rows]
        counted = {"wrong": said.count("WRONG"), "needless scales": said.count("alarm")}
        found.append({"models": title, "diagnosed": len(rows), **counted})
    return found


def outcomes() -> str:
    """Returns what came of the parts of `tools.gpu`: a line for each outcome."""
    found = read(ON_A_GPU)
    parts: dict[str, dict[str, list[str]]] = {}
    for row in found["Outcomes"]:
        kind, (framework, _, part) = row["outcome"].partition(",")[0], row["part"].partition(": ")
        parts.setdefault(kind, {}).setdefault(framework, []).append(part)
    lines = [f"Run on {found['Run'][0]}."]
    for kind, frameworks in parts.items():
        named = (f"{framework} ({'; '.join(names)})" for framework, names in frameworks.items())
        lines.append(f"- {kind[0].upper()}{kind[1:]}: {', '.join(named)}.")
    return "\n\n".join(lines)


def main(results: str = "") -> None:
    """Takes the results of a file, and writes all tables of the pages."""
    if results:
        found = json.loads(pathlib.Path(results).read_text(encoding="utf-8"))
        write(TIMES, {**tables.sections(found), "Measured with": tables.circumstances(found)})
    of_users, *others = counts().items()
    shown = {**whole_steps(), **dict(others), "monitors": read(TIMES)["Monitors"]}
    shown |= {"verdicts": verdicts()}
    insert(USERS, tables.markdown(of_users[1]), *marks(of_users[0]))
    for name, rows in shown.items():
        insert(RESULTS, tables.markdown(rows), *marks(name))
    insert(RESULTS, outcomes(), *marks("outcomes on a GPU"))


if __name__ == "__main__":
    main(*sys.argv[1:])
