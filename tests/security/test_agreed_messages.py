"""What ranks say to each other about an agreed order, with mistakes in it."""

from __future__ import annotations

import contextlib
import random

import pytest

from asynccomm.batching.ordering.codec import MessageReader, MessageWriter, Mismatch, OrderMessageError, op_request
from asynccomm.batching.ordering.protocol import Announcer, OrderCoordinator
from tests.cases import cases
from tests.sampling import amount

from .mutations import little_memory, mutated

OPS = [("tag", (1, 2), "all_reduce(float32[3])", 12), ("", (3, 4), "barrier()", 0), ("ä" * 20, (2**64 - 1, 0), "", 5)]


def spoken() -> list[bytes]:
    """What a Voice says, in full and by ids, and what a Council answers."""
    said: list[bytes] = []
    announcer: Announcer[int] = Announcer()
    coordinator = OrderCoordinator(1, max_ops=2)
    for turn in range(3):
        for op in OPS * (1 + turn):
            announcer.issue(*op, 0)
        announced = announcer.message()
        assert announced is not None
        coordinator.hear(0, announced)
        decided = coordinator.message()
        assert decided is not None
        announcer.hear(decided)
        said += [announced, decided]
    writer = MessageWriter()
    writer.mismatch(Mismatch("tag", 0, "barrier()", 1, "all_reduce(float32[3])"))
    return [*said, writer.written()]


SPOKEN = spoken()


def read(message: bytes) -> None:
    reader = MessageReader(message)
    for token in reader:
        if token == -1:
            reader.announced()
        elif token == -3:
            reader.mismatch()


@cases("seed", range(amount(20, 8)))
def test_messages_that_are_almost_right(seed: int) -> None:
    choose = random.Random(seed)
    with little_memory():
        for _ in range(300):
            message = mutated(choose.choice(SPOKEN), choose) if choose.random() < 0.8 else choose.randbytes(40)
            with contextlib.suppress(OrderMessageError):
                read(message)


@cases("seed", range(amount(20, 8)))
def test_a_council_that_hears_nonsense_takes_nothing_of_it(seed: int) -> None:
    """So the others are decided on as ever."""
    choose = random.Random(seed)
    for _ in range(50):
        coordinator = OrderCoordinator(2)
        garbled = False
        for _ in range(5):
            message = mutated(choose.choice(SPOKEN), choose)
            try:
                coordinator.hear(1, message)
            except OrderMessageError:
                garbled = True
                break
        if garbled and coordinator.undecided is None and coordinator.message() is None:
            for rank in range(2):
                announcer: Announcer[int] = Announcer()
                announcer.issue("other", (1, 1), "barrier()", 0, 7)
                announced = announcer.message()
                assert announced is not None
                coordinator.hear(rank, announced)
            decided = coordinator.message()
            assert decided is not None
            assert announcer.hear(decided) == [[7]]


@cases("seed", range(amount(20, 8)))
def test_a_voice_that_hears_nonsense(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(100):
        announcer: Announcer[int] = Announcer()
        for op in OPS:
            announcer.issue(*op, 0)
        announcer.message()
        try:
            for _ in range(5):
                announcer.hear(mutated(choose.choice(SPOKEN), choose))
        except (OrderMessageError, Mismatch) as exc:
            assert len(str(exc)) < 10_000


def test_a_length_takes_no_memory() -> None:
    with little_memory(64 << 20):
        for size in (b"\xff" * 8 + b"\x7f", b"\x80\x80\x80\x80\x10"):
            with pytest.raises(OrderMessageError):
                read(b"\0" + size + b"tag")
    said = op_request("t", (1, 2), "x", 0)
    assert said == ("t", (1, 2), "x", 0)
