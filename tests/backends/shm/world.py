"""Ranks of a segment in one process, moved on one step at a time in any order."""

import functools
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynccomm.backends.base import Submission
from asynccomm.backends.shm import lowering
from asynccomm.backends.shm.arena import arena
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.executor import Executor, Pace
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import Layout
from asynccomm.backends.shm.lowering import start
from asynccomm.backends.shm.peer_memory import PeerMemory
from asynccomm.backends.shm.reference import Progress
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.ops import Call

PYTHON = CoreUnavailable("not wanted")
_kind = "mixed"


def nothing(*_: object) -> None:
    pass


@functools.cache
def _reader() -> int:
    return arena().hold()


def boards(size: int, chunk: int = 1024, banks: int = 4) -> list[Board]:
    return [board for board, _ in _boards([PYTHON] * size, chunk, banks)]


def _boards(cores: list[Any], chunk: int, banks: int) -> Iterator[tuple[Board, memoryview]]:
    size = len(cores)
    layout = Layout(size, max(chunk, 64 * size), banks, 1024)
    memory = bytearray(layout.total)
    words = memoryview(memory).cast("Q")
    data = torch.frombuffer(memory, dtype=torch.uint8)
    for rank, core in enumerate(cores):
        peers = PeerMemory([_reader()] * size)
        state = None if isinstance(core, CoreUnavailable) else core.RankPosition()
        yield Board(rank, layout, words, data, Fence(), nothing, state, peers), memoryview(memory)


def executors(size: int, chunk: int = 1024, banks: int = 4, kind: str = "", *, liveness: int = -1) -> list[Executor]:
    """An executor for each rank: all in C ("core"), all in Python ("reference"), or every other one ("mixed").

    With "single copy" they are all in C, and read each other's memory.

    Args:
        liveness: a descriptor that is readable once a rank is lost, for single copy.
    """
    core = load_core()
    cores = {"reference": [PYTHON, PYTHON], "mixed": [core, PYTHON]}.get(kind or _kind, [core, core])
    bells = [(-1, -1)] * size
    by_rank = [cores[rank % 2] for rank in range(size)]
    boards = zip(by_rank, _boards(by_rank, chunk, banks), strict=True)
    made = [Executor(board, memory, bells, core) for core, (board, memory) in boards]
    if (kind or _kind) == "single copy":
        for each in made:
            assert each.segment is not None
            each.segment.single_copy([liveness] * size)
    return made


@pytest.fixture(autouse=True, params=["core", "reference", "mixed"])
def each_executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test of the modules that import it with all kinds of executors."""
    if isinstance(unavailable := load_core(), CoreUnavailable) and request.param != "reference":
        pytest.skip(unavailable.reason)
    monkeypatch.setattr(f"{__name__}._kind", request.param)
    return str(request.param)


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size may be lent."""
    monkeypatch.setattr(lowering, "LENT_BYTES", 0)


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in memory that the other ranks can read."""
    return arena().strided(tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)


def submission(call: Call, seq: int) -> Submission:
    work: Any = SimpleNamespace(seq=seq)
    return Submission(call, work)


def interleave(
    world: list[Executor], programs: list[list[Submission]], whole: int, choose: random.Random, *, stalls: bool = True
) -> None:
    """Run each rank's operations in order, in a random interleaving; with ``stalls`` some ranks fall far behind."""
    queues = [list(program) for program in programs]
    current: list[Progress | None] = [None] * len(world)
    idle = 0
    while any(queues):
        rank = choose.randrange(len(world))
        turns = choose.choice([1, 1, 3, 50]) if stalls else 1
        for _ in range(turns):
            if not queues[rank]:
                break
            progress = current[rank] or start(world[rank], queues[rank][0], whole)
            current[rank] = progress
            try:
                moved = next(progress)
            except StopIteration:
                queues[rank].pop(0)
                current[rank] = None
                moved = True
            idle = 0 if moved else idle + 1
            if not moved:
                break
        assert idle < 10_000, f"stuck: {[len(queue) for queue in queues]}"


def in_threads(world: list[Executor], programs: list[list[Submission]], whole: int) -> None:
    """Run each rank's operations on a thread of its own, all at once."""

    def run(executor: Executor, program: list[Submission]) -> None:
        for each in program:
            for moved in start(executor, each, whole):
                executor.drive(Pace(1e-4))
                if not moved:
                    os.sched_yield()

    with ThreadPoolExecutor(len(world)) as pool:
        for done in [pool.submit(run, *each) for each in zip(world, programs, strict=True)]:
            done.result(60)
