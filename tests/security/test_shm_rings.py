"""What a rank may find in the ring from another one: frames with mistakes, and more of them than there may be."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from asynccomm.backends.shm import endpoint
from asynccomm.backends.shm.endpoint import CLEAR, DATA, OFFER, SHORT
from asynccomm.backends.shm.layout import LINE
from asynccomm.backends.shm.rings import framed
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import MessageSpace
from asynccomm.ops.dtypes import CODES
from asynccomm.ops.parcels import MAX_HEAD
from tests.cases import cases
from tests.sampling import amount

from ..backends.shm.ring_world import Box, World, executor, pattern, text  # noqa: F401, TID252
from .mutations import HUGE, little_memory, mutated

BYTE = CODES[torch.uint8]
OBJECTS = MessageSpace.OBJECTS.key(0)


class Guarded:
    """Memory for what comes, with some around it that nobody may touch."""

    def __init__(self, *lengths: int) -> None:
        self.memory = torch.zeros(sum(lengths) + 4000 * (len(lengths) + 1), dtype=torch.uint8)
        self.rooms: list[Tensor] = []
        self.gaps: list[Tensor] = []
        at = 0
        for length in lengths:
            self.gaps.append(self.memory[at : at + 4000])
            self.rooms.append(self.memory[at + 4000 : at + 4000 + length])
            at += 4000 + length
        self.gaps.append(self.memory[at:])

    def check(self) -> None:
        assert not any(gap.any() for gap in self.gaps)


def begun(choose: random.Random) -> tuple[World, Guarded]:
    """Something of every kind is under way, and the ring from rank 0 to rank 1 has frames of it."""
    world = World()
    guarded = Guarded(100, 900, 50, 700)
    world.recv(1, 0, guarded.rooms[0])
    world.recv(1, 0, guarded.rooms[1], 1)

    def place(source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        return [guarded.rooms[3]]

    world.recv_parcel(1, 0, lambda *_: [guarded.rooms[2]])
    world.recv_parcel(1, 0, place, 1)
    world.send(1, 0, pattern(900, 0, 0), 5)
    world.recv(0, 1, torch.zeros(900, dtype=torch.uint8), 5)
    for send in choose.sample(range(4), 4):
        match send:
            case 0:
                world.send(0, 1, pattern(100, 0, 0))
            case 1:
                world.send(0, 1, pattern(900, 0, 1), 1)
            case 2:
                world.send_parcel(0, 1, text(10), [pattern(50, 0, 2)])
            case _:
                world.send_parcel(0, 1, text(300), [pattern(700, 0, 3)], 1)
    for _ in range(choose.randrange(4)):
        world.settle_some(1)
    return world, guarded


def go_on(world: World, guarded: Guarded) -> None:
    """Rank 1 reads what there is, and ends in good order or with an error that is documented."""
    try:
        for _ in range(20):
            world.ranks[1].progress()
        world.recv(1, 0, torch.zeros(8, dtype=torch.uint8), 9)
        world.recv_parcel(1, 0, Box(), 9)
    except BrokenError as exc:  # out of submit, where an engine takes it as well
        world.errors.append(exc)
    guarded.check()
    assert all(isinstance(error, (BackendError, CollectiveMismatchError)) for error in world.errors), world.errors
    assert all(len(str(error)) < 1000 for error in world.errors)


@cases("seed", range(amount(40, 15)))
def test_frames_that_are_almost_right(seed: int) -> None:
    choose = random.Random(seed)
    with little_memory():
        for _ in range(10):
            world, guarded = begun(choose)
            start = world.layout.ring_start(0, 1)
            at = start + 2 * LINE + choose.randrange(0, 1024, LINE)
            n = choose.choice([LINE, 256])
            there = mutated(bytes(world.raw[at : at + n]), choose)[: start + 2 * LINE + 1024 - at]
            world.raw[at : at + len(there)] = there
            if choose.random() < 0.3:
                head = world.words[start // 8]
                world.words[start // 8] = choose.choice([head + LINE, head + 1024, head - LINE, *HUGE]) % 2**64
            go_on(world, guarded)


@cases("seed", range(amount(40, 15)))
def test_frames_of_any_numbers(seed: int) -> None:
    """Each by itself is a frame, or nearly."""
    choose = random.Random(seed)
    tags = [0, 1, 5, OBJECTS, OBJECTS + 1, MessageSpace.INTERNAL.key(3), 2**32 - 1]
    with little_memory():
        for _ in range(amount(20, 10)):
            world, guarded = begun(choose)
            start = world.layout.ring_start(0, 1)
            head = world.words[start // 8]
            for _ in range(choose.randrange(1, 6)):
                nbytes = choose.choice([0, 1, 8, 50, 100, 224, 225, 992, 2**31, 2**32 - 1])
                frame = (
                    nbytes,
                    choose.choice([SHORT, OFFER, CLEAR, DATA, 0, 1, 6, 2**32 - 1]),
                    choose.choice(tags),
                    choose.choice([0, 8, BYTE, CODES[torch.float32], MAX_HEAD, MAX_HEAD + 1, 2**32 - 1]),
                    choose.choice([0, 1, 2, 2**32 - 1]),
                    choose.choice([0, 50, 100, 900, 2**31, 2**60, 2**64 - 1]),
                )
                at = head % 1024
                struct.pack_into("=IIIIIxxxxQ", world.raw, start + 2 * LINE + at, *frame)
                head += choose.choice([framed(nbytes), LINE])
                world.words[start // 8] = head % 2**64
            go_on(world, guarded)


@cases("seed", range(amount(10, 5)))
def test_words_beside_the_ring(seed: int) -> None:
    """How far the other side has read, and how much it has matched."""
    choose = random.Random(seed)
    for _ in range(amount(20, 10)):
        world, guarded = begun(choose)
        start = world.layout.ring_start(1, 0)  # what rank 1 sends rank 0, which lies about it
        world.nobody_sleeps()
        before = bytes(world.raw[:start])
        for word in (8, 9):
            world.words[start // 8 + word] = choose.choice([0, 1, 63, 64, 1024, *HUGE]) % 2**64
        for i in range(30):
            world.send(1, 0, pattern(choose.choice([0, 8, 200, 500]), 0, i), 7)
            world.ranks[1].progress()
        after = start + 2 * LINE + 1024
        rest = world.layout.ring_start(1, 1)
        assert bytes(world.raw[: world.layout.ring_start(0, 0)]) == before[: world.layout.ring_start(0, 0)]
        assert after <= rest
        assert not any(world.raw[rest:]), "it writes into its own ring only"
        go_on(world, guarded)


@cases("word, value", product([0, 8], [1, 63, 64, 1023, 2**63, 2**64 - 1]))
def test_what_was_written_before_a_rank_came_is_nothing_to_go_by(word: int, value: int) -> None:
    """The ranks map the segment one after the other; a ring begins at 0 on both sides."""
    from asynccomm.backends.shm.fence import Fence
    from asynccomm.backends.shm.rings import Mapped, Reader, Writer

    world = World()
    mapped = Mapped(world.layout, world.words, world.raw, world.data.data_ptr())
    for source, destination in ((1, 1), (0, 1)):
        start = world.layout.ring_start(source, destination)
        world.words[start // 8 + word] = value
        writer, reader = Writer(mapped, source, destination, Fence()), Reader(mapped, source, destination, Fence())
        assert writer.run == 1024 - 32
        assert reader.state.tail == 0
        for _ in range(3):
            writer.put(SHORT)


@cases("kind, nbytes", product(["tensor", "parcel"], [0, 8, 200]))
def test_a_rank_keeps_no_more_than_a_ring_of_what_it_did_not_ask_for(kind: str, nbytes: int) -> None:
    world = World()
    tag, extra, length = (OBJECTS, nbytes, 0) if kind == "parcel" else (0, BYTE, nbytes)
    for kept in range(100):
        at = kept * framed(nbytes) % 1024
        if at + framed(nbytes) > 1024:
            break
        start = world.layout.ring_start(0, 1)
        struct.pack_into("=IIIIIxxxxQ", world.raw, start + 2 * LINE + at, nbytes, SHORT, tag, extra, 0, length)
        world.words[start // 8] += framed(nbytes)
        world.step(1)
        assert not world.errors
        if (kept + 2) * framed(nbytes) > 1024:
            break
    start = world.layout.ring_start(0, 1)
    at = world.words[start // 8] % 1024
    if at + framed(nbytes) > 1024:  # to its end, as a writer would
        struct.pack_into("=II", world.raw, start + 2 * LINE + at, 1024 - at - 32, 1)
        world.words[start // 8] += 1024 - at
        at = 0
    struct.pack_into("=IIIIIxxxxQ", world.raw, start + 2 * LINE + at, nbytes, SHORT, tag, extra, 0, length)
    world.words[start // 8] += framed(nbytes)
    world.step(1)
    (error,) = world.errors
    assert "rank 0 sends more than 1024 bytes before they are asked for" in str(error)


def test_a_rank_keeps_no_more_offers_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_OFFERS", 10)
    world = World()

    def offer(ident: int) -> None:
        start = world.layout.ring_start(0, 1)
        at = world.words[start // 8] % 1024
        struct.pack_into("=IIIIIxxxxQ", world.raw, start + 2 * LINE + at, 0, OFFER, 0, BYTE, ident, 5000)
        world.words[start // 8] += LINE
        world.step(1)

    for ident in range(10):
        offer(ident)
    world.recv(1, 0, torch.zeros(5000, dtype=torch.uint8))
    offer(10)
    assert not world.errors, "one of them was taken"
    offer(11)
    (error,) = world.errors
    assert "rank 0 has sent 11 messages that nobody has asked for" in str(error)


def test_a_head_that_comes_a_byte_at_a_time_takes_no_more_than_its_bytes() -> None:
    world = World()
    box = Box()
    world.recv_parcel(1, 0, box)
    head = amount(200_000, 20_000)
    world.write((0, OFFER, OBJECTS, head, 7, 0))
    world.step(1)
    arrival = next(iter(world.ranks[1]._links[0].incoming.values()))
    start = world.layout.ring_start(0, 1)
    for i in range(head):
        at = world.words[start // 8] % 1024
        struct.pack_into("=IIIIIxxxxQ", world.raw, start + 2 * LINE + at, 1, DATA, 0, 0, 7, 0)
        world.raw[start + 2 * LINE + at + 32] = i % 251
        world.words[start // 8] += LINE
        if i == head - 1:
            assert len(arrival._chunks) == head - 1  # bytes, not pieces
            assert isinstance(arrival._chunks, bytearray)
        world.ranks[1].progress()
    assert box.head == bytes(i % 251 for i in range(head))


@cases("length, tag", product([2**40, 2**60, 2**64 - 1], [0, OBJECTS]))
def test_an_offer_takes_no_memory(tag: int, length: int) -> None:
    world = World()
    world.recv(1, 0, torch.zeros(8, dtype=torch.uint8))
    asked: list[int] = []

    def place(source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        asked.append(lengths[source])
        return [torch.empty(lengths[source], dtype=torch.uint8)]  # it is up to the place what to make of that

    receive = world.recv_parcel(1, 0, place)
    with little_memory(64 << 20):
        world.write((0, OFFER, tag, 0 if tag else BYTE, 1, length))
        world.step(1)
    if tag:
        assert asked == [length]
        assert not world.errors
        assert receive not in world.done
    else:
        assert isinstance(world.errors[0], CollectiveMismatchError)
