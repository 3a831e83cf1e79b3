"""Streams: one object after the other."""

import asyncio
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, ClosedError, CollectiveTimeoutError, Comm, PayloadError
from asynccomm.ops import Call, MessageSpace, SendParcel
from asynccomm.serialization.objects import PayloadKind, encode
from asynccomm.testing.local import loopback_world


async def put_all(comm: Comm, items: Any, dst: int = 1, tag: int = 0) -> None:
    async with comm.sink(dst, tag) as sink:
        for item in items:
            await sink.put(item)


async def test_items_come_in_order_until_the_end() -> None:
    async with loopback_world(2) as (a, b):
        items = [1, {"t": torch.ones(2)}, [None], torch.arange(3)]
        sending = asyncio.ensure_future(put_all(a, items))
        stream = b.stream(0)
        got: list[Any] = [item async for item in stream]
        await sending
        assert got[0] == 1
        assert got[1]["t"].tolist() == [1, 1]
        assert got[2] == [None]
        assert got[3].tolist() == [0, 1, 2]
        assert [item async for item in stream] == [], "it stays ended"


async def test_put_sends_and_its_await_holds_back() -> None:
    async with loopback_world(2) as (a, b):
        sink = a.sink(1)
        work = sink.put("x")
        assert not work.done()
        assert await anext(b.stream(0)) == "x"
        assert work.done()
        end = sink.close()
        assert sink.close() is end
        assert [item async for item in b.stream(0)] == []


async def test_streams_tags_and_other_messages_do_not_meet() -> None:
    async with loopback_world(2) as (a, b):
        one, two = a.sink(1, 1), a.sink(1, 2)
        two.put("two")
        one.put("one")
        a.send_object("object", 1, 1)
        assert await b.recv_object(0, 1) == "object"
        assert await anext(b.stream(0, 1)) == "one"
        assert await anext(b.stream(0, 2)) == "two"


async def test_to_oneself_and_both_ways() -> None:
    async with loopback_world(2) as (a, b):
        for source, destination in ((a, a), (a, b), (b, a)):
            sending = asyncio.ensure_future(put_all(source, range(3), destination.rank))
            assert [item async for item in destination.stream(source.rank)] == [0, 1, 2]
            await sending


async def test_leaving_the_loop_early_keeps_all_items() -> None:
    async with loopback_world(2) as (a, b):
        sending = asyncio.ensure_future(put_all(a, range(5)))
        stream = b.stream(0)
        async for item in stream:
            if item == 1:
                break
        assert [item async for item in stream] == [2, 3, 4]
        await sending


async def test_cancelling_keeps_all_items() -> None:
    async with loopback_world(2) as (a, b):
        stream = b.stream(0)
        for _ in range(2):
            task = asyncio.ensure_future(stream.__anext__())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert b.statistics().in_flight == 1, "one receive, that is kept"
        sending = asyncio.ensure_future(put_all(a, range(3)))
        await asyncio.sleep(0)
        assert [item async for item in stream] == [0, 1, 2]
        await sending


async def test_cancelled_when_the_item_is_there_already() -> None:
    async with loopback_world(2) as (a, b):
        stream, sink = b.stream(0), a.sink(1)
        task = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        sink.put("x")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await anext(stream) == "x"
        sink.close()
        assert [item async for item in stream] == []


async def test_one_task_reads() -> None:
    async with loopback_world(2) as (a, b):
        stream = b.stream(0)
        task = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks read from <Stream from rank 0, tag 0>"):
            await anext(stream)
        a.sink(1).put(1)
        assert await task == 1


async def test_nothing_is_put_after_the_end() -> None:
    async with loopback_world(2) as (a, b):
        async with a.sink(1, 3) as sink:
            ending = asyncio.ensure_future(anext(b.stream(0, 3), "ended"))
        assert await ending == "ended"
        assert repr(sink) == "<Sink to rank 1, tag 3, closed>"
        with pytest.raises(RuntimeError, match="closed, and accepts no more items"):
            sink.put(1)
        assert a.statistics().submitted == 1


async def test_a_sender_that_fails_is_no_end() -> None:
    async with loopback_world(2) as (a, b):
        stream = b.stream(0, 4)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(KeyError):
            async with a.sink(1, 4) as sink:
                sink.put(1)
                raise KeyError("lost")
        assert await first == 1
        for _ in range(2):
            with pytest.raises(
                PayloadError, match=r"the stream of rank 0 \(tag 4\) ended with an error: KeyError: 'lost'"
            ):
                await anext(stream)
        with pytest.raises(RuntimeError):
            sink.put(2)
        with pytest.raises(asyncio.CancelledError):
            async with a.sink(1, 5):
                raise asyncio.CancelledError
        with pytest.raises(PayloadError, match=r"ended with an error: CancelledError$"):
            await anext(b.stream(0, 5))
        with pytest.raises(ValueError):
            async with a.sink(1, 6):
                raise ValueError("x" * 1_000_000)
        with pytest.raises(PayloadError, match=r"ended with an error: ValueError: xxx"):
            await anext(b.stream(0, 6, max_bytes=0))


async def test_a_body_that_fails_after_closing_sends_no_more() -> None:
    async with loopback_world(2) as (a, b):
        with pytest.raises(KeyError):
            async with a.sink(1) as sink:
                sink.close()
                raise KeyError
        assert [item async for item in b.stream(0)] == []


async def test_the_error_of_the_body_wins_over_that_of_the_comm() -> None:
    async with loopback_world(2) as (a, b):
        with pytest.raises(KeyError):
            async with a.sink(1):
                a.abort("enough")
                raise KeyError
        with pytest.raises(AbortedError, match="enough"):
            await anext(b.stream(0))


