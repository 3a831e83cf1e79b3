"""Both ends of a ring, in C and in Python: every byte, wrap-around, drops, and damage."""

from __future__ import annotations

import mmap
import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.backends.shm.segment import create
from asynccomm.errors import BackendError
from asynccomm.queues.layout import (
    BYTES,
    DATA,
    FLOOR,
    HEAD,
    OBJECT,
    SLEEPING,
    TAIL,
    WAITING,
    framed,
    header,
    largest_payload,
    map_ring,
    slot_word,
)
from asynccomm.queues.ring import FULL, PUBLISHED, WAKE
from tests.queues.rings import ENDS, ends
from tests.sampling import examples

RING = 4096
kinds = pytest.mark.parametrize("kinds", ENDS, ids=lambda kinds: f"{kinds[0].__name__}-{kinds[1].__name__}")


def put(writer: Any, number: int, data: bytes, kind: int = BYTES) -> int:
    result: int = writer.put(kind, 1, len(data) if kind == OBJECT else 0, len(data), number, data, len(data))
    return result


@kinds
@examples(60)
@given(st.lists(st.tuples(st.integers(0, largest_payload(RING)), st.integers(0, 3)), max_size=60))
def test_each_reader_gets_every_byte_in_order(kinds: Any, steps: list[tuple[int, int]]) -> None:
    _, writer, readers = ends(kinds, RING, 2)
    sent: list[bytes] = []
    got: list[list[bytes]] = [[], []]

    def read(k: int, items: int) -> None:
        got[k] += readers[k].take(None, items, 1 << 20)
        readers[k].publish()

    for nbytes, items in steps:
        data = bytes((len(sent) + i) % 251 for i in range(nbytes))
        while put(writer, len(sent), data) == FULL:
            read(0, 1)
            read(1, 64)
        sent.append(data)
        read(items % 2, items)
    for k in (0, 1):
        read(k, 1000)
    assert got == [sent, sent]


@kinds
@examples(60)
@given(st.lists(st.tuples(st.integers(0, largest_payload(RING)), st.integers(0, 4)), max_size=80))
def test_a_ring_that_drops_gives_the_newest_items_and_counts_the_others(
    kinds: Any, steps: list[tuple[int, int]]
) -> None:
    _, writer, (reader,) = ends(kinds, RING, 1, drops=True)
    got: list[tuple[int, bytes]] = []
    first = put(writer, 0, b"first")
    assert first == PUBLISHED
    reader.take(None, 1, 100)
    for number, (nbytes, items) in enumerate(steps, 1):
        data = bytes((number + i) % 251 for i in range(nbytes))
        assert put(writer, number, data) != FULL
        for _ in range(items):
            got += [(reader.expected - 1, found) for found in reader.take(None, 1, 1 << 20)]
    got += [(reader.expected - 1, found) for _ in steps for found in reader.take(None, 1, 1 << 20)]
    for number, data in got:
        assert data == bytes((number + i) % 251 for i in range(steps[number - 1][0]))
    assert [number for number, _ in got] == sorted({number for number, _ in got})
    assert reader.dropped + len(got) == len(steps)


@kinds
def test_a_full_ring_takes_no_frame_until_the_slowest_reader_has_read(kinds: Any) -> None:
    _, writer, (fast, slow) = ends(kinds, RING, 2)
    count = 0
    while put(writer, count, bytes(400)) != FULL:
        count += 1
    assert len(fast.take(None, 100, 1 << 20)) == count
    fast.publish()
    assert put(writer, count, bytes(400)) == FULL
    assert slow.take(None, 1, 1) == [bytes(400)]
    slow.publish()
    assert put(writer, count, bytes(400)) == PUBLISHED


@kinds
def test_only_sleepers_are_woken(kinds: Any) -> None:
    segment, writer, (reader, _) = ends(kinds, RING, 2)
    assert put(writer, 0, b"a") == PUBLISHED
    segment.words[slot_word(1) + SLEEPING] = 1
    assert put(writer, 1, b"a") == WAKE
    assert not reader.publish()
    segment.words[WAITING] = 1
    assert reader.publish()


