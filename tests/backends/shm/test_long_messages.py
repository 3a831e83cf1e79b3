"""Long messages in C: right results, and messages that Python adopts at any stage."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import struct
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import BrokenError, CollectiveMismatchError, Comm, PeerLostError, new_comm
from asynccomm.backends.shm import endpoint
from asynccomm.backends.shm.backend import ShmBackend
from asynccomm.backends.shm.endpoint import CLEAR, DATA, OFFER, Link
from asynccomm.backends.shm.p2p import Messages
from asynccomm.comm.direct_calls import SubmitterCalls
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.ops.dtypes import CODES
from tests.sampling import amount, some

from .paths import counted

pytestmark = pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built")

LONG = 300_001  # bytes, more than are sent eagerly


def values(seed: int, nbytes: int = LONG) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def link_of(comm: Comm, peer: int) -> Link:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, ShmBackend)
    return backend._engine._messages._links[peer]


async def frame_from(comm: Comm, peer: int) -> tuple[int, int, int, int, bytes]:
    """Kind, tag, ident, length and payload of the next frame, in the place of the engine."""
    link: Any = link_of(comm, peer)
    reader = link.reader
    async with asyncio.timeout(30):
        while link._words[reader.head_at] == reader.state.tail:
            await asyncio.sleep(0)
    reader.open()
    nbytes, kind, tag, _, ident, length = reader.take()
    payload = bytes(reader._raw[reader.payload : reader.payload + nbytes])
    reader.free()
    reader.publish()
    link._ring(peer)
    return kind, tag, ident, length, payload


@pytest.mark.ranks(2)
async def test_they_are_right_and_in_order() -> None:
    async with counted() as (comm, paths):
        me, other = comm.rank, 1 - comm.rank
        sizes = [LONG, (256 << 10) + 1, 1 << 20, 5, 4 << 20, (4 << 20) + 1]  # the last takes the ordinary path
        rounds = amount(12, 4)
        for round in range(rounds):
            for nbytes in sizes:
                mine, theirs = (values(100 * round + rank, nbytes) for rank in (me, other))
                got = torch.empty(nbytes, dtype=torch.uint8)
                if me:
                    assert await comm.send(mine, other, tag=nbytes) is mine
                work = comm.recv(got, other, tag=nbytes)
                assert await work is got
                if not me:
                    await comm.send(mine, other, tag=nbytes)
                assert work.source == other
                assert str(work.op) == f"recv(uint8[{nbytes}], src={other}, tag={nbytes})"
                assert torch.equal(got, theirs)
        assert comm.statistics()[:2] == (2 * rounds * len(sizes), 0)
        assert paths.ordinary <= rounds * (len(sizes) + 1), "sends begin in C, if not those of the longest kind"


@pytest.mark.ranks(3)
async def test_all_send_at_once() -> None:
    """No rank receives before it has sent: each finds an offer where it looks out for an answer."""
    async with counted() as (comm, _):
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for round in range(20):
            sends = [comm.send(values(10 * round + comm.rank), following) for _ in range(2)]
            got = [torch.empty(LONG, dtype=torch.uint8) for _ in range(2)]
            await asyncio.gather(*(comm.recv(tensor, previous) for tensor in got), *sends)
            assert all(torch.equal(tensor, values(10 * round + previous)) for tensor in got)
        assert comm.statistics().in_flight == 0


@pytest.mark.ranks(2)
async def test_a_receiver_that_comes_late(comm: Comm) -> None:
    async with counted(hints={"spin_us": "0"}) as (own, paths):
        for round in range(5):
            if own.rank == 0:
                work = own.send(values(round), 1, tag=round % 2)
                assert not work.done()
                await comm.barrier()
                await work
            else:
                await comm.barrier()
                got = torch.empty(LONG, dtype=torch.uint8)
                await own.recv(got, 0, tag=round % 2)
                assert torch.equal(got, values(round))
        assert own.rank or paths.adopted == 5


@pytest.mark.ranks(2)
async def test_the_answer_is_behind_another_message() -> None:
    async with counted() as (comm, _):
        for round in range(20):
            got = torch.empty(LONG, dtype=torch.uint8)
            if comm.rank == 0:
                work = comm.send(values(round), 1)
                await comm.recv(torch.empty(3), 1, tag=5)
                await work
            else:
                await comm.send(torch.ones(3), 0, tag=5)
                await comm.recv(got, 0)
                assert torch.equal(got, values(round))


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("in_python", some([1, 0], 1))
async def test_a_peer_that_is_slow_in_the_middle(in_python: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank ``in_python`` moves frames of 1 KiB in Python, so that C often waits in vain for room or for frames."""
    if int(os.environ["RANK"]) == in_python:
        monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "reference")
    async with counted(hints={"message_bytes": "4096", "spin_us": "20"}) as (comm, _):
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for round in range(20):
            got = torch.empty(LONG, dtype=torch.uint8)
            if comm.rank % 2:
                await comm.send(values(10 * round + comm.rank), following)
            await comm.recv(got, previous)
            if comm.rank % 2 == 0:
                await comm.send(values(10 * round + comm.rank), following)
            assert torch.equal(got, values(10 * round + previous))


