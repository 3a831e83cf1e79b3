"""Errors in the words of torch's own backends, which programs and torch's tests look for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from asynccomm.errors import MonitoredBarrierError

INSTANT: Final = timedelta(milliseconds=1)  # a monitored barrier with no more is over for rank 0 before it begins


def monitored_barrier_failed(
    error: MonitoredBarrierError, rank: int, limit: timedelta, wait_all_ranks: bool
) -> RuntimeError:
    """What gloo raises on ``rank`` in place of ``error``.

    Only rank 0 is told of other ranks: of the first that did not come, or with ``wait_all_ranks`` of all of them, which
    gloo calls "Ranks" also if it is one. ``limit`` is the barrier's.
    """
    if rank != 0:
        return RuntimeError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n{error}"
        )
    milliseconds = limit // timedelta(milliseconds=1)
    timed_out = f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms."
    if error.missing == (0,):  # by the verdict of a rank that gave up waiting for it
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
    """Raise the RuntimeError of torch, on all ranks at once, unless ``ranks`` can be a part of a group of ``size``."""
    if not ranks:
        raise RuntimeError("Split ranks cannot be empty. Please provide a non-empty list of ranks to split the group.")
    if len(set(ranks)) != len(ranks):
        raise RuntimeError(
            "Split ranks should not have duplicates. Please provide a list of unique ranks to split the group, "
            f"got {list(ranks)}"
        )
    if not all(0 <= rank < size for rank in ranks):
        raise RuntimeError(f"Split ranks must be ranks of the group, in [0, {size}), got {list(ranks)}")