@kinds
def test_an_item_of_bytes_in_one_call(kinds: Any) -> None:
    segment, writer, (reader,) = ends(kinds, RING)
    assert writer.put_bytes(b"one") == PUBLISHED
    segment.words[slot_word(0) + SLEEPING] = 1
    assert writer.put_bytes(b"two") == WAKE
    segment.words[slot_word(0) + SLEEPING] = 0
    while writer.put_bytes(bytes(largest_payload(RING))) != FULL:
        pass
    number = writer.number
    assert reader.take(None, 64, 1 << 20) == [b"one", b"two", *[bytes(largest_payload(RING))] * (number - 2)]
    assert reader.expected == number


def test_c_puts_short_items_of_bytes_without_the_lock() -> None:
    for kinds in ENDS[1:3]:
        segment, writer, (reader,) = ends(kinds, 1 << 20)
        assert not writer.put_short(b"a"), "Python wakes the reader"
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        writer.set_bell(0, mine.fileno())
        segment.words[slot_word(0) + SLEEPING] = 1
        assert writer.put_short(b"a")
        assert theirs.recv(8) == b"w"
        writer.held = True
        assert not writer.put_short(b"b")
        writer.held = False
        with writer.lock:
            with writer.lock:
                assert not writer.put_short(b"b")
            assert not writer.put_short(b"b")
        for item in ("text", bytearray(b"b"), bytes(1 << 16), None):  # the last one is copied without the GIL
            assert not writer.put_short(item)
        assert (writer.number, reader.take(None, 64, 1 << 20)) == (1, [b"a"])
        while writer.put_short(bytes(60_000)):
            pass
        assert len(reader.take(None, 64, 1 << 21)) == writer.number - 1 == (1 << 20) // framed(60_000)
        mine.close()
        theirs.close()


def test_c_wakes_readers_by_their_bells() -> None:
    for kinds in ENDS[1:2]:
        segment, writer, _ = ends(kinds, RING, 3)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        for slot, (mine, theirs) in enumerate(pairs):
            writer.set_bell(slot, mine.fileno())
            theirs.setblocking(False)
        words = [slot_word(slot) + SLEEPING for slot in range(3)]

        def sleep(*slots: int, words: list[int] = words, segment: Any = segment) -> None:
            for slot in slots:
                segment.words[words[slot]] = 1

        sleep(1)
        assert put(writer, 0, b"a") == PUBLISHED
        assert pairs[1][1].recv(8) == b"w"
        with pytest.raises(BlockingIOError):
            pairs[0][1].recv(8)
        sleep(0, 1, 2)
        assert not writer.put_short(b"a"), "slot 2 has no bell"
        assert writer.put_bytes(b"a") == WAKE
        assert [segment.words[word] for word in words] == [0, 0, 1]
        assert [theirs.recv(8) for _, theirs in pairs] == [b"w", b"w"]
        segment.words[words[2]] = 0
        pairs[0][1].close()
        sleep(0)
        assert put(writer, 2, b"a") == PUBLISHED, "the reader is lost"
        writer.set_bell(1, -1)
        sleep(1)
        assert put(writer, 3, b"a") == WAKE
        for mine, theirs in pairs:
            mine.close()
            theirs.close()


def supports_population() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(23)  # MADV_POPULATE_WRITE
        except OSError:
            return False
    return True


