"""Estimates of the duration of calls, as computed by NCCL.

NCCL fuses the calls of a group if they are alike and of similar size, and estimates only one such heap of a group. So
each heap is estimated alone, and the sum is returned: as if the heaps ran one after the other, where NCCL may in fact
run some concurrently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from asynccomm.backends.nccl.api import Config, Nccl
from asynccomm.backends.nccl.communicator import Communicator
from asynccomm.backends.nccl.plan import NcclCall

SPREAD: Final = 4  # NCCL fuses like calls if their sizes differ by less than this factor
_MESSAGES: Final = frozenset({"send", "recv", "all_to_all", "gather", "scatter"})


def check_comm(nccl: Nccl, config: Config, size: int) -> None:
    """Raise ``NotImplementedError`` where NCCL has no estimates, or would run the estimated calls."""
    if "estimate" not in nccl.native:
        raise NotImplementedError(f"this NCCL, version {nccl.version}, cannot estimate how long operations take")
    if size == 1 or not config.blocking:
        which = "of one rank" if size == 1 else "that does not block (hint 'blocking')"
        raise NotImplementedError(f"NCCL cannot estimate how long operations take on a comm {which}: they would run")


def check_calls(calls: Sequence[NcclCall]) -> None:
    """Raise ``NotImplementedError`` for a call that NCCL cannot estimate."""
    for call in calls:
        if call.name in _MESSAGES:
            raise NotImplementedError(f"NCCL cannot estimate how long {call.op} takes, which it makes of messages")


def heaps(calls: Sequence[NcclCall]) -> list[list[NcclCall]]:
    """``calls`` grouped into the heaps that NCCL fuses."""
    alike: defaultdict[tuple[object, ...], list[NcclCall]] = defaultdict(list)
    for call in calls:
        alike[call.name, call.dtype, call.reduction].append(call)
    found: list[list[NcclCall]] = []
    for group in alike.values():
        group.sort(key=lambda call: call.count)
        heap = [group[0]]
        for call in group[1:]:
            if call.count >= SPREAD * heap[0].count:
                found.append(heap)
                heap = []
            heap.append(call)
        found.append(heap)
    return found


def estimate(calls: Sequence[NcclCall], communicator: Communicator, *, known: bool) -> float:
    """Estimated seconds of ``calls``. Blocks unless all are ``known``. Raises: NotImplementedError, BackendError."""
    total = 0.0
    for heap in heaps(calls):
        seconds = communicator.estimate(heap, known=known)
        if seconds < 0:
            raise NotImplementedError(f"NCCL cannot estimate how long {heap[0].op} takes")
        total += seconds
    return total
