"""Messages that are lent: the receiver reads them in the memory of the sender, which waits for that a moment."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import Comm, new_comm
from asynccomm.backends.shm.endpoint import CLEAR, DATA, SHORT, Link
from asynccomm.backends.shm.layout import WORD
from asynccomm.backends.shm.rings import HEADER, LOAN, OPEN, WITHDRAWN, framed
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.ops.dtypes import CODES

pytestmark = pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built")

NUMEL = 40_000  # floats: more than the least loan, and less than the least long message
CLAIMED = 1


def engine_of(comm: Comm) -> Any:
    return comm.unsafe_get_backend()._engine  # type: ignore[attr-defined]


def link_to(comm: Comm, peer: int) -> Link:
    link: Link = engine_of(comm)._messages._links[peer]
    return link


def want_loans(comm: Comm, peer: int) -> None:
    """Prefer loans until the next message has come, and been measured."""
    reader = link_to(comm, peer).reader
    reader._words[reader._tail_at + 2] = 1


def frames(comm: Comm, peer: int, since: int) -> list[tuple[int, int]]:
    """The kinds of the frames to ``peer`` behind ``since``, and the claims of those that are loans."""
    writer, found = link_to(comm, peer)._writer, []
    while since < writer._state.head:
        at = writer._start + since % writer._ring
        nbytes, kind = struct.unpack_from("=II", writer._raw, at)
        found.append((kind, writer._words[(at + HEADER) // WORD + 1] if kind == LOAN else 0))
        since += framed(nbytes)
    return found


@asynccontextmanager
async def probed(name: str = "own") -> AsyncIterator[Comm]:
    """A new comm whose ranks all know that they can read each other's memory."""
    async with new_comm("shm", name=name, timeout=30) as own:
        tensor = torch.empty(1 << 18)
        for _ in range(2):
            await own.all_to_all_single(torch.empty(1 << 18), tensor)
            await own.barrier()
        yield own


def values(round: int) -> Tensor:
    return torch.arange(float(NUMEL)) + round


def signal(comm: Comm, number: int) -> None:
    """Show the other rank a number without the event loop, on which Python would take posted messages over."""
    link = link_to(comm, 1 - comm.rank)
    reader, writer = link.reader, link._writer
    at = reader._tail_at if comm.rank else writer._tail_at
    writer._words[at + 3 + comm.rank] = number


def look_out(comm: Comm, number: int) -> None:
    """Wait for the ``signal`` of the other rank, and stay awake."""
    link = link_to(comm, 1 - comm.rank)
    reader, writer = link.reader, link._writer
    at = reader._tail_at if comm.rank else writer._tail_at
    deadline = time.monotonic() + 20
    while writer._words[at + 4 - comm.rank] < number:
        assert time.monotonic() < deadline


@pytest.mark.ranks(2)
async def test_a_waiting_receiver_reads_the_message(comm: Comm) -> None:
    lent = torch.zeros((), dtype=torch.int64)
    for round in range(60):
        await comm.broadcast(lent, 0)
        if round >= 8 and lent:  # a rank that loses its core misses some of them
            break
        async with probed(f"own {round}") as own:
            for k in range(4):
                await comm.barrier()
                if own.rank == 1:
                    engine_of(own)._position.message_wait = 0.0  # it looks out for the message
                    want_loans(own, 0)
                    signal(own, k + 1)
                    got = await own.recv(torch.empty(NUMEL), 0)
                    assert torch.equal(got, values(k))
                else:
                    engine_of(own)._position.message_wait = 0.0
                    since, tensor = link_to(own, 1).state.head, values(k)
                    look_out(own, k + 1)
                    await own.send(tensor, 1)
                    lent += (LOAN, CLAIMED) in frames(own, 1, since)
                    tensor.fill_(-1)
            assert own.statistics().in_flight == 0
    assert lent