@pytest.mark.ranks(2)
async def test_python_sends_the_rest_of_what_c_has_begun(comm: Comm) -> None:
    async with counted(hints={"message_bytes": "4096"}) as (own, paths):
        if own.rank == 0:
            await comm.barrier()  # the answer comes first
            await own.send(values(0), 1)
            assert paths.adopted == 1
        else:
            link: Any = link_of(own, 0)
            link._writer.put(CLEAR, ident=0)
            await comm.barrier()
            kind, _, _, length, _ = await frame_from(own, 0)
            assert (kind, length) == (OFFER, LONG)
            got = b""
            while len(got) < LONG:
                kind, _, ident, _, payload = await frame_from(own, 0)
                assert (kind, ident) == (DATA, 0)
                got += payload
            assert got == values(0).numpy().tobytes()
        await comm.barrier()


@pytest.mark.ranks(2)
async def test_python_receives_the_rest_of_what_c_has_begun(comm: Comm) -> None:
    async with counted() as (own, paths):
        if own.rank == 0:
            await comm.barrier()
            got = torch.empty(LONG, dtype=torch.uint8)
            work = own.recv(got, 1)
            assert (work.done(), paths.adopted) == (False, 1)
            assert torch.equal(got[:1000], values(0)[:1000])
            await comm.barrier()
            await work
            assert torch.equal(got, values(0))
        else:
            link: Any = link_of(own, 0)
            data = values(0)
            link._writer.put(OFFER, 0, CODES[torch.uint8], 7, LONG)
            link._writer.put(DATA, ident=7, source=data.data_ptr(), nbytes=1000)
            await comm.barrier()
            await comm.barrier()
            assert (await frame_from(own, 0))[0] == CLEAR
            for start in range(1000, LONG, 1000):
                link._writer.put(DATA, ident=7, source=data[start:].data_ptr(), nbytes=min(1000, LONG - start))
            link._ring(0)
        await comm.barrier()


