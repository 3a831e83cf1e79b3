"""Ranks of a segment in one process, moved on one step at a time in any order."""

import random
from types import SimpleNamespace
from typing import Any

import torch

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.algorithms import Progress
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import Layout
from asynccomm.backends.shm.lowering import start
from asynccomm.ops import Call


def nothing(*_: object) -> None:
    pass


def boards(size: int, chunk: int = 1024, banks: int = 4) -> list[Board]:
    layout = Layout(size, max(chunk, 64 * size), banks, 1024)
    memory = bytearray(layout.total)
    words = memoryview(memory).cast("Q")
    data = torch.frombuffer(memory, dtype=torch.uint8)
    return [Board(rank, layout, words, data, Fence(), nothing) for rank in range(size)]


def submission(call: Call, seq: int) -> Submission:
    work: Any = SimpleNamespace(seq=seq)
    return Submission(call, work)


def interleave(
    world: list[Board], programs: list[list[Submission]], whole: int, choose: random.Random, *, stalls: bool = True
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
