"""Uneven parts of exchanged data; apart from the operations, as MPI's ranks do not load torch."""

from __future__ import annotations


def uneven(n: int, size: int) -> list[int]:
    """``n`` or a few more in parts for each rank: the last about three times as large as the first."""
    weights = [1 + 2 * rank / max(1, size - 1) for rank in range(size)]
    return [max(1, round(n * weight / sum(weights))) for weight in weights]
