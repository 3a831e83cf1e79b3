"""The writing end: its slots, its order, and corrupt readers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading

import pytest

from asynccomm import BackendError, ClosedError, PeerLostError
from asynccomm.queues.doorbell import Doorbell
from asynccomm.queues.layout import ENDED, FAILED, SLEEPING, STATE, TAIL, WAITING, slot_word
from asynccomm.queues.options import QueueOptions
from asynccomm.queues.ring import PythonReader
from asynccomm.queues.writing import Target, WritingEnd
from tests.queues.rings import hosted, new_segment, readers_of

RING = 4096


async def test_items_that_wait_keep_their_order_before_short_ones() -> None:
    segment = new_segment(RING)
    end = WritingEnd(segment, RING, False, QueueOptions())
    slot, number = end.attach(Target("reader", None))
    assert (slot, number) == (0, 0)
    put = end.put(end.encode(bytes(3 * RING)))
    assert not put.done
    assert not end.put_bytes(b"short")
    assert not end.put_now(b"short")
    assert end.attach(Target("late", None)) == (1, 1)
    end.detach(1)
    assert end.flushed() is None
    assert segment.words[WAITING]
    reader = PythonReader(segment.raw, segment.data.data_ptr(), RING, 0, False)
    sizes = []
    while not put.done:
        while (frame := reader.peek()) is not None:
            sizes.append(frame[0])
            reader.free()
        end.pump()
    assert sum(sizes) <= 3 * RING
    assert end.put_bytes(b"short")
    assert end.number == 2


async def test_a_corrupt_counter_of_a_reader_is_an_error() -> None:
    segment = new_segment(RING)
    end = WritingEnd(segment, RING, False, QueueOptions())
    end.attach(Target("reader", None))
    put = end.put(end.encode(bytes(3 * RING)))
    segment.words[slot_word(0) + TAIL] = 1 << 40
    end.pump()
    with pytest.raises(BackendError, match="a reader's counter in the ring of a queue is corrupt"):
        end.finished(put)()
    with pytest.raises(BackendError):
        end.put(end.encode(1))


async def test_an_end_refuses_all_later_puts() -> None:
    segment = new_segment(RING)
    end = WritingEnd(segment, RING, False, QueueOptions())
    end.end(failed=True)
    assert segment.words[STATE] == FAILED
    assert not end.put_bytes(b"")
    with pytest.raises(ClosedError):
        end.put_now(b"")


async def test_an_end_after_a_loss_is_a_failure_also_without_a_put_that_waits() -> None:
    for error, state in ((PeerLostError(2, "killed"), FAILED), (ClosedError("the comm is closed"), ENDED)):
        segment = new_segment(RING)
        end = WritingEnd(segment, RING, False, QueueOptions())
        end.fail(error)
        end.end(failed=False)
        assert segment.words[STATE] == state


async def test_a_reader_that_made_the_ring_may_sleep_in_it_before_the_writer_comes() -> None:
    segment = new_segment(RING)
    segment.words[slot_word(0) + SLEEPING] = 1
    end = WritingEnd(segment, RING, False, QueueOptions())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell = Doorbell(theirs, lambda: None, lambda orderly: None)
    end.write_to(Target("reader", bell))
    assert end.put_bytes(b"item")
    assert ours.recv(10) == b"w"
    assert not segment.words[slot_word(0) + SLEEPING]
    ours.close()
    bell.close()


async def test_a_closed_bell_is_forgotten_before_its_descriptor_is_another_one() -> None:
    segment = new_segment(RING)
    end = WritingEnd(segment, RING, False, QueueOptions())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell = Doorbell(theirs, lambda: None, lambda orderly: None)
    end.write_to(Target("reader", bell))
    number = bell.fileno
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell.close()
    ours.close()
    os.dup2(other.fileno(), number)
    mine.setblocking(False)
    segment.words[slot_word(0) + SLEEPING] = 1
    assert end.put_bytes(b"item")
    with pytest.raises(BlockingIOError):
        mine.recv(1)
    os.close(number)
    mine.close()
    other.close()


async def test_short_items_of_a_thread_stay_out_of_the_items_of_another_one() -> None:
    async with hosted(capacity=RING) as (_, queue):
        (reader,) = await readers_of(queue, 1)
        count, short = 50, 0

        def put_short() -> None:
            nonlocal short
            while putting.is_alive():
                with contextlib.suppress(asyncio.QueueFull):
                    queue.put_nowait(b"short %d" % short)
                    short += 1

        putting = threading.Thread(target=lambda: [queue.put_sync(bytes([i]) * 3 * RING, 30) for i in range(count)])
        threads = [putting, threading.Thread(target=put_short)]
        for thread in threads:
            thread.start()
        got: list[bytes] = []
        while sum(len(item) > RING for item in got) < count:
            got.append(await reader.get())
        for thread in threads:
            await asyncio.to_thread(thread.join)
        while len(got) < count + short:
            got.append(await reader.get())
        assert [item for item in got if len(item) > RING] == [bytes([i]) * 3 * RING for i in range(count)]
        assert [item for item in got if len(item) < RING] == [b"short %d" % i for i in range(short)]
        await reader.aclose()


async def test_a_signal_that_raises_leaves_the_lock_free() -> None:
    async with hosted() as (_, queue):
        (reader,) = await readers_of(queue, 1)
        item, left, before = bytes(70_000), 200, signal.getsignal(signal.SIGVTALRM)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGVTALRM, interrupt)
        try:
            while left:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_VIRTUAL, 1e-6 * (10 + 7 * left))
                    while True:
                        with contextlib.suppress(asyncio.QueueFull):
                            queue.put_nowait(item)
                left -= 1
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        end = queue._end
        assert isinstance(end, WritingEnd)
        async with asyncio.timeout(10):
            await asyncio.to_thread(end.flushed)  # takes the lock
        await reader.aclose()
