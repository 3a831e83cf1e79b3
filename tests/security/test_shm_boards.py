"""What a rank may find on the board: words, headers and slots that another one has written."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch

from asynccomm import ops
from asynccomm.backends.shm.board import LARGEST, Board
from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.layout import RecordWord, Word
from asynccomm.backends.shm.lowering import start
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops import Call, Parcel, Parcels
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.signature import describe, differing_layout, signature
from asynccomm.ops.validation import CommInfo
from tests.cases import cases
from tests.sampling import amount

from ..backends.shm.world import each_executor, executors, submission  # noqa: F401, TID252
from .mutations import HUGE, little_memory

GROUP = CommInfo("test", 0, 2, torch.device("cpu"))
ALL_REDUCE = ops.AllReduce(torch.float32, 6, ReduceOp.SUM)


def all_reduce(n: int) -> Call:
    return ops.AllReduce.of(GROUP, torch.ones(n), ReduceOp.SUM)


def pair() -> tuple[Executor, Board]:
    """This rank's executor, and the board of the rank that writes nonsense."""
    mine, theirs = executors(2)
    return mine, theirs.board


def all_reduce_of_several(*sizes: int) -> Call:
    return ops.AllReduce.of_several(GROUP, [torch.ones(n) for n in sizes], ReduceOp.SUM)


def drive(progress: Any, turns: int = 50) -> BaseException | None:
    """What it ends with; None if it still waits, or is done."""
    try:
        for _ in range(turns):
            if next(progress, None) is None:
                return None
    except BrokenError as exc:
        assert len(str(exc)) < 2000
        return exc
    return None


# -- words ------------------------------------------------------------------------------------------------------------


@cases("seed", range(amount(20, 8)))
def test_any_words_can_be_described(seed: int) -> None:
    choose = random.Random(seed)
    right = [
        signature(op)
        for op in (ALL_REDUCE, ops.Barrier(), Parcels("broadcast", giver=1), ops.Broadcast(torch.int8, 9, 1))
    ]
    for _ in range(2000):
        words = choose.choice([(choose.getrandbits(64), choose.getrandbits(64)), choose.choice(right)])
        bit = 1 << choose.randrange(64)
        words = choose.choice([words, (words[0] ^ bit, words[1]), (words[0], words[1] ^ bit), (words[0] & 0xFF, 2**63)])
        text = describe(words)
        assert isinstance(text, str)
        assert len(text) < 400
        differing_layout(words, right[0])


@cases("seed", range(amount(20, 8)))
def test_words_that_a_rank_has_written(seed: int) -> None:
    choose = random.Random(seed)
    with little_memory():
        for _ in range(30):
            executor, theirs = pair()
            mine = executor.board
            call = choose.choice([all_reduce(6), all_reduce_of_several(6, 7)])
            progress = start(executor, submission(call, 0), 512)
            theirs.begin(0, ALL_REDUCE, 1)
            theirs.put(0, 0, tuple(choose.choice([0, 8, 64, 1016, *HUGE]) % 2**64 for _ in range(3)))  # type: ignore[arg-type]
            theirs.post(0)
            layout, words = mine.layout, mine._words
            for word in (layout.record(1, 0), layout.word(1, Word.REDUCED), layout.word(1, Word.FINISHED)):
                if choose.random() < 0.3:
                    words[word] = choose.choice([1, *HUGE]) % 2**64
            if choose.random() < 0.7:
                record = layout.record(0, 1)
                words[record + choose.choice([RecordWord.CODE, RecordWord.NUMEL, RecordWord.HISTORY])] ^= (
                    1 << choose.randrange(64)
                )
            drive(progress)


# -- headers of streams -----------------------------------------------------------------------------------------------


def taking(board: Executor) -> tuple[Any, list[int]]:
    asked: list[int] = []

    def place(source: int, head: bytes, lengths: Any) -> list[torch.Tensor]:
        asked.append(lengths[source])
        return [torch.zeros(lengths[source], dtype=torch.uint8)]

    op = Parcels("broadcast", giver=1)
    return start(board, submission(Call(op, (), (), None, place=place), 0), 512), asked


@cases("at, number", product(range(3), [LARGEST + 1, 2**60, 2**64 - 1]))
def test_numbers_that_cannot_be(at: int, number: int) -> None:
    mine, theirs = pair()
    progress, asked = taking(mine)
    theirs.begin(0, Parcels("broadcast", giver=1), 1)
    header = [0, 8, 1]
    header[at] = number
    theirs.put(0, 0, (header[0], header[1], header[2]))
    theirs.post(0)
    with pytest.raises(BackendError, match=r"rank 1 announces for broadcast\(root=1\) what cannot be"):
        list(progress)
    assert asked == []


@cases("header", [(0, 5000, 1), (3000, 0, 1), (1025, 0, 1), (0, 5000, 4), (2000, 5000, 3), (0, 0, 2**32)], ids=str)
def test_a_stream_that_ends_before_all_has_come(header: tuple[int, int, int]) -> None:
    """It would be taken as complete, with whatever was in the memory before."""
    mine, theirs = pair()
    progress, _ = taking(mine)
    next(progress, None)
    theirs.begin(0, Parcels("broadcast", giver=1), 1)
    theirs.put(0, 0, header)
    for step in range(min(header[2], 4)):
        theirs.post(step)
    error = drive(progress)
    assert isinstance(error, BackendError)
    assert str(error).startswith("rank 1 announces")


@cases("seed", range(amount(20, 8)))
def test_any_headers(seed: int) -> None:
    choose = random.Random(seed)
    with little_memory():
        for _ in range(30):
            mine, theirs = pair()
            shared = choose.random() < 0.5
            op = Parcels("all_gather") if shared else Parcels("all_to_all", shared=False)
            given = [Parcel(b"abc", (torch.ones(300),))] * (1 if shared else 2)

            def place(source: int, head: bytes, lengths: Any) -> list[torch.Tensor]:
                if lengths[source] > 1 << 20:
                    raise ValueError("too much")
                return [torch.zeros(lengths[source], dtype=torch.uint8)]

            call = Call(op, (), (), None, parcels=tuple(given), place=place)
            progress = start(mine, submission(call, 0), 512)
            theirs.begin(0, op, 1)
            for part in range(2):
                numbers = [choose.choice([0, 3, 8, 900, 5000, 2**31, 2**47, *HUGE]) % 2**64 for _ in range(3)]
                theirs.put(0, part, (numbers[0], numbers[1], choose.choice([0, 1, 2, 5, numbers[2]])))
            for step in range(choose.choice([1, 5])):
                theirs.post(step)
                theirs.finish(step)
            drive(progress, 30)