@pytest.mark.ranks(2)
async def test_no_loan_without_room_for_the_message_itself(comm: Comm) -> None:
    """A receive that is posted is done, whichever way the sends go."""
    async with probed() as own:
        small, many = torch.arange(16.0), 10  # of 1 MiB, as many messages have room
        for _ in range(3):  # known to C by then
            if own.rank == 0:
                await own.send(torch.zeros(25_000), 1)
                await own.recv(torch.empty(16), 1)
            else:
                await own.recv(torch.empty(25_000), 0)
                await own.send(small, 0)
        await comm.barrier()
        if own.rank == 0:
            engine_of(own)._position.message_wait = 0.0
            receive, link = own.recv(torch.empty(16), 1), link_to(own, 1)
            signal(own, 1)
            look_out(own, 1)
            link._writer._words[link._writer._tail_at + 2] = 0
            sends = [own.send(torch.full((25_000,), float(k)), 1) for k in range(many)]
            link._writer._words[link._writer._tail_at + 2] = 1
            since = link.state.head
            sends.append(own.send(torch.full((25_000,), float(many)), 1))
            assert LOAN not in dict(frames(own, 1, since))
            signal(own, 2)
            assert torch.equal(await receive, small)
            await asyncio.gather(*sends)
        else:
            look_out(own, 1)
            await own.send(small, 0)
            signal(own, 1)
            look_out(own, 2)
            for k in range(many + 1):
                assert (await own.recv(torch.empty(25_000), 0)).eq(k).all()
        await own.barrier()
        assert own.statistics().in_flight == 0


@pytest.mark.ranks(2)
async def test_every_message_counts_for_the_pause_behind_a_loan_in_vain(comm: Comm) -> None:
    """Whichever way the receiver prefers meanwhile."""
    pause = 16
    async with probed() as own:
        engine_of(own)._position.message_wait = 0.0
        await comm.barrier()
        if own.rank == 0:
            link = link_to(own, 1)

            async def send(number: int, *, wanted: int) -> list[tuple[int, int]]:
                link._writer._words[link._writer._tail_at + 2] = wanted
                since = link.state.head
                await own.send(values(number), 1)
                return frames(own, 1, since)

            look_out(own, 1)
            assert (LOAN, WITHDRAWN) in await send(0, wanted=1)
            signal(own, 1)
            for k in range(1, pause + 1):
                look_out(own, 1 + k)
                assert LOAN not in dict(await send(k, wanted=0))
            look_out(own, 2 + pause)
            assert LOAN in dict(await send(pause + 1, wanted=1))
            signal(own, 2)
        else:
            signal(own, 1)
            look_out(own, 1)
            for k in range(pause + 1):
                assert torch.equal(await own.recv(torch.empty(NUMEL), 0), values(k))
                signal(own, 2 + k)
            look_out(own, 2)
            assert torch.equal(await own.recv(torch.empty(NUMEL), 0), values(pause + 1))
        await own.barrier()


@pytest.mark.ranks(2)
async def test_no_loan_beside_a_long_message(comm: Comm) -> None:
    """Whose data could go into the ring behind the loan, where a receiver in Python does not see them."""
    async with probed() as own:
        long, tensor = torch.arange(1_000_000.0), values(0)
        for _ in range(3):
            for each in (long, tensor):
                await (own.send(each, 1) if own.rank == 0 else own.recv(torch.empty_like(each), 0))
        await comm.barrier()
        if own.rank == 0:
            engine_of(own)._position.message_wait = 0.0
            look_out(own, 1)
            works, link = [own.send(long, 1)], link_to(own, 1)  # nobody receives it yet
            link._writer._words[link._writer._tail_at + 2] = 1
            since = link.state.head
            works.append(own.send(tensor, 1))
            assert LOAN not in dict(frames(own, 1, since))
            signal(own, 1)
            await asyncio.gather(*works)
        else:
            signal(own, 1)
            look_out(own, 1)
            assert torch.equal(await own.recv(torch.empty_like(long), 0), long)
            assert torch.equal(await own.recv(torch.empty_like(tensor), 0), tensor)
        await own.barrier()


@pytest.mark.ranks(2)
async def test_ranks_that_exchange_read_at_once(comm: Comm) -> None:
    lent, round, deadline = 0, 0, time.monotonic() + 60
    async with probed() as own:
        other = 1 - own.rank
        while not (await comm.all_reduce(torch.tensor(lent))).item():
            # a rank that is late gets a copy, and the next loan comes only after a pause
            want_loans(own, other)
            since, tensor = link_to(own, other).state.head, values(round + own.rank)
            receive = own.recv(torch.empty(NUMEL), other)
            await own.send(tensor, other)
            tensor.fill_(-1)
            assert torch.equal(await receive, values(round + other))
            lent += (LOAN, CLAIMED) in frames(own, other, since)
            round += 1
            assert time.monotonic() < deadline, f"{round} exchanges without a loan"
        assert own.statistics().in_flight == 0