@pytest.mark.skipif(not supports_population(), reason="the kernel does not make pages ahead")
def test_c_makes_the_pages_of_the_next_frames_in_the_first_lap() -> None:
    ring = 1 << 20
    for kind, _ in ENDS[1:2]:
        fd = create(DATA + ring)
        segment = map_ring(fd, ring)
        writer = kind(segment.raw, segment.data.data_ptr(), ring, True)

        def made(fd: int = fd) -> int:
            return os.fstat(fd).st_blocks * 512 - DATA  # without the head of the ring

        for _ in range(3 * (ring // framed(1000))):
            writer.put_bytes(bytes(1000))
            written = min(ring, writer.head)
            assert min(ring, written + 30_000) <= made() + DATA, "the next frames have pages"
        os.close(fd)


@kinds
def test_take_ends_before_an_item_of_several_frames(kinds: Any) -> None:
    _, writer, (reader,) = ends(kinds, RING)
    put(writer, 0, b"bytes")
    put(writer, 1, b"object", OBJECT)
    writer.put(OBJECT, 1, 4, 8, 2, b"head", 4)
    writer.put(OBJECT, 0, 4, 8, 2, b"rest", 4)
    assert reader.take(None, 64, 1 << 20) == [b"bytes", (None, b"object")]
    assert reader.take(None, 64, 1 << 20) == []
    assert reader.peek()[:6] == (4, OBJECT, 1, 4, 8, 2)
    reader.free()
    assert reader.peek()[:6] == (4, OBJECT, 0, 4, 8, 2)
    reader.free()
    assert reader.peek() is None


@kinds
def test_a_reader_without_frames_polls_until_the_time_is_over(kinds: Any) -> None:
    _, writer, (reader,) = ends(kinds, RING)
    assert not reader.poll(1e-4)
    put(writer, 0, b"a")
    assert reader.poll(10.0)


@kinds
@examples(200)
@given(st.data())
def test_damaged_memory_is_an_error_and_no_crash(kinds: Any, data: st.DataObject) -> None:
    drops = data.draw(st.booleans())
    segment, writer, (reader,) = ends(kinds, RING, 1, drops)
    for number in range(5):
        put(writer, number, bytes(300))
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            words = [HEAD, FLOOR, slot_word(0) + TAIL]
            number = data.draw(st.integers(0, 2**64 - 1) | st.integers(0, 2 * RING))
            segment.words[data.draw(st.sampled_from(words))] = number
        else:
            field = st.integers(0, 2**32 - 1) | st.integers(0, RING)
            fields = [data.draw(field) for _ in range(4)]
            at = DATA + 64 * data.draw(st.integers(0, RING // 64 - 1))
            header.pack_into(segment.raw, at, *fields, data.draw(st.integers(0, 2**64 - 1)), data.draw(field))
    for step in range(20):
        try:
            if step % 2:
                put(writer, step, bytes(700))
            elif (frame := reader.peek()) is not None:
                start = segment.data.data_ptr() + DATA
                assert start <= frame[6] <= frame[6] + frame[0] <= start + RING
                reader.free()
        except BackendError:
            break


def test_arguments_that_would_leave_the_memory_are_refused() -> None:
    for kinds in ENDS[1:2]:
        segment, writer, _ = ends(kinds, RING)
        with pytest.raises(ValueError, match="a frame of"):
            writer.put(BYTES, 1, 0, 5000, 0, bytes(5000), 5000)
        with pytest.raises(ValueError, match="9 bytes of 4"):
            writer.put(BYTES, 1, 0, 9, 0, b"four", 9)
        with pytest.raises(ValueError, match="slot"):
            writer.set_slots((64,))
        with pytest.raises(ValueError, match="slot"):
            writer.set_bell(64, 0)
        with pytest.raises(ValueError, match="a frame of"):
            writer.put_bytes(bytes(largest_payload(RING) + 1))
        with pytest.raises(TypeError, match="item must be bytes"):
            writer.put_bytes("text")
        with pytest.raises(ValueError, match="slot"):
            kinds[1](segment.raw, 0, RING, 64, False)
        with pytest.raises(ValueError, match="a ring of"):
            kinds[0](segment.raw, 0, 2 * RING, False)
        with pytest.raises(ValueError, match="a ring of"):
            kinds[0](segment.raw, 0, 2**64 - 64, False)  # with the memory before the ring, a small number
        with pytest.raises(ValueError, match="a frame of"):
            kinds[0](segment.raw, 0, 64, False).put(BYTES, 1, 0, 40, 0, bytes(40), 40)  # there is room for no frame


@kinds
def test_an_empty_payload_has_no_address(kinds: Any) -> None:
    _, writer, (reader,) = ends(kinds, RING)
    assert writer.put(BYTES, 1, 0, 0, 0, 0, 0) == PUBLISHED
    assert reader.take(None, 1, 1) == [b""]