@pytest.mark.ranks(2)
async def test_frames_that_come_before_python_knows_of_the_message(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever drives the engine meanwhile leaves them where they are."""
    adopt = SubmitterCalls.adopt
    early: list[int] = []
    begun: list[Any] = []

    def late(calls: SubmitterCalls, *arguments: Any) -> Any:
        begun.append(comm.barrier())  # the other rank receives from now on
        link: Any = link_of(own, 1)
        while link._words[link.reader.head_at] == link.state.tail:  # until the other rank is clear
            time.sleep(0.001)
        backend: Any = own.unsafe_get_backend()
        backend._engine._drive()
        early.append(link._words[link.reader.head_at] - link.state.tail)
        return adopt(calls, *arguments)

    monkeypatch.setattr(SubmitterCalls, "adopt", late if comm.rank == 0 else adopt)
    async with new_comm("shm", name="patched", timeout=30, hints={"spin_us": "0"}) as own:
        for round in range(2):
            if own.rank == 0:
                await own.send(values(round), 1)
                await begun[round]
            else:
                await comm.barrier()
                got = torch.empty(LONG, dtype=torch.uint8)
                await own.recv(got, 0)
                assert torch.equal(got, values(round))
    assert early == ([64, 64] if comm.rank == 0 else [])


@pytest.mark.ranks(2)
async def test_a_call_while_python_does_not_know_of_the_message_yet(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a finalizer or a handler of signals may make one."""
    adopt = SubmitterCalls.adopt
    nested: list[Any] = []

    def interrupted(calls: SubmitterCalls, *arguments: Any) -> Any:
        if not nested:
            nested.append(None)
            nested[0] = own.send(values(1), 1)
        return adopt(calls, *arguments)

    monkeypatch.setattr(SubmitterCalls, "adopt", interrupted if comm.rank == 0 else adopt)
    async with new_comm("shm", name="own", timeout=30, hints={"spin_us": "0"}) as own:
        if own.rank == 0:
            work = own.send(values(0), 1)
            await comm.barrier()
            await work
            await nested[0]
        else:
            await comm.barrier()
            for round in range(2):
                got = torch.empty(LONG, dtype=torch.uint8)
                await own.recv(got, 0)
                assert torch.equal(got, values(round))


@pytest.mark.ranks(2)
async def test_receives_are_waited_for_in_the_call_if_the_program_awaits_them_next(comm: Comm) -> None:
    async with new_comm("shm", name="own", timeout=30) as own:
        if own.rank == 1:
            for _ in range(2):
                await own.recv(torch.empty(1), 0)
                await own.send(torch.ones(1), 0)
            await comm.barrier()
            await own.send(torch.ones(1), 0)
            return
        backend: Any = own.unsafe_get_backend()
        position = backend._engine._position
        for _ in range(2):
            work = own.recv(torch.empty(1), 1)
            await own.send(torch.ones(1), 1)
            assert position.calls_ahead
            await work
            assert position.calls_ahead
        work = own.recv(torch.empty(1), 1)
        waiting = asyncio.ensure_future(work)
        await asyncio.sleep(0)  # the task awaits it
        assert not position.calls_ahead
        await comm.barrier()
        await waiting


@pytest.mark.ranks(2)
async def test_those_that_do_not_fit_are_an_error() -> None:
    for received in (torch.empty(LONG + 1, dtype=torch.uint8), torch.empty(LONG, dtype=torch.int8)):
        async with new_comm("shm", name=f"unfit {received.dtype}", timeout=30) as comm:
            for numel in (3, LONG):  # the first shows the kind of call
                await comm.barrier()
                if comm.rank == 0:
                    with contextlib.suppress(CollectiveMismatchError, PeerLostError):
                        await comm.send(values(0, numel), 1)
                elif numel == 3:
                    await comm.recv(torch.empty(3, dtype=torch.uint8), 0)
                else:
                    with pytest.raises(CollectiveMismatchError, match=rf"send\(uint8\[{LONG}\]"):
                        await comm.recv(received, 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", some(range(4), 1))
async def test_a_peer_that_writes_nonsense_is_named(part: int) -> None:
    """Frames behind an honest offer, or in the place of an answer, as no honest rank writes them."""
    choose = random.Random(part)
    numbers = [0, 1, 63, 64, 8, 100, LONG, 2**16, 2**20 - 64, 2**31, 2**32 - 1]
    for case in range(12):
        kind = DATA if case % 2 else CLEAR
        honest = (200 if kind == DATA else 0, kind, 0, 0, 1)
        fields = [choose.choice(numbers) if choose.random() < 0.4 else number for number in honest]
        step = choose.choice([256 if kind == DATA else 64, 64, 0, 8, 2**20, 2**40])
        async with new_comm("shm", name=f"nonsense {part} {case}", timeout=30) as comm:
            other = 1 - comm.rank
            got = torch.zeros(LONG, dtype=torch.uint8)
            if comm.rank == 0:  # the kinds of calls are known from now on
                await comm.send(got, other)
                await comm.recv(got, other)
            else:
                await comm.recv(got, other)
                await comm.send(got, other)
            await comm.barrier()
            comm.set_timeout(0.1)
            with contextlib.suppress(BrokenError):
                if comm.rank == 0:
                    await (comm.recv(got, 1) if kind == DATA else comm.send(got, 1))
                    continue
                writer: Any = link_of(comm, 0)._writer
                if kind == DATA:
                    writer.put(OFFER, 0, CODES[torch.uint8], 1, LONG)
                at = writer._state.head
                struct.pack_into("=IIIIIxxxxQ", writer._raw, writer._start + at, *fields, 0)
                writer._words[writer._head_at] = (at + step) % 2**64
                comm._session.backend._engine._bells.ring(0)  # type: ignore[union-attr]
                await comm.recv(got, 0)


# -- messages that are too long for the calls --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def threads_move_all(**hints: str) -> Any:
    """A comm whose progress thread moves each long message."""
    async with new_comm("shm", name="threads", timeout=60, hints={"inline_bytes": "65536", **hints}) as comm:
        await comm.barrier()  # so that all ranks know whose memory can be read
        await comm.barrier()
        yield comm


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    forward = Link.read_on

    def counted_read(link: Link) -> object:
        found.append(forward(link))
        return found[-1]

    monkeypatch.setattr(Link, "read_on", counted_read)
    return found


@pytest.mark.ranks(3)
async def test_ranks_that_exchange_large_messages_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "READ", 1 << 20)
    found = count_reads(monkeypatch)
    async with threads_move_all() as comm:
        following, previous = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        for round in range(6):
            nbytes = 3_000_001 + round
            outputs = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]
            receives = [comm.recv(output, previous, tag) for tag, output in enumerate(outputs)]
            sent = [values(10 * comm.rank + tag + round, nbytes) for tag in range(2)]
            if round == 5:
                sent[0] = sent[0].repeat_interleave(2)[::2]  # not as it is
            sends = [comm.send(tensor, following, tag) for tag, tensor in enumerate(sent)]
            for work in (*sends, *receives):
                await work
            for tag, output in enumerate(outputs):
                assert torch.equal(output, values(10 * previous + tag + round, nbytes))
            assert receives[0].source == previous
        assert len([each for each in found if each is True]) >= 2
        assert comm.statistics().in_flight == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("why", ["one direction", "hint"])
