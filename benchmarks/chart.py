"""Draws the whole training steps of the results: `python -m benchmarks.chart`."""

from __future__ import annotations

import html

from benchmarks import pages

CHART = pages.ROOT / "docs/images/cost.svg"

# The columns to draw.
COLUMNS = {
    "PyTorch": ("verb", "GradScaler"),
    "Optax": ("lossscale", "flax"),
    "Keras": ("ours, dynamic", "peer, dynamic"),
}
# By the table or the wrapper.
GROUPS = {
    "PyTorch": "PyTorch, eager",
    "Optax": "JAX with Optax, jit",
    "keras-tensorflow, function": "Keras 3 on TensorFlow, tf.function",
    "keras-tensorflow, xla": "Keras 3 on TensorFlow, XLA",
    "keras-jax, jit": "Keras 3 on JAX, jit",
    "keras-torch, eager": "Keras 3 on PyTorch, eager",
    "tf_keras-new, function": "Keras 2, tf.function",
    "tf_keras-new, xla": "Keras 2, XLA",
    "tf_keras-legacy, function": "Keras 2, legacy, tf.function",
}
LEFT, RIGHT, LINE = 160, 530, 19
FIRST, LAST = 0.95, 1.5

# The colors follow the system's light or dark mode. The background is drawn too, so that the chart
# stays readable if the reader switches the palette of the site.
STYLE = """
  svg { font: 13px system-ui, sans-serif; }
  .page { fill: #ffffff; } text { fill: #30343f; }
  .group { font-weight: 600; paint-order: stroke; stroke: #ffffff; stroke-width: 6px; }
  .axis { fill: #5c6270; font-size: 12px; }
  line { stroke: #d9dce3; } .one { stroke: #7a8090; }
  .ours { fill: #3f51b5; }
  .peer { fill: none; stroke: #c2410c; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1e2129; } text { fill: #e3e5ea; }
    .group { stroke: #1e2129; } .axis { fill: #a9afbd; }
    line { stroke: #3a3f4b; } .one { stroke: #8d93a1; }
    .ours { fill: #8c9eff; } .peer { stroke: #ff9e6d; }
  }"""


def whole_steps() -> dict[str, list[tuple[str, float, float]]]:
    """Returns the name and both ratios of each whole step, by group."""
    found: dict[str, list[tuple[str, float, float]]] = {group: [] for group in GROUPS.values()}
    tables = pages.whole_steps()
    for table, (ours, peer) in COLUMNS.items():
        for row in tables[table]:
            wrapper, _, step = row["step"].rpartition(", ")
            if table != "Keras":
                wrapper, step = table, row["step"]
            found[GROUPS[wrapper]].append((step, float(row[ours]), float(row[peer])))
    return found


def x_of(ratio: float) -> float:
    """Returns where a ratio is drawn."""
    return round(LEFT + (ratio - FIRST) / (LAST - FIRST) * (RIGHT - LEFT), 1)


def drawn(groups: dict[str, list[tuple[str, float, float]]]) -> str:
    """Returns the chart as SVG.

    Args:
        groups: As `whole_steps` returns them.
    """
    top = y = 52
    rows = []
    for group, steps in groups.items():
        y += LINE
        rows.append(f'<text class="group" x="10" y="{y}">{html.escape(group)}</text>')
        for name, ours, peer in steps:
            y += LINE
            rows += [
                f'<text x="24" y="{y}">{html.escape(name)}</text>',
                f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y - 4}" y2="{y - 4}"/>',
                f'<circle class="peer" cx="{x_of(peer)}" cy="{y - 4}" r="5"/>',
                f'<circle class="ours" cx="{x_of(ours)}" cy="{y - 4}" r="5"/>',
            ]
        y += 6
    ticks = []
    for tick in (1.0, 1.1, 1.2, 1.3, 1.4):
        kind, x = "one" if tick == 1.0 else "tick", x_of(tick)
        ticks += [
            f'<line class="{kind}" x1="{x}" x2="{x}" y1="{top + 6}" y2="{y + 4}"/>',
            f'<text class="axis" x="{x}" y="{y + 20}" text-anchor="middle">{tick}</text>',
        ]
    height = y + 48
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 550 {height}"'
            f' width="550" height="{height}" role="img">',
            "<title>Time of a training step as a multiple of the step without loss scaling</title>",
            f"<style>{STYLE}\n</style>",
            f'<rect class="page" width="550" height="{height}" rx="6"/>',
            '<circle class="ours" cx="16" cy="20" r="5"/><text x="28" y="25">lossscale</text>',
            '<circle class="peer" cx="116" cy="20" r="5"/>',
            '<text x="128" y="25">GradScaler, Keras&#8217; class, Flax&#8217;s DynamicScale</text>',
            *ticks,
            *rows,
            f'<text class="axis" x="{(LEFT + RIGHT) / 2}" y="{y + 38}" text-anchor="middle">'
            "time of a step; 1 is without loss scaling</text>",
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    CHART.write_text(drawn(whole_steps()), encoding="utf-8")
