"""What the benches share: rows of results, as JSON and as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "median", "print_rows", "write_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operation, here and elsewhere."""

    op: str  #: what was measured
    bytes: int  #: payload of one operation
    ranks: int
    backend: str
    asynccomm_us: float  #: microseconds of one operation
    peer: str  #: whom it is compared with
    peer_us: float
    ratio: float = field(init=False)  #: how many times as fast asynccomm is

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.peer_us / self.asynccomm_us)


def median(values: Iterable[float]) -> float:
    """The middle one. Benches take it over rounds: a mean would be that of the machine's other work."""
    return statistics.median(values)


def write_rows(path: Path | str, rows: Sequence[Row]) -> None:
    """Write ``rows`` to ``path`` as a JSON list of objects."""
    Path(path).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def print_rows(rows: Sequence[Row], title: str = "") -> None:
    """Print ``rows`` as a table."""
    table = Table(title=title or None)
    table.add_column("op")
    for name in ("bytes", "ranks"):
        table.add_column(name, justify="right")
    table.add_column("backend")
    table.add_column("asynccomm us", justify="right")
    table.add_column("peer")
    table.add_column("peer us", justify="right")
    table.add_column("ratio", justify="right")
    for row in rows:
        table.add_row(
            row.op,
            str(row.bytes),
            str(row.ranks),
            row.backend,
            f"{row.asynccomm_us:.2f}",
            row.peer,
            f"{row.peer_us:.2f}",
            f"{row.ratio:.2f}x",
        )
    console = Console()
    console.width = max(console.width, 110)  # a pipe counts as 80 columns, which would cut the names
    console.print(table)
