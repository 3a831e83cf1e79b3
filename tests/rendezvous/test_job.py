"""What comms share: names, rooms, and the store's connection until the last of them has gone."""

import asyncio
import gc
import logging
import sys
from typing import Any

import pytest
import torch

from asynccomm import ClosedError, MemoryStore
from asynccomm.backends.base import RankInfo
from asynccomm.ops.validation import CommInfo
from asynccomm.rendezvous import job as family_module
from asynccomm.rendezvous.job import CommIdentity, Job, NameReservation
from asynccomm.rendezvous.spec import StoreSession
from tests.waiting import until

WORLD = ("world", 0)


class Closing(StoreSession):  # type: ignore[misc]  # final for users
    closed = 0

    async def aclose(self) -> None:
        self.closed += 1


class Hosted:
    """Stands for the server."""


def make(
    store: MemoryStore, *, hosting: bool = False, size: int = 2, room: str = "room", lease: Any = None
) -> tuple[Job, Closing]:
    meeting = Closing(store, close=store.aclose, hosted=Hosted() if hosting else None)  # type: ignore[arg-type]
    group = CommInfo("main", 0, size, torch.device("cpu"))
    return Job(WORLD, group, store.prefix(room), meeting, lease), meeting


class Lease:
    """Stands for the lease of a channel."""

    channel = None
    closed = 0

    async def aclose(self) -> None:
        self.closed += 1


def seat_in(job: Job, name: str, store: MemoryStore) -> CommIdentity:
    members = [RankInfo(rank, f"host {rank}", 100 + rank) for rank in range(3)]
    return CommIdentity(job, NameReservation(WORLD, name), store.prefix(name), members, range(3), range(3))


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_name_is_taken_once_in_a_world() -> None:
    first = NameReservation(WORLD, "x")
    others = [NameReservation(("world", 1), "x"), NameReservation(("elsewhere", 0), "x"), NameReservation(WORLD, "y")]
    with pytest.raises(ValueError, match="name 'x' is in use by an open comm of this process"):
        NameReservation(WORLD, "x")
    first.release()
    again = NameReservation(WORLD, "x")
    first.release()  # which is not its any more
    with pytest.raises(ValueError, match="in use"):
        NameReservation(WORLD, "x")
    for reservation in [*others, again]:
        reservation.release()


def test_a_claim_that_was_dropped_is_none() -> None:
    reservation = NameReservation(WORLD, "dropped")
    del reservation
    gc.collect()
    NameReservation(WORLD, "dropped").release()


# -- rooms ------------------------------------------------------------------------------------------------------------


async def test_rooms_follow_from_name_ranks_and_number() -> None:
    store = MemoryStore()
    here, there = (seat_in(make(store)[0], "parent", store) for _ in range(1)), None
    (here,) = here
    here.free_name()
    there = seat_in(make(store)[0], "parent", store)
    there.child_prefix("other", [0, 1])  # what a rank does otherwise changes nothing
    for _ in range(3):
        room = here.child_prefix("x", [0, 1])
        assert room.name == there.child_prefix("x", (0, 1)).name  # type: ignore[attr-defined]
        await room.set("key", b"1")
    await here.child_prefix("x", [1, 0]).set("key", b"1")
    await here.child_prefix("y", [0, 1]).set("key", b"1")
    assert await store.num_keys() == 5
    there.free_name()


def test_the_finalizer_of_an_identity_that_was_not_made_does_nothing() -> None:
    ignored: list[object] = []
    job, _ = make(MemoryStore())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", ignored.append)
        with pytest.raises(UnicodeEncodeError):
            seat_in(job, "no UTF-8: \udcff", MemoryStore())
        gc.collect()
    assert ignored == []


async def test_members_are_numbered_anew() -> None:
    store = MemoryStore()
    identity = seat_in(make(store)[0], "parent", store)
    assert identity.members_of([2, 0]) == [RankInfo(0, "host 2", 102), RankInfo(1, "host 0", 100)]
    identity.free_name()


