"""A picture of measurements: time and bus bandwidth by size, a column for each operation. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asynccomm.benchmarks.rows import Measurement

_PANELS = (("us", "time (us)"), ("busbw", "bus bandwidth (GB/s)"))


def plot(rows: Sequence[Measurement], path: Path) -> None:
    """Draw ``rows`` into the PNG file ``path``, without those that have no size. Raises: ImportError, OSError."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    sized = [row for row in rows if row.bytes]
    ops = list(dict.fromkeys(row.op for row in sized))
    figure = Figure(figsize=(4.2 * max(1, len(ops)), 6), layout="constrained")
    grid = figure.subplots(2, max(1, len(ops)), squeeze=False, sharex="col")
    for column, op in enumerate(ops):
        for line, (attribute, label) in enumerate(_PANELS):
            axes = grid[line][column]
            for name in dict.fromkeys(row.contender for row in sized if row.op == op):
                mine = [row for row in sized if (row.op, row.contender) == (op, name)]
                sizes, values = [row.bytes for row in mine], [getattr(row, attribute) for row in mine]
                axes.plot(sizes, values, marker="o", markersize=3, label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
            axes.set_ylabel(label)
        grid[0][column].set_title(op)
        grid[0][column].legend()
        grid[1][column].set_xlabel("size (bytes)")
    if sized:
        figure.suptitle(f"{sized[0].ranks} ranks, backend {sized[0].backend}")
    figure.savefig(path, format="png", dpi=75)
