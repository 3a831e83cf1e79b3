"""What the benches share: rows of results, as JSON and as a table."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

from rich.console import Console
from rich.table import Table

from asynccomm.benchmarks.rows import write_rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Results", "Row", "median", "print_rows", "print_table", "write_rows"]

R = TypeVar("R", bound="DataclassInstance")


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


@final
class Results(list[R]):
    """Rows of results, which outlive an interruption of the bench.

    They are in the file as soon as they are added, and the table is printed however the ``with`` block ends. Only rank
    0 does that, or a process that is no rank.

    Args:
        show: prints rows as a table.
        path: of the file; None: there is none.
    """

    def __init__(self, show: Callable[[list[Any]], object], path: str | None) -> None:
        super().__init__()
        self._show = show
        self._path = path
        self._reports = os.environ.get("RANK", "0") == "0"

    def add(self, *rows: R) -> None:
        self.extend(rows)
        if self._path is not None and self._reports:
            write_rows(self._path, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self and self._reports:
            self._show(self)


def print_rows(rows: Sequence[Row], title: str = "") -> None:
    """Print ``rows`` as a table."""
    print_table(
        ["op", "bytes", "ranks", "backend", "asynccomm us", "peer", "peer us", "ratio"],
        [
            (
                row.op,
                row.bytes,
                row.ranks,
                row.backend,
                f"{row.asynccomm_us:.2f}",
                row.peer,
                f"{row.peer_us:.2f}",
                f"{row.ratio:.2f}x" if row.ratio >= 0.1 else f"{row.ratio:.2g}x",
            )
            for row in rows
        ],
        title,
        left={"op", "backend", "peer"},
    )


def print_table(
    columns: Sequence[str], lines: Iterable[Sequence[object]], title: str = "", *, left: Collection[str] = ()
) -> None:
    """Print ``lines`` under ``columns``; those of ``left`` are words, the others numbers."""
    table = Table(title=title or None)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    for line in lines:
        table.add_row(*map(str, line))
    console = Console()
    console.width = max(console.width, 110)  # a pipe counts as 80 columns, which would cut the names
    console.print(table)