# -- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
async def test_the_last_one_closes_the_store(order: tuple[int, ...]) -> None:
    store = MemoryStore()
    job, meeting = make(store)
    seats = [seat_in(job, name, store) for name in "abc"]
    for number in order:
        assert meeting.closed == 0
        assert not await store.check(["room/gone"])
        await seats[number].leave()
        NameReservation(WORLD, "abc"[number]).release()  # the name is free
    assert meeting.closed == 1
    assert await store.get("room/gone") == b"1"
    reservation = NameReservation(WORLD, "late")
    with pytest.raises(ClosedError, match="'main' and all that were split off it are closed"):
        CommIdentity(job, reservation, store, [], [], [])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_comm_that_ends_after_its_finalizer_is_counted_once(order: tuple[int, ...]) -> None:
    store = MemoryStore()
    job, meeting = make(store)
    seats = [seat_in(job, name, store) for name in "ab"]
    seats[0].__del__()  # in a cycle of garbage, the comm may come to life again for its end
    await seats[order[0]].leave()
    assert meeting.closed == order[0]
    await seats[order[1]].leave()
    assert meeting.closed == 1


async def test_the_host_waits_for_the_others() -> None:
    store = MemoryStore()
    job, meeting = make(store, hosting=True)
    leaving = asyncio.ensure_future(seat_in(job, "a", store).leave())
    await asyncio.sleep(0.05)
    assert not leaving.done()
    await store.add("room/gone", 1)
    async with asyncio.timeout(5):
        await leaving
    assert meeting.closed == 1


async def test_the_host_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(family_module, "LEAVE_SECONDS", 0.05)
    store = MemoryStore()
    job, meeting = make(store, hosting=True)
    with caplog.at_level(logging.WARNING, "asynccomm"):
        await seat_in(job, "a", store).leave()
    assert "not all ranks have closed within 0.05 s" in caplog.text
    assert meeting.closed == 1


async def test_a_store_that_has_gone_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    job, meeting = make(store)
    identity = seat_in(job, "a", store)

    async def fail(key: str, amount: int) -> int:
        raise ClosedError("the store is closed")

    monkeypatch.setattr(store, "add", fail)
    await identity.leave()
    assert meeting.closed == 1
    NameReservation(WORLD, "a").release()


class Line:
    """Stands for the control channel."""

    def __init__(self, gone: dict[int, str]) -> None:
        self.gone = gone
        self.silences: dict[int, float] = {}

    def silence(self, rank: int) -> float | None:
        return self.silences.get(rank)


async def test_the_channel_is_closed_with_the_last_comm() -> None:
    store = MemoryStore()
    lease = Lease()
    job, meeting = make(store, lease=lease)
    seats = [seat_in(job, name, store) for name in "ab"]
    await seats[0].leave()
    assert (lease.closed, meeting.closed) == (0, 0)
    await seats[1].leave()
    assert (lease.closed, meeting.closed) == (1, 1)


async def test_the_host_does_not_wait_for_the_dead() -> None:
    store = MemoryStore()
    job, meeting = make(store, hosting=True, size=3)
    gone: dict[int, str] = {}
    job.channel = Line(gone)  # type: ignore[assignment]
    leaving = asyncio.ensure_future(seat_in(job, "a", store).leave())
    gone[1] = ""  # which has left in good order, and so has said so in the store, or will
    await store.add("room/gone", 1)
    await asyncio.sleep(0.05)
    assert not leaving.done()
    gone[2] = "its process ended"
    async with asyncio.timeout(5):
        await leaving
    assert meeting.closed == 1


async def test_the_host_does_not_wait_for_ranks_that_were_left_out_and_are_stopped() -> None:
    store = MemoryStore()
    job, meeting = make(store, hosting=True, size=4)
    job.channel = line = Line({})  # type: ignore[assignment]
    job.left_out |= {2, 3}
    line.silences = {1: 60.0, 2: 60.0, 3: 0.5}  # rank 1 may go on
    leaving = asyncio.ensure_future(seat_in(job, "a", store).leave())
    await store.add("room/gone", 1)
    await asyncio.sleep(0.05)
    assert not leaving.done()
    line.silences[3] = 60.0
    async with asyncio.timeout(5):
        await leaving
    assert meeting.closed == 1