@pytest.mark.ranks(2)
async def test_a_loan_that_nobody_takes_becomes_an_ordinary_message(comm: Comm) -> None:
    """The receiver is awake, and does not receive."""
    withdrawn = 0
    for round in range(8):
        async with probed(f"own {round}") as own:
            if own.rank == 1:
                reader = link_to(own, 0).reader
                want_loans(own, 0)
                await comm.barrier()
                deadline = time.monotonic() + 20
                while reader._words[reader.head_at] < framed(4 * NUMEL) and time.monotonic() < deadline:
                    pass
                await comm.barrier()
                assert torch.equal(await own.recv(torch.empty(NUMEL), 0), values(round))
            else:
                await comm.barrier()
                tensor = values(round)
                await own.send(tensor, 1)  # it is done, as if it had not been lent
                tensor.fill_(-1)
                sent = frames(own, 1, 0)
                assert sent in ([(LOAN, WITHDRAWN), (SHORT, 0)], [(SHORT, 0)])
                withdrawn += len(sent) == 2
                await comm.barrier()
            await comm.barrier()
    assert comm.rank == 1 or withdrawn


@pytest.mark.ranks(2)
async def test_python_leaves_a_loan_until_it_is_withdrawn(comm: Comm) -> None:
    withdrawn = 0
    for round in range(8):
        async with probed(f"own {round}") as own:
            if own.rank == 1:
                receive = own.recv(torch.empty(NUMEL), 0, timeout=20)  # an ordinary call
                want_loans(own, 0)
                await comm.barrier()
                while not receive.done():
                    engine_of(own)._drive(arm=False)
                assert torch.equal(await receive, values(round))
            else:
                await comm.barrier()
                await own.send(values(round), 1)
                withdrawn += frames(own, 1, 0) == [(LOAN, WITHDRAWN), (SHORT, 0)]
            await comm.barrier()
    assert comm.rank == 1 or withdrawn


@pytest.mark.ranks(2)
@pytest.mark.parametrize("early", [False, True], ids=["in the call", "posted"])
async def test_a_loan_that_cannot_be_read_is_sent_in_frames(comm: Comm, early: bool) -> None:
    """Rank 0 lends by hand, and gives no address."""
    async with probed() as own:
        tensor = values(0)
        for _ in range(3):  # known to C by then, which also knows that it can read
            await (own.send(tensor, 1) if own.rank == 0 else own.recv(torch.empty(NUMEL), 0))
        await comm.barrier()
        link = link_to(own, 1 - own.rank)
        writer, reader = link._writer, link.reader
        if own.rank == 1:
            receive = own.recv(torch.empty(NUMEL), 0) if early else None
            signal(own, 1)
            deadline = time.monotonic() + 20
            while reader._words[reader.head_at] == link.state.tail and time.monotonic() < deadline:
                pass
            got = await (receive or own.recv(torch.empty(NUMEL), 0))
            assert torch.equal(got, tensor)
        else:
            look_out(own, 1)
            target = writer.reserve(2 * WORD)
            assert target
            at = (writer._at + HEADER) // WORD
            writer._words[at], writer._words[at + 1] = 8, OPEN
            writer.publish(LOAN, 0, CODES[torch.float32], 77, NUMEL)
            engine_of(own)._bells.ring(1)
            while reader._words[reader.head_at] == link.state.tail:
                await asyncio.sleep(0)
            assert writer._words[at + 1] == CLAIMED
            reader.open()
            frame = reader.take()
            assert frame is not None
            assert (frame[1], frame[3], frame[4]) == (CLEAR, 0, 77)
            reader.free()
            reader.publish()
            assert writer.put(DATA, ident=77, source=tensor.data_ptr(), nbytes=4 * NUMEL)
            engine_of(own)._bells.ring(1)
        await comm.barrier()
        await own.barrier()
