"""Counts what a training step asks of a GPU, on a machine without one.

    python -m benchmarks.gpu_counts

writes the tables of docs/internals/gpu_counts.md and of docs/performance.md. They are counts and no
times, so two runs write the same text.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages import insert
from benchmarks.tables import table

PAGE, USERS = "docs/internals/gpu_counts.md", "docs/performance.md"
MARKS = "<!-- gpu counts {}: python -m benchmarks.gpu_counts -->", "<!-- end of gpu counts {} -->"
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
"""The rows for users: a title, a step and a way."""

Row = Mapping[str, Any]


def counted(framework: str) -> list[Row]:
    """Returns the rows of "torch" or "jax", counted in a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.gpu_{framework}"]
    environment = {**os.environ, "KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def cells(row: Row) -> list[str]:
    """Returns a row of a table; bytes are in megabytes."""
    return [
        f"{value / 1e6:,.2f}" if name in ("bytes", "temporary") else str(value)
        for name, value in row.items()
    ]


def whole(rows: Sequence[Row]) -> str:
    """Returns a whole table."""
    titles = [f"{n}, MB" if n in ("bytes", "temporary") else n for n in rows[0]]
    return table(titles, map(cells, rows))


def for_users(rows: Sequence[Row]) -> str:
    """Returns the table for users: what loss scaling adds to a step."""
    known = {(row["step"], row["way"]): row for row in rows}
    lines = []
    for title, step, way in FOR_USERS:
        row, bare = known[step, way], known[step, "bare"]
        name = "launches" if "launches" in row else "kernels"
        moved = (row["bytes"] - bare["bytes"]) / 1e6
        lines.append([title, str(row["waits"]), f"{row[name] - bare[name]:+}", f"{moved:+.0f}"])
    return table(["a step with", "waits", "launches", "MB read and written"], lines)


def main(root: str = ".") -> None:
    """Writes the tables into the pages of a checkout."""
    found = {framework: counted(framework) for framework in ("torch", "jax")}
    texts = [(PAGE, name, whole(rows)) for name, rows in found.items()]
    for page, name, text in (
        *texts,
        (USERS, "of both", for_users([*found["torch"], *found["jax"]])),
    ):
        insert(pathlib.Path(root, page), text, *(mark.format(name) for mark in MARKS))


if __name__ == "__main__":
    main(*sys.argv[1:])
