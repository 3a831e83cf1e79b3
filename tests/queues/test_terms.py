"""The ranks of a queue compare their arguments."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from msgspec.structs import replace

from asynccomm.errors import BackendError, StoreProtocolError
from asynccomm.queues.terms import QueueTerms, TermsMeeting
from asynccomm.store.memory import MemoryStore
from tests.waiting import until

TERMS = QueueTerms(0, None, 1 << 14, "wait", "raise")


def meetings(store: MemoryStore, *terms: QueueTerms) -> list[TermsMeeting]:
    """The parts of the ranks 0, 2, 4, ..."""
    ranks = [2 * number for number in range(len(terms))]
    return [TermsMeeting(store.prefix("queue"), rank, ranks, each) for rank, each in zip(ranks, terms, strict=True)]


async def arrived(host: TermsMeeting, store: MemoryStore) -> asyncio.Future[str]:
    """Let ``host`` come, and wait for the verdict."""
    waiting = asyncio.ensure_future(host.agree("handle"))
    await until(lambda: store._waiters)
    return waiting


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
async def test_all_ranks_get_the_handle_of_the_host_and_no_key_stays(order: tuple[int, ...]) -> None:
    store = MemoryStore()
    parts = meetings(store, TERMS, TERMS, TERMS)
    handles = await asyncio.gather(*(parts[k].agree("handle" if k == 0 else "") for k in order))
    assert handles == ["handle"] * 3
    await parts[0].tidy()
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
    got = await asyncio.gather(*(part.agree("handle") for part in parts), return_exceptions=True)
    text = f"{next(iter(different))} must be the same on all ranks of the queue, got {values}"
    assert [(type(each), str(each)) for each in got] == [(ValueError, text)] * 3


async def test_a_rank_that_comes_after_the_limit_of_another_one_fails_by_the_same_error() -> None:
    store = MemoryStore()
    host, member = meetings(store, TERMS, TERMS)
    waiting = await arrived(host, store)
    text = r"ranks \[2\] did not come to the queue within 0.5 s, the limit of rank 0"
    with pytest.raises(BackendError, match=text):
        await host.late(0.5)
    for late in (waiting, member.agree(), member.late(math.inf)):
        with pytest.raises(BackendError, match=text):
            await late


async def test_the_limit_of_a_rank_may_come_with_the_handle() -> None:
    host, member = meetings(MemoryStore(), TERMS, TERMS)
    await asyncio.gather(host.agree("handle"), member.agree())
    assert await member.late(0.5) == "handle"


async def test_a_rank_that_gives_up_ends_the_meeting_until_the_handle_is_known() -> None:
    store = MemoryStore()
    host, member = meetings(store, TERMS, TERMS)
    waiting = await arrived(host, store)
    await member.give_up("it was cancelled")
    await host.give_up("the verdict that counts is the first one")
    with pytest.raises(BackendError, match=r"^rank 2 gave up the queue: it was cancelled$"):
        await waiting

    host, member = meetings(MemoryStore(), TERMS, TERMS)
    await asyncio.gather(host.agree("handle"), member.agree())
    waiting_for_all = asyncio.ensure_future(host.left())
    await member.give_up("it was cancelled")
    with pytest.raises(BackendError, match=r"^rank 2 gave up the queue: it was cancelled$"):
        await waiting_for_all
    assert await member.agree() == "handle"


async def test_the_last_rank_to_come_publishes_the_verdict_also_when_it_is_cancelled() -> None:
    store = MemoryStore()
    host, member = meetings(store, TERMS, TERMS)
    waiting = await arrived(host, store)
    last = asyncio.ensure_future(member.agree())
    await asyncio.sleep(0)
    last.cancel()
    assert await waiting == "handle"


async def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    (host,) = meetings(store, TERMS)
    monkeypatch.setattr("asynccomm.queues.terms.STORE_SECONDS", 0.01)
    monkeypatch.setattr(MemoryStore, "check", lambda *_: asyncio.get_running_loop().create_future())
    with pytest.raises(BackendError, match=r"the store did not answer, and no queue was made within 0.5 s"):
        await host.late(0.5)


@pytest.mark.parametrize("key", ["verdict", "arrived/0"])
async def test_an_invalid_message_is_an_error_of_the_store(key: str) -> None:
    store = MemoryStore()
    host, member = meetings(store, TERMS, TERMS)
    waiting = await arrived(host, store)
    await store.set(f"queue/{key}", b"garbage")
    with pytest.raises(StoreProtocolError, match="invalid message of a queue's rank"):
        await (waiting if key == "verdict" else member.agree())
    waiting.cancel()