async def test_other_large_messages_are_not_read(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    found = count_reads(monkeypatch)
    async with threads_move_all(single_copy="0" if why == "hint" else "1") as comm:
        for round in range(4):
            output = torch.empty(LONG, dtype=torch.uint8)
            if why == "one direction" and comm.rank:
                await comm.recv(output, 0)
            elif why == "one direction":
                await comm.send(values(round), 1)
            else:
                receive = comm.recv(output, 1 - comm.rank)
                await comm.send(values(round), 1 - comm.rank)
                await receive
            assert (why == "one direction" and not comm.rank) or torch.equal(output, values(round))
    assert not found


@pytest.mark.ranks(2)
async def test_memory_that_cannot_be_read_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "READ", 1 << 17)
    async with threads_move_all() as comm:
        link = link_of(comm, 1 - comm.rank)
        segment, answers = link._segment, []

        class Unreadable:
            def read(self, *arguments: Any) -> bool | None:
                answers.append(len(answers) % 2 == 0 or None)
                return answers[-1] and segment.read(*arguments)

            def __getattr__(self, name: str) -> Any:
                return getattr(segment, name)

        monkeypatch.setattr(link, "_segment", Unreadable())
        for round in range(4):
            output = torch.empty(LONG, dtype=torch.uint8)
            receive = comm.recv(output, 1 - comm.rank)
            await comm.send(values(round), 1 - comm.rank)
            assert torch.equal(await receive, values(round))
        await comm.barrier()
    assert answers[:2] in ([True, None], [])


@pytest.mark.ranks(2)
async def test_a_reader_fails_with_the_comm_of_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    async with new_comm("shm", name="control") as control:
        comm = await new_comm("shm", name="fails", timeout=60, hints={"inline_bytes": "65536"})
        segment: Any = link_of(comm, 1 - comm.rank)._segment
        await comm.barrier()
        segment.reads_all()
        await comm.barrier()
        assert segment.reads_all(), "both ranks have tried it"
        monkeypatch.setattr(Messages, "_is_read", lambda *_: True)  # as in an exchange
        monkeypatch.setattr(Link, "read_on", lambda _: False)
        receive = comm.recv(torch.empty(LONG, dtype=torch.uint8), 1 - comm.rank)
        await control.barrier()  # the call of a receive reads a message that is there already
        send = comm.send(values(1), 1 - comm.rank)
        await control.barrier()
        if comm.rank == 0:
            comm.abort("enough")
        for work in (receive, send):
            with pytest.raises(BrokenError):
                await work
        await comm.aclose()


@pytest.mark.ranks(2)
async def test_a_message_that_is_offered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "read_on", lambda _: False)
    async with new_comm("shm", name="control") as control:
        comm = await new_comm("shm", name="twice", timeout=60, hints={"inline_bytes": "65536"})
        segment: Any = link_of(comm, 1 - comm.rank)._segment
        await comm.barrier()
        segment.reads_all()
        await comm.barrier()
        assert segment.reads_all(), "both ranks have tried it"
        if comm.rank == 0:
            receives = [comm.recv(torch.empty(LONG, dtype=torch.uint8), 1) for _ in range(2)]
            send = comm.send(values(1), 1)
            await control.barrier()
            for work in (*receives, send):
                with pytest.raises(BrokenError, match="rank 1 has offered message 0 twice"):
                    await work
        else:
            await control.barrier()
            link: Any = link_of(comm, 0)
            tensor = values(2)
            for _ in range(2):
                target = link._writer.reserve(8)
                ctypes.c_uint64.from_address(target).value = tensor.data_ptr()
                link._writer.publish(OFFER, 0, CODES[torch.uint8], 0, LONG)
            link._ring(0)
            with pytest.raises(BrokenError):
                await comm.recv(torch.empty(1), 0, 5)
        await comm.aclose()


@pytest.mark.ranks(2)
async def test_large_messages_in_one_direction_go_both_ways_until_the_faster_one_is_known(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    read_at = Link.read_at

    def reading(link: Link, ident: int, *args: Any) -> None:
        read.append(ident)
        read_at(link, ident, *args)

    monkeypatch.setattr(Link, "read_at", reading)
    async with new_comm("shm", name="own", timeout=60, hints={"inline_bytes": "65536"}) as own:
        segment: Any = link_of(own, 1 - own.rank)._segment
        await own.barrier()
        segment.reads_all()
        await own.barrier()
        for seed in range(6):
            if own.rank == 0:
                tensor = values(seed)
                await own.send(tensor, 1)
                tensor.zero_()
            else:
                assert torch.equal(await own.recv(torch.empty(LONG, dtype=torch.uint8), 0), values(seed))
        assert len(read) in (range(1, 6) if own.rank else [0])