async def test_a_refused_item_does_not_end_the_stream() -> None:
    async with loopback_world(2) as (a, b):
        sink, stream = a.sink(1, weights_only=False), b.stream(0, max_bytes=1000)
        sink.put(torch.ones(1000))
        sink.put(torch.float32)
        sink.put(Comm)
        sink.put("last")
        sink.close()
        with pytest.raises(PayloadError, match="max_bytes is 1000"):
            await anext(stream)
        with pytest.raises(PayloadError, match="max_bytes is 1000"):
            await anext(stream)  # torch.save needs more
        with pytest.raises(PayloadError, match=r"max_bytes|weights_only=False"):
            await anext(stream)
        assert [item async for item in stream] == ["last"]


async def test_trust() -> None:
    async with loopback_world(2) as (a, b):
        with pytest.raises(TypeError, match="item cannot be sent, because receivers refuse"):
            a.sink(1).put(Comm)
        sink = a.sink(1, weights_only=False)
        sink.put(Comm)
        with pytest.raises(PayloadError, match="weights_only=False"):
            await anext(b.stream(0))
        sink.put(Comm)
        assert await anext(b.stream(0, weights_only=False)) is Comm


async def test_items_of_another_class_do_not_end_the_stream() -> None:
    async with loopback_world(2) as (a, b):
        sink, stream = a.sink(1), b.stream(0, expect=int)
        for item in (1, "two", 3):
            sink.put(item)
        sink.close()
        assert await anext(stream) == 1
        with pytest.raises(TypeError, match=r"stream\(\) of rank 1 expected a int, but rank 0 sent a str"):
            await anext(stream)
        assert [number + 1 async for number in stream] == [4]


async def test_other_kinds_are_refused() -> None:
    async with loopback_world(2) as (a, b):
        call = Call(SendParcel("x", 1, 0, MessageSpace.STREAMS), (), (), None, parcels=(encode(PayloadKind.OBJECT, 1),))
        a._submit(call, None, None)
        a.sink(1).put(2)
        stream = b.stream(0)
        with pytest.raises(
            PayloadError, match=r"stream\(\) of rank 1 received the payload that rank 0 sent by send_object\(\)"
        ):
            await anext(stream)
        assert await anext(stream) == 2


async def test_an_end_that_is_too_large_is_refused() -> None:
    async with loopback_world(2) as (a, b):
        parcel = encode(PayloadKind.FAILURE, "x" * 10_000)
        a._submit(Call(SendParcel("x", 1, 0, MessageSpace.STREAMS), (), (), None, parcels=(parcel,)), None, None)
        with pytest.raises(PayloadError, match="max_bytes is 5000"):
            await anext(b.stream(0, max_bytes=5000))


async def test_a_broken_comm_ends_the_stream() -> None:
    async with loopback_world(2) as (a, b):
        stream = b.stream(0)
        task = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        a.abort("enough")
        for _ in range(2):
            with pytest.raises(AbortedError, match="enough"):
                await task
            task = asyncio.ensure_future(stream.__anext__())
        with pytest.raises(AbortedError):
            await task


async def test_arguments_are_checked_at_the_call() -> None:
    async with loopback_world(2) as (a, _):
        sink: Any = a.sink
        stream: Any = a.stream
        for error, text, call in (
            (ValueError, "dst must be in", lambda: sink(2)),
            (TypeError, "tag must be an integer", lambda: sink(1, "x")),
            (ValueError, "src must be in", lambda: stream(2)),
            (TypeError, "src must be a rank", lambda: stream(None)),
            (ValueError, "tag must be in", lambda: stream(1, -1)),
            (TypeError, "weights_only", lambda: stream(1, weights_only=None)),
            (ValueError, "max_bytes", lambda: stream(1, max_bytes=-1)),
            (TypeError, "item cannot be sent", lambda: sink(1).put(lambda: 0)),
        ):
            with pytest.raises(error, match=text):
                call()
        assert a.statistics().submitted == 0


async def test_how_long_the_sender_may_take() -> None:
    async with loopback_world(2) as (a, b):
        stream = b.stream(0, timeout=12.5)
        task = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        assert stream._receive is not None
        assert stream._receive.timeout == 12.5
        a.sink(1).put(1, timeout=5)
        assert await task == 1


async def test_a_stream_may_be_idle_for_longer_than_an_operation_may_take() -> None:
    async with loopback_world(2, timeout=0.25) as (a, b):
        waiting = asyncio.ensure_future(anext(b.stream(0)))
        await asyncio.sleep(1)  # four times what any other operation has
        a.sink(1).put("at last")
        assert await waiting == "at last"


async def test_a_limit_for_the_next_item() -> None:
    async with loopback_world(2) as (_, b):
        with pytest.raises(CollectiveTimeoutError, match="stream"):
            await anext(b.stream(0, timeout=0.01))
        b.abort()


async def test_a_bad_limit() -> None:
    async with loopback_world(2) as (_, b):
        with pytest.raises(ValueError, match="timeout must be positive, got -1"):
            b.stream(0, timeout=-1)


async def leave_with_an_idle_reader(comm: Comm) -> None:
    """Both ends have a receive out that nobody waits for."""
    other = 1 - comm.rank
    put = comm.sink(other).put(1)
    stream = comm.stream(other)
    assert await anext(stream) == 1
    await put
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await comm.barrier()
    await comm.aclose()


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_closing_does_not_wait_for_readers_that_went_away(comm: Comm) -> None:
    async with asyncio.timeout(20):
        await leave_with_an_idle_reader(comm)


async def test_closing_ends_a_reader() -> None:
    async with loopback_world(2) as (_, b):
        reading = asyncio.ensure_future(anext(b.stream(0)))
        await asyncio.sleep(0)
        await b.aclose()
        with pytest.raises(ClosedError, match="was closed while the stream was open"):
            await reading
