"""Ranks that the kernel has put on one core: while they wait for each other, one of them moves to an idle core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch

from asynccomm import Comm
from asynccomm.backends.shm.layout import MOVE, Word
from asynccomm.core.native import CoreUnavailable, load_core

CORES = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built"),
    pytest.mark.skipif(len(CORES) < 2, reason="needs 2 cores"),
]


def moves_of(comm: Comm) -> Callable[[], int]:
    """The number of moves of this rank."""
    board = comm.unsafe_get_backend()._engine._board  # type: ignore[attr-defined]
    at = board.layout.word(comm.rank, Word.CALLER)
    return lambda: board._words[at] // MOVE


@pytest.mark.ranks(2)
async def test_ranks_on_one_core_part(comm: Comm) -> None:
    moves, found = moves_of(comm), torch.zeros(2)
    deadline = time.monotonic() + 60
    while not found[0]:
        os.sched_setaffinity(0, CORES[:1])  # the kernel leaves it there for some milliseconds
        os.sched_setaffinity(0, CORES)
        for _ in range(300):
            await comm.all_reduce(torch.ones(2))
        found[:] = torch.tensor([moves(), time.monotonic() > deadline])
        await comm.all_reduce(found)
        if found[1]:
            pytest.skip("other processes keep all cores busy")
    assert sorted(os.sched_getaffinity(0)) == CORES


@pytest.mark.ranks(2)
async def test_ranks_that_may_use_one_core_only_stay(comm: Comm) -> None:
    moves = moves_of(comm)
    os.sched_setaffinity(0, CORES[:1])
    try:
        await comm.barrier()
        for _ in range(1000):
            await comm.all_reduce(torch.ones(2))
        assert os.sched_getaffinity(0) == {CORES[0]}
        assert moves() == 0
    finally:
        os.sched_setaffinity(0, CORES)
