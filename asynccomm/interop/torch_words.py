"""Errors with the texts of torch's own backends, which programs and torch's tests match."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from asynccomm.errors import MonitoredBarrierError

INSTANT: Final = timedelta(milliseconds=1)  # with at most this timeout, rank 0's monitored barrier fails at once


def monitored_barrier_failed(
    error: MonitoredBarrierError, rank: int, limit: timedelta, wait_all_ranks: bool
) -> RuntimeError:
    """gloo's error on ``rank`` that corresponds to ``error``.

    Only rank 0's error names other ranks: the first missing rank, or with ``wait_all_ranks`` all missing ranks, which
    gloo calls "Ranks" also for a single one. ``limit`` is the barrier's timeout.
    """
    if rank != 0:
        return RuntimeError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n{error}"
        )
    milliseconds = limit // timedelta(milliseconds=1)
    timed_out = f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms."
    if error.missing == (0,):  # another rank timed out waiting for rank 0
        return RuntimeError(f"{timed_out}\n Original exception: \n{error}")
    if wait_all_ranks:
        names = ", ".join(map(str, error.missing))
        return RuntimeError(f"[Rank 0]: Ranks {names} failed to pass monitoredBarrier in {milliseconds} ms")
    cause = f"{timed_out}\n{error}" if limit <= INSTANT else str(error)
    return RuntimeError(
        f"[Rank 0]: Rank {error.missing[0]} failed to pass monitoredBarrier in {milliseconds} ms\n"
        f" Original exception: \n{cause}"
    )


def check_split(ranks: Sequence[int], size: int) -> None:
    """Raise torch's RuntimeError, on all ranks, unless ``ranks`` are distinct ranks of a group of ``size``."""
    if not ranks:
        raise RuntimeError("Split ranks cannot be empty. Please provide a non-empty list of ranks to split the group.")
    if len(set(ranks)) != len(ranks):
        raise RuntimeError(
            "Split ranks should not have duplicates. Please provide a list of unique ranks to split the group, "
            f"got {list(ranks)}"
        )
    if not all(0 <= rank < size for rank in ranks):
        raise RuntimeError(f"Split ranks must be ranks of the group, in [0, {size}), got {list(ranks)}")
