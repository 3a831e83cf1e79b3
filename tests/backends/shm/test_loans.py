"""Messages that are lent: the receiver reads them in the memory of the sender, which waits for that a moment."""

from __future__ import annotations

import asyncio
import struct
import time
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
ROUNDS = 60


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


async def probed(comm: Comm) -> None:
    """Have all ranks know that they can read each other's memory."""
    tensor = torch.empty(1 << 18)
    for _ in range(2):
        await comm.all_to_all_single(torch.empty(1 << 18), tensor)
        await comm.barrier()


def values(round: int) -> Tensor:
    return torch.arange(float(NUMEL)) + round


@pytest.mark.ranks(2)
async def test_a_waiting_receiver_reads_the_message(comm: Comm) -> None:
    lent = 0
    async with new_comm("shm", name="own", timeout=30) as own:
        await probed(own)
        for round in range(ROUNDS):
            if own.rank == 1:
                want_loans(own, 0)
                await comm.barrier()
                got = await own.recv(torch.empty(NUMEL), 0)
                assert torch.equal(got, values(round))
            else:
                await comm.barrier()
                since, tensor = link_to(own, 1).state.head, values(round)
                await own.send(tensor, 1)
                lent += (LOAN, CLAIMED) in frames(own, 1, since)
                tensor.fill_(-1)
        assert own.statistics().in_flight == 0
    assert own.rank == 1 or lent, "a rank that loses its core may miss some of them"


@pytest.mark.ranks(2)
async def test_ranks_that_exchange_read_at_once(comm: Comm) -> None:
    lent = 0
    async with new_comm("shm", name="own", timeout=30) as own:
        await probed(own)
        other = 1 - own.rank
        for round in range(ROUNDS):
            want_loans(own, other)
            await comm.barrier()
            since, tensor = link_to(own, other).state.head, values(round + own.rank)
            receive = own.recv(torch.empty(NUMEL), other)
            await own.send(tensor, other)
            tensor.fill_(-1)
            assert torch.equal(await receive, values(round + other))
            lent += (LOAN, CLAIMED) in frames(own, other, since)
        assert own.statistics().in_flight == 0
        total = await comm.all_reduce(torch.tensor(lent))
    assert total.item() > 0


@pytest.mark.ranks(2)
async def test_a_loan_that_nobody_takes_becomes_an_ordinary_message(comm: Comm) -> None:
    """The receiver is awake, and does not receive."""
    withdrawn = 0
    for round in range(8):
        async with new_comm("shm", name=f"own {round}", timeout=30) as own:
            await probed(own)
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
        async with new_comm("shm", name=f"own {round}", timeout=30) as own:
            await probed(own)
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
    async with new_comm("shm", name="own", timeout=30) as own:
        await probed(own)
        tensor = values(0)
        for _ in range(3):  # known to C by then, which also knows that it can read
            await (own.send(tensor, 1) if own.rank == 0 else own.recv(torch.empty(NUMEL), 0))
        await comm.barrier()
        link = link_to(own, 1 - own.rank)
        writer, reader = link._writer, link.reader
        if own.rank == 1:
            receive = own.recv(torch.empty(NUMEL), 0) if early else None
            writer._words[writer._tail_at + 3] = 1  # without the event loop, on which Python would take over
            deadline = time.monotonic() + 20
            while reader._words[reader.head_at] == link.state.tail and time.monotonic() < deadline:
                pass
            got = await (receive or own.recv(torch.empty(NUMEL), 0))
            assert torch.equal(got, tensor)
        else:
            while not reader._words[reader._tail_at + 3]:
                await asyncio.sleep(0)
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
