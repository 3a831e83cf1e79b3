"""The ranks of a queue compare their arguments, and wait until all have attached."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from msgspec.structs import replace

from asynccomm.errors import BackendError, StoreProtocolError
from asynccomm.queues.terms import QueueMeeting, QueueTerms
from asynccomm.store.memory import MemoryStore
from tests.waiting import until

TERMS = QueueTerms(0, None, 1 << 14, "wait", "raise")


def meetings(store: MemoryStore, *terms: QueueTerms) -> list[QueueMeeting]:
    """The parts of the ranks 0, 2, 4, ..."""
    ranks = [2 * number for number in range(len(terms))]
    return [QueueMeeting(store.prefix("queue"), rank, ranks, each) for rank, each in zip(ranks, terms, strict=True)]


async def agree(part: QueueMeeting, handle: str = "") -> str:
    return await part.terms.reached(lambda: part.offer(handle))


async def complete(part: QueueMeeting) -> str:
    return await part.queue.reached(part.attached)


async def arrived(host: QueueMeeting, store: MemoryStore) -> asyncio.Future[str]:
    """Let ``host`` come, and wait for the verdict."""
    waiting = asyncio.ensure_future(agree(host, "handle"))
    await until(lambda: store._waiters)
    return waiting


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
async def test_all_ranks_get_the_handle_of_the_host_and_no_key_stays(order: tuple[int, ...]) -> None:
    store = MemoryStore()
    parts = meetings(store, TERMS, TERMS, TERMS)
    handles = await asyncio.gather(*(agree(parts[k], "handle" if k == 0 else "") for k in order))
    assert handles == ["handle"] * 3
    assert await asyncio.gather(*(complete(parts[k]) for k in order)) == [""] * 3
    for part in parts:
        assert await store.num_keys() > 0
        await part.leave("this is too late")
    assert await store.num_keys() == 0


@pytest.mark.parametrize(
    ("different", "values"),
    [
        ({"writer": None, "reader": 4}, "0 on rank 0 and None on rank 4"),
        ({"capacity": 1 << 18}, "16384 on rank 0 and 262144 on rank 4"),
        ({"overflow": "drop_oldest"}, "'wait' on rank 0 and 'drop_oldest' on rank 4"),
        ({"on_lost": "continue"}, "'raise' on rank 0 and 'continue' on rank 4"),
    ],
)
async def test_a_difference_is_named_on_all_ranks(different: dict[str, Any], values: str) -> None:
    parts = meetings(MemoryStore(), TERMS, TERMS, replace(TERMS, **different))
    got = await asyncio.gather(*(agree(part, "handle") for part in parts), return_exceptions=True)
    text = f"{next(iter(different))} must be the same on all ranks of the queue, got {values}"
    assert [(type(each), str(each)) for each in got] == [(ValueError, text)] * 3


async def test_the_last_rank_to_come_is_late_where_no_rank_is_missing() -> None:
    store = MemoryStore()
    host, _ = meetings(store, TERMS, TERMS)
    await arrived(host, store)
    await host.terms._room.set("arrived/2", "")  # its verdict has not come yet
    with pytest.raises(BackendError, match=r"^the last rank did not come to the queue within 0.5 s, the limit of rank"):
        await host.terms.late(0.5)


async def test_a_rank_that_comes_after_the_limit_of_another_one_fails_by_the_same_error() -> None:
    store = MemoryStore()
    host, member = meetings(store, TERMS, TERMS)
    waiting = await arrived(host, store)
    text = r"ranks \[2\] did not come to the queue within 0.5 s, the limit of rank 0"
    with pytest.raises(BackendError, match=text):
        await host.terms.late(0.5)
    for late in (waiting, agree(member), member.terms.late(math.inf)):
        with pytest.raises(BackendError, match=text):
            await late


async def test_the_limit_of_a_rank_may_come_with_the_handle() -> None:
    host, member = meetings(MemoryStore(), TERMS, TERMS)
    await asyncio.gather(agree(host, "handle"), agree(member))
    assert await member.terms.late(0.5) == "handle"


async def test_a_rank_that_gives_up_ends_the_meeting_until_the_handle_is_known() -> None:
    store = MemoryStore()
    host, member = meetings(store, TERMS, TERMS)
    waiting = await arrived(host, store)
    await member.leave("it was cancelled")
    with pytest.raises(BackendError, match="rank 2 gave up"):
        await host.terms.late(0.5)
    with pytest.raises(BackendError, match=r"^rank 2 gave up the queue: it was cancelled$"):
        await waiting


async def test_a_rank_that_gives_up_before_the_queue_is_complete_ends_it_on_all_ranks() -> None:
    parts = meetings(MemoryStore(), TERMS, TERMS, TERMS)
    await asyncio.gather(*(agree(part, "handle") for part in parts))
    waiting = [asyncio.ensure_future(complete(part)) for part in parts[:2]]
    await parts[2].leave("it was cancelled")
    for call in (*waiting, complete(parts[2]), parts[2].queue.late(0.5)):
        with pytest.raises(BackendError, match=r"^rank 4 gave up the queue: it was cancelled$"):
            await call


async def test_a_rank_that_does_not_attach_is_named_and_the_limit_may_come_with_the_last_one() -> None:
    for attached in (False, True):
        host, member = meetings(MemoryStore(), TERMS, TERMS)
        await asyncio.gather(agree(host, "handle"), agree(member))
        await host.attached()
        if attached:
            await member.attached()
            assert await host.queue.late(0.5) == ""
        else:
            with pytest.raises(BackendError, match=r"ranks \[2\] did not attach to the queue within 0.5 s, the limit"):
                await host.queue.late(0.5)


@pytest.mark.parametrize("known", [False, True])
async def test_the_cause_of_a_failure_to_attach_is_the_verdict_of_another_rank(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynccomm.queues.terms.CAUSE_SECONDS", 30 if known else 0.01)
    host, member = meetings(MemoryStore(), TERMS, TERMS)
    await asyncio.gather(agree(host, "handle"), agree(member))
    failed = asyncio.Event()

    async def attach() -> None:
        failed.set()
        raise BackendError("connection refused")

    waiting = asyncio.ensure_future(member.queue.reached(attach))
    await failed.wait()
    if known:
        await host.leave("it was cancelled")
    with pytest.raises(BackendError, match="rank 0 gave up the queue" if known else "connection refused"):
        await waiting


async def test_no_key_of_a_failed_meeting_stays_once_all_ranks_have_come() -> None:
    store = MemoryStore()
    host, member = meetings(store, TERMS, TERMS)
    waiting = await arrived(host, store)
    with pytest.raises(BackendError, match="did not come"):
        await host.terms.late(0.5)
    with pytest.raises(BackendError, match="did not come"):
        await waiting
    await host.leave()
    with pytest.raises(BackendError, match="did not come"):
        await agree(member)
    await member.leave("its call has failed")
    assert await store.num_keys() == 0


async def test_the_last_rank_to_come_publishes_the_verdict_also_when_it_is_cancelled() -> None:
    store = MemoryStore()
    host, member = meetings(store, TERMS, TERMS)
    waiting = await arrived(host, store)
    last = asyncio.ensure_future(agree(member))
    await asyncio.sleep(0)
    last.cancel()
    assert await waiting == "handle"


async def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    (host,) = meetings(store, TERMS)
    monkeypatch.setattr("asynccomm.queues.terms.STORE_SECONDS", 0.01)
    monkeypatch.setattr(MemoryStore, "check", lambda *_: asyncio.get_running_loop().create_future())
    with pytest.raises(BackendError, match=r"the store did not answer, and no queue was made within 0.5 s"):
        await host.terms.late(0.5)


@pytest.mark.parametrize("key", ["verdict", "arrived/0"])
async def test_an_invalid_message_is_an_error_of_the_store(key: str) -> None:
    store = MemoryStore()
    host, member = meetings(store, TERMS, TERMS)
    waiting = await arrived(host, store)
    await store.set(f"queue/terms/{key}", b"garbage")
    with pytest.raises(StoreProtocolError, match="invalid message of a queue's rank"):
        await (waiting if key == "verdict" else agree(member))
    waiting.cancel()
