"""Rings: frames come out as they went in, whatever the ring's size, and nonsense is an error."""

import ctypes
import mmap
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import LINE, WORD, Layout
from asynccomm.backends.shm.rings import (
    HEADER,
    LOAN,
    OPEN,
    PADDING,
    WITHDRAWN,
    Mapped,
    Reader,
    Writer,
    framed,
    largest_payload,
)
from asynccomm.errors import BackendError

KIND = 7


class Pair:
    """Both ends of the ring from rank 0 to rank 1."""

    def __init__(self, ring: int) -> None:
        self.layout = Layout(2, 64, 2, ring)
        self.memory = mmap.mmap(-1, self.layout.total)
        self.raw = memoryview(self.memory)
        data = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.mapped = Mapped(self.layout, self.raw.cast("Q"), self.raw, data.data_ptr())
        self.start = self.layout.ring_start(0, 1) + 2 * LINE
        self.writer = Writer(self.mapped, 0, 1, Fence())
        self.reader = Reader(self.mapped, 0, 1, Fence())

    def put(self, payload: bytes, tag: int = 0) -> bool:
        source = torch.tensor(list(payload), dtype=torch.uint8)
        return self.writer.put(KIND, tag, 1, 2, 3, source.data_ptr(), len(payload))

    def read(self, count: int | None = None) -> tuple[list[tuple[int, bytes]], bool]:
        """Tags and payloads, and whether the writer must hear of the room."""
        frames: list[tuple[int, bytes]] = []
        self.reader.open()
        while (count is None or len(frames) < count) and (frame := self.reader.take()) is not None:
            nbytes, kind, tag, extra, ident, length = frame
            assert (kind, extra, ident, length) == (KIND, 1, 2, 3)
            frames.append((tag, bytes(self.raw[self.reader.payload : self.reader.payload + nbytes])))
            self.reader.free()
        return frames, self.reader.publish()


@given(
    ring=st.sampled_from([1024, 1088, 2048, 4096]),
    steps=st.lists(st.one_of(st.integers(0, 992), st.just("read"), st.just("read one")), max_size=100),
)
def test_frames_come_out_as_they_went_in(ring: int, steps: list[int | str]) -> None:
    pair = Pair(ring)
    written: list[tuple[int, bytes]] = []
    read: list[tuple[int, bytes]] = []
    blocked = False  # the writer waits for room, and would sleep until it hears of some
    for tag, step in enumerate(steps):
        if isinstance(step, str):
            frames, told = pair.read(1 if step == "read one" else None)
            read += frames
            blocked = blocked and not told
        elif not blocked:
            payload = bytes((tag + i) % 256 for i in range(min(step, largest_payload(ring))))
            if pair.put(payload, tag):
                written.append((tag, payload))
            else:
                blocked = True
    frames, told = pair.read()
    assert read + frames == written
    assert told or not blocked, "the writer would sleep for ever"
    for _ in range(8):  # with nothing in it, it takes the largest frame wherever it stands
        assert pair.put(bytes(largest_payload(ring)))
        pair.read()


@pytest.mark.parametrize("ring", [1024, 1088, 1 << 20])
def test_what_fits(ring: int) -> None:
    pair = Pair(ring)
    largest = largest_payload(ring)
    assert framed(largest) <= ring // 4
    assert framed(largest) % LINE == 0
    assert framed(0) == LINE
    for _ in range(4):
        assert pair.put(bytes(largest))
    count = 0
    while pair.writer.run and pair.put(b""):
        count += 1
    assert count == (ring - 4 * framed(largest)) // LINE
    assert not pair.put(b"")
    assert len(pair.read()[0]) == 4 + count
    assert pair.put(b"")


def test_a_frame_is_written_in_place() -> None:
    pair = Pair(1024)
    for tag in range(20):
        target = pair.writer.reserve(100)
        assert target == pair.writer.reserve(100), "nothing is taken before it is published"
        ctypes.memmove(target, bytes(range(tag, tag + 100)), 100)
        assert pair.read()[0] == []
        pair.writer.publish(KIND, tag, 1, 2, 3)
        assert pair.read()[0] == [(tag, bytes(range(tag, tag + 100)))]


def test_there_is_no_place_where_there_is_no_room() -> None:
    pair = Pair(1024)
    for _ in range(4):
        assert pair.put(bytes(largest_payload(1024)))
    assert pair.writer.reserve(0) == 0
    pair.read()
    assert pair.writer.reserve(0)


def test_the_payload_may_reach_the_end() -> None:
    pair = Pair(1024)
    for _ in range(5):
        assert pair.put(bytes(100))
        pair.read()
    assert pair.writer.run == 1024 - 5 * framed(100) - HEADER
    while pair.writer.run > 0 and pair.put(bytes(min(pair.writer.run, 90))):
        pair.read()
        if pair.writer.run == 1024 - HEADER:
            return
    raise AssertionError("it never came to the end")


@pytest.mark.parametrize("nbytes", [33, 225, 992, 1024, 2**31, 2**32 - 1])
def test_a_length_beyond_what_was_published(nbytes: int) -> None:
    pair = Pair(1024)
    pair.put(b"abc")
    struct.pack_into("=II", pair.raw, pair.start, nbytes, KIND)
    pair.reader.open()
    with pytest.raises(BackendError, match=f"ring from rank 0 is corrupt: a frame with {nbytes} bytes of payload"):
        pair.reader.take()


def test_a_length_beyond_the_end_of_the_ring() -> None:
    pair = Pair(1024)
    for _ in range(15):
        assert pair.put(b"")
    pair.read()
    for _ in range(5):  # the first of them is the last line of the ring
        assert pair.put(b"")
    struct.pack_into("=I", pair.raw, pair.start + 15 * LINE, 100)
    pair.reader.open()
    with pytest.raises(BackendError, match="a frame with 100 bytes of payload where 32 are left"):
        pair.reader.take()


def test_padding_beyond_what_was_published() -> None:
    pair = Pair(1024)
    pair.put(b"abc")
    struct.pack_into("=II", pair.raw, pair.start, 1024 - HEADER, PADDING)
    pair.reader.open()
    with pytest.raises(BackendError, match="corrupt"):
        pair.reader.take()


@pytest.mark.parametrize("head", [1, 63, 1088, 2**63, 2**64 - 64])
def test_a_head_that_cannot_be(head: int) -> None:
    pair = Pair(1024)
    pair.mapped.words[pair.reader.head_at] = head
    with pytest.raises(BackendError, match="corrupt"):
        pair.reader.open()


def test_a_head_that_ran_back() -> None:
    pair = Pair(1024)
    pair.put(b"abc")
    pair.read()
    pair.mapped.words[pair.reader.head_at] = 0
    with pytest.raises(BackendError, match="corrupt"):
        pair.reader.open()


def test_loans() -> None:
    """A loan may still be withdrawn; then another frame follows. A claimed one is like any frame."""
    pair = Pair(1024)
    source = torch.tensor([8, OPEN])
    assert pair.writer.put(LOAN, 5, 1, 2, 3, source.data_ptr(), 16)
    claim = (pair.start + HEADER) // WORD + 1
    assert pair.put(b"next")
    assert pair.read() == ([], False)
    pair.mapped.words[claim] = WITHDRAWN
    assert pair.read() == ([(0, b"next")], False)
    assert pair.reader.state.tail == pair.writer._state.head
    pair = Pair(1024)
    assert pair.writer.put(LOAN, 5, 1, 2, 3, source.data_ptr(), 16)
    pair.mapped.words[claim] = 1
    pair.reader.open()
    assert pair.reader.take() == (16, LOAN, 5, 1, 2, 3)