async def replaced(store: MemoryStore, number: int) -> tuple[tuple[Job, Closing], tuple[Job, Closing], CommIdentity]:
    """A job of two ranks whose last comm here was replaced, and the job of the new comm, both with the store's host."""
    old, new = make(store, hosting=True, room=f"old {number}"), make(store, hosting=True, room=f"new {number}")
    identity, successor = seat_in(old[0], "a", store), seat_in(new[0], "b", store)
    identity.successor = new[0]
    async with asyncio.timeout(5):
        await identity.leave()  # waits for no rank
    assert identity.successor is None
    return old, new, successor


async def leave_and_end(store: MemoryStore, last: CommIdentity, *meetings: Closing) -> None:
    """The last rank of the new job leaves, and all ``meetings`` end."""
    await store.add("new 0/gone", 1)
    async with asyncio.timeout(5):
        await last.leave()
    assert all(meeting.closed == 1 for meeting in meetings)


async def test_the_host_stays_for_the_ranks_of_a_job_that_was_replaced() -> None:
    store = MemoryStore()
    (_, old), (_, new), last = await replaced(store, 0)
    leaving = asyncio.ensure_future(last.leave())
    await store.add("new 0/gone", 1)
    await asyncio.sleep(0.05)
    assert (old.closed, new.closed, leaving.done()) == (0, 0, False)
    await store.add("old 0/gone", 1)
    async with asyncio.timeout(5):
        await leaving
    assert (old.closed, new.closed) == (1, 1)


async def test_ranks_that_were_left_out_are_not_waited_for_beyond_the_next_job() -> None:
    store = MemoryStore()
    (job, old), (_, new), last = await replaced(store, 0)
    job.channel = Line({})  # type: ignore[assignment]
    job.left_out |= {1}
    await leave_and_end(store, last, old, new)


async def test_a_job_that_is_replaced_hands_on_the_jobs_that_it_has_replaced() -> None:
    store = MemoryStore()
    (_, old), (_, new), identity = await replaced(store, 0)
    newest, newest_meeting = make(store, hosting=True, room="newest")
    last = seat_in(newest, "c", store)
    identity.successor = newest
    await identity.leave()
    await store.add("new 0/gone", 1)
    await until(lambda: new.closed == 1)
    assert old.closed == 0, "one of its ranks is there"
    for room in ("old 0", "newest"):
        await store.add(f"{room}/gone", 1)
    async with asyncio.timeout(5):
        await last.leave()
    assert (old.closed, newest_meeting.closed) == (1, 1)


async def test_a_job_that_was_replaced_ends_with_its_last_rank() -> None:
    store = MemoryStore()
    (_, old), (_, new), last = await replaced(store, 0)
    await store.add("old 0/gone", 1)
    await until(lambda: old.closed == 1)
    assert new.closed == 0
    await leave_and_end(store, last, old, new)


async def test_a_job_that_was_replaced_ends_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_module, "LEAVE_SECONDS", 0.05)
    store = MemoryStore()
    (_, old), (_, new), last = await replaced(store, 0)
    (third, newest) = make(store, hosting=True, room="newest")
    last.successor, end = third, seat_in(third, "c", store)
    await last.leave()
    async with asyncio.timeout(5):
        await end.leave()
    assert (old.closed, new.closed, newest.closed) == (1, 1, 1)


async def test_the_host_waits_itself_where_the_next_job_has_ended() -> None:
    store = MemoryStore()
    job, meeting = make(store, hosting=True)
    over, _ = make(store, room="over")
    await seat_in(over, "b", store).leave()
    identity = seat_in(job, "a", store)
    identity.successor = over
    leaving = asyncio.ensure_future(identity.leave())
    await asyncio.sleep(0.05)
    assert not leaving.done()
    await store.add("room/gone", 1)
    async with asyncio.timeout(5):
        await leaving
    assert meeting.closed == 1


def test_comms_have_keys_of_their_own_that_all_ranks_find() -> None:
    store = MemoryStore()
    one, other = seat_in(make(store)[0], "parent", store), seat_in(make(store)[0], "other", store)
    assert one.key != other.key
    again = CommIdentity(make(store)[0], NameReservation(WORLD, "again"), store.prefix("parent"), [], [], [])
    assert again.key == one.key
    for identity in (one, other, again):
        identity.free_name()
