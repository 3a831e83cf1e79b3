"""The reading end: the sources in turn, damage, and its end."""

from __future__ import annotations

import pytest

from asynccomm import BackendError, EndOfQueueError
from asynccomm.queues.layout import BYTES, DATA, ENDED, STATE, header
from asynccomm.queues.options import QueueOptions, QueueWelcome
from asynccomm.queues.reading import POLL_SECONDS, VAIN, ReadingEnd, Source
from tests.queues.rings import ENDS, ends

RING = 4096
WELCOME = QueueWelcome("token", ring=RING)


async def test_the_sources_are_read_in_turn() -> None:
    end = ReadingEnd(QueueOptions(), 2)
    for source in range(2):
        segment, writer, _ = ends(ENDS[-1], RING)
        for number in range(3):
            data = f"{source}".encode()
            writer.put(BYTES, 1, 0, 1, number, data, 1)
        segment.words[STATE] = ENDED
        end.add(Source(segment, WELCOME, f"rank {source}", BackendError("lost")))
    assert end.many(100) == [b"0", b"0", b"0", b"1", b"1", b"1"]
    with pytest.raises(EndOfQueueError):
        while True:
            assert end.next() is None


async def test_a_damaged_ring_is_an_error_that_stays() -> None:
    end = ReadingEnd(QueueOptions(), None)
    segment, writer, _ = ends(ENDS[-1], RING)
    writer.put(BYTES, 1, 0, 8, 0, b"fourfour", 4)  # an item of 8 bytes; the next frame has too many
    writer.put(BYTES, 0, 0, 8, 0, b"fourfour", 8)
    end.add(Source(segment, WELCOME, "rank 0", BackendError("lost")))
    for _ in range(2):
        with pytest.raises(BackendError, match="an item of rank 0 is longer than it says"):
            end.next()
    assert not end._arm()


async def test_damage_that_arming_finds_is_raised_by_the_next_read() -> None:
    end = ReadingEnd(QueueOptions(), None)
    segment, writer, _ = ends(ENDS[-1], RING)
    writer.put(BYTES, 1, 0, 4, 0, b"four", 4)
    header.pack_into(segment.raw, DATA, 1 << 31, BYTES, 1, 0, 4, 0)
    end.add(Source(segment, WELCOME, "rank 0", BackendError("lost")))
    assert not end._arm()
    with pytest.raises(BackendError, match="corrupt"):
        end.next()


async def test_looks_before_a_sleep_end_when_they_are_in_vain() -> None:
    segment, writer, _ = ends(ENDS[-1], RING)
    source = Source(segment, WELCOME, "rank 0", BackendError("lost"))
    assert not source.poll()
    writer.put(BYTES, 1, 0, 4, 0, b"four", 4)
    assert [source.poll() for _ in range(VAIN + 1)] == [False] * VAIN + [False]
    assert source.poll()
    assert POLL_SECONDS < 1e-3
