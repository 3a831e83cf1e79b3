"""Measurements with the columns of nccl-tests: size, time, algorithm bandwidth, bus bandwidth. Without torch.

The size of an operation is the larger one of a rank's input and output, as in nccl-tests. The factors from algbw to
busbw are those of its PERFORMANCE.md; gather and scatter, which that page does not have, have those of its programs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from asynccomm.core.files import write_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FLOAT: Final = 4  # bytes; all tensors are float32
DIVIDED: Final = frozenset({"reduce_scatter_single", "all_to_all_single"})  # the input has a part for each rank
SHARED: Final = frozenset({"all_gather_single", "gather", "scatter"})  # a rank has one part of the size
OPERATIONS: Final = (
    *("all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("gather", "scatter", "send_recv", "barrier"),
)
USUAL: Final = tuple(op for op in OPERATIONS if op not in ("reduce", "gather", "scatter", "barrier"))
UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bus_factor(op: str, ranks: int) -> float:
    """The bus bandwidth over the algorithm bandwidth of ``op`` on ``ranks`` ranks."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in DIVIDED or op in SHARED:
        return (ranks - 1) / ranks
    return 1.0


def floats_of(op: str, nbytes: int, ranks: int) -> int:
    """The number of floats that ``operations`` needs for ``op`` with a size of ``nbytes``; at least one per part."""
    count = max(1, nbytes // FLOAT)
    if op in DIVIDED:
        return max(1, count // ranks) * ranks
    return max(1, count // ranks) if op in SHARED else count


def size_of(op: str, floats: int, ranks: int) -> int:
    """The size in bytes of ``op`` with the result of ``floats_of``; 0 for a barrier."""
    if op == "barrier":
        return 0
    return floats * FLOAT * (ranks if op in SHARED else 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One operation of one size by one contender."""

    op: str
    contender: str  #: "asynccomm", "gloo", "nccl" or "mpi"
    backend: str  #: of asynccomm
    ranks: int
    bytes: int  #: the larger one of a rank's input and output
    us: float  #: microseconds of one operation, median of the rounds
    algbw: float = field(init=False)  #: size over time, in units of 1e9 bytes per second
    busbw: float = field(init=False)  #: the same, times the bus factor

    def __post_init__(self) -> None:
        bandwidth = self.bytes / self.us / 1e3
        object.__setattr__(self, "algbw", bandwidth)
        object.__setattr__(self, "busbw", bandwidth * bus_factor(self.op, self.ranks))

    def __str__(self) -> str:
        name = f"{self.contender} ({self.backend})" if self.contender == "asynccomm" else self.contender
        return f"{self.op:<22}{name:<20}{self.bytes:>11}{self.us:>12.2f}{self.algbw:>11.3f}{self.busbw:>11.3f}"


HEAD: Final = f"{'operation':<22}{'contender':<20}{'size (B)':>11}{'time (us)':>12}{'algbw GB/s':>11}{'busbw GB/s':>11}"


def write_rows(path: Path | str, rows: Sequence[DataclassInstance]) -> None:
    """Write ``rows`` to ``path`` as a JSON list of objects, at once: an interruption keeps the former file.

    Raises: OSError.
    """
    write_whole(path, (json.dumps([asdict(row) for row in rows], indent=1) + "\n").encode())


def read_measurements(path: Path) -> list[Measurement]:
    """The rows of a file of ``write_rows``. Raises: OSError."""
    rows = json.loads(path.read_text())
    return [Measurement(**{name: row[name] for name in row.keys() - {"algbw", "busbw"}}) for row in rows]
