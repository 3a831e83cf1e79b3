"""Messages over gloo: what does not fit is named, and a waiting receive holds up nothing else."""

import asyncio
import contextlib
import math
import re
import socket
from typing import Any
from unittest import TestCase

import pytest
import torch

import asynccomm
from asynccomm import BackendError, BrokenError, CollectiveMismatchError, Comm, PayloadError
from asynccomm.backends.gloo import outbox, p2p
from asynccomm.backends.gloo.messages import SHORT, WINDOW, Header, Kind
from asynccomm.comm.pending import PendingComm
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.ops import MessageSpace, Parcel
from asynccomm.ops.dtypes import CODES
from asynccomm.ops.parcels import MAX_HEAD
from asynccomm.ops.validation import MAX_TAG
from asynccomm.testing.conformance.data import DTYPES, sample, strided
from tests.waiting import until

from .parcels import Shelf, data, joined, recv, send

module_in_c: Any = load("asynccomm.backends.gloo._frames")
needs_c = pytest.mark.skipif(isinstance(module_in_c, CoreUnavailable), reason="the messages in C are not built")


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(("sent", "expected"), [(3, 5), (5, 3), (0, 2), (2, 0)])
async def test_sizes_that_differ_are_named_on_the_receiver(comm: Comm, sent: int, expected: int) -> None:
    if comm.rank == 0:
        with pytest.raises(BrokenError, match=rf"send\(float32\[{sent}\].*recv\(float32\[{expected}\]|closed|reset"):
            work = comm.send(torch.ones(sent), 1)
            await work
            await comm.barrier()
    else:
        with pytest.raises(CollectiveMismatchError, match=rf"send\(float32\[{sent}\].*recv\(float32\[{expected}\]"):
            await comm.recv(torch.ones(expected), 0)


@pytest.mark.ranks(2, backend="gloo")
async def test_dtypes_that_differ_are_named(comm: Comm) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(3, dtype=torch.int32), 1)
        with pytest.raises(BrokenError):
            await comm.barrier()
    else:
        with pytest.raises(CollectiveMismatchError, match=r"send\(int32\[3\].*recv\(float32\[3\]"):
            await comm.recv(torch.ones(3), 0)


@pytest.mark.ranks(2, backend="gloo")
async def test_a_mismatch_with_oneself(comm: Comm) -> None:
    if comm.rank == 0:
        await comm.barrier()
        for work in (comm.send(torch.ones(3), 0), comm.recv(torch.ones(4), 0)):
            with pytest.raises(CollectiveMismatchError, match=r"send\(float32\[3\].*recv\(float32\[4\]"):
                await work
    else:
        with pytest.raises(BrokenError):  # maybe before it is through the barrier
            await comm.barrier()
            await comm.recv(torch.ones(1), 0)


class Counting:
    """The module in C; it waits long, and counts the messages that it has received."""

    seconds = 5.0

    def __init__(self) -> None:
        self.received = 0

    def receive_message(self, *arguments: Any) -> None:
        *others, _, outcome = arguments
        module_in_c.receive_message(*others, self.seconds, outcome)
        self.received += outcome[0] is None


def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counts = Counting()
    monkeypatch.setattr(p2p, "_core", counts)
    monkeypatch.setattr(p2p, "SHORT_WAIT_SECONDS", math.inf)
    return counts


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_awaited_receives_of_short_messages_are_carried_out_in_c(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counting(monkeypatch)
    other = 1 - comm.rank
    for round, numel in enumerate((0, 1, 1000, SHORT // 4, 3, SHORT // 4) * 10):
        expected = torch.arange(numel, dtype=torch.float32) + round
        received = torch.zeros(numel)
        if comm.rank == 0:
            await comm.send(expected, other, tag=round)
        work = comm.recv(received, other, tag=round)
        assert await work is received
        assert work.source == other
        assert received.equal(expected)
        if comm.rank == 1:
            await comm.send(expected, other, tag=round)
    assert counts.received >= 10, "on a busy machine, the endpoint's thread may be ahead of the task"


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_many_messages_in_one_direction_do_not_fill_the_window(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counting(monkeypatch)
    count = 3 * WINDOW // SHORT
    for number in range(count):
        if comm.rank == 0:
            await comm.send(torch.full((SHORT,), number % 256, dtype=torch.uint8), 1)
        else:
            assert (await comm.recv(torch.zeros(SHORT, dtype=torch.uint8), 0)).eq(number % 256).all()
    assert counts.received <= count * comm.rank


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_receives_that_are_not_the_next_one_take_the_ordinary_path(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting(monkeypatch)
    if comm.rank == 0:
        await comm.barrier()
        for value in range(8):
            await comm.send(torch.full((3,), float(value)), 1, tag=value // 6)
        await comm.barrier()
        return
    first, second = comm.recv(torch.zeros(3), 0), comm.recv(torch.zeros(3), 0)
    anyone = comm.recv(torch.zeros(3), None)
    behind = comm.recv(torch.zeros(3), 0)
    strided = comm.recv(torch.zeros(6)[::2], 0)
    viewed = comm.recv(torch.zeros(3).neg()._neg_view(), 0)
    tagged = comm.recv(torch.zeros(3), 0, tag=1)
    await comm.barrier()
    for work, value in ((second, 1), (tagged, 6), (first, 0), (behind, 3), (anyone, 2), (strided, 4), (viewed, 5)):
        assert (await work).eq(value).all()
    assert (await comm.recv(torch.zeros(3), 0, tag=1)).eq(7).all()
    await comm.barrier()


@needs_c
@pytest.mark.timeout(60)
@pytest.mark.ranks(2, backend="gloo")
async def test_a_wait_in_c_does_not_hold_up_what_is_to_be_written(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "seconds", 90.0)
    counting(monkeypatch)
    other = 1 - comm.rank
    for _ in range(2):
        await asyncio.gather(comm.send(torch.zeros(1), other), comm.recv(torch.zeros(1), other))
    if comm.rank == 0:
        backend: Any = comm.unsafe_get_backend()
        backend._endpoint._outbound[1].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(3):
            await comm.send(torch.arange(SHORT // 8), 1)
            assert (await comm.recv(torch.zeros(2), 1)).eq(3).all()
    else:
        for _ in range(3):
            assert (await comm.recv(torch.zeros(SHORT // 8, dtype=torch.int64), 0)).equal(torch.arange(SHORT // 8))
            await comm.send(torch.full((2,), 3.0), 0)


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_messages_and_collectives_in_turns_in_c(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch)
    other = 1 - comm.rank
    for number in range(40):
        work = comm.recv(torch.zeros(5), other)
        await comm.send(torch.full((5,), float(number)), other)
        assert (await comm.all_reduce(torch.ones(2))).eq(2).all()
        assert (await work).eq(number).all()
        assert (await comm.all_reduce(torch.ones(300))).eq(2).all()


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_a_receive_in_inference_mode(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch)
    for number in range(3):
        with torch.inference_mode():
            if comm.rank == 0:
                await comm.send(torch.full((5,), float(number)), 1)
                await comm.send(torch.full((5,), number + 0.5), 1, tag=1)
            else:
                later = comm.recv(torch.zeros(5), 0, tag=1)
                assert (await comm.recv(torch.zeros(5), 0)).eq(number).all()
                assert (await later).eq(number + 0.5).all()


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_a_failure_in_c_breaks_the_comm(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def receive_message(self, *_: Any) -> None:
            raise MemoryError("no room")

    other = 1 - comm.rank
    await asyncio.gather(comm.send(torch.zeros(1), other), comm.recv(torch.zeros(1), other))
    if comm.rank == 1:
        monkeypatch.setattr(p2p, "_core", Failing())
        monkeypatch.setattr(p2p, "SHORT_WAIT_SECONDS", math.inf)
        work = comm.recv(torch.zeros(5), 0)
        with pytest.raises(MemoryError, match="no room"):
            await work
        with pytest.raises(BackendError, match="a message that was read in part is lost"):
            await work
    else:
        with pytest.raises(BrokenError):
            await comm.recv(torch.zeros(5), 1)


@needs_c
@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("raised", [OSError, KeyboardInterrupt])
async def test_a_signal_handler_that_raises_behind_c_loses_nothing(
    comm: Comm, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    class Interrupted(Counting):
        def receive_message(self, *arguments: Any) -> None:
            super().receive_message(*arguments)
            raise raised

        def send_message(self, *arguments: Any) -> None:
            module_in_c.send_message(*arguments)
            raise raised

    other = 1 - comm.rank
    for _ in range(2):
        await asyncio.gather(comm.send(torch.zeros(1), other), comm.recv(torch.zeros(1), other))
    counting(monkeypatch)
    interrupted = Interrupted()
    for round, numel in enumerate((3, SHORT // 4, 3)):
        if comm.rank == 0:
            await comm.send(torch.full((numel,), float(round)), 1, tag=round)
            await comm.send(torch.full((numel,), round + 10.0), 1, tag=9)
        else:
            later = comm.recv(torch.zeros(numel), 0, tag=9)
            work = comm.recv(torch.zeros(numel), 0, tag=round)
            with monkeypatch.context() as patched:
                patched.setattr(p2p, "_core", interrupted)
                for each in (later, work) if round == 1 else (work, later):
                    with contextlib.suppress(raised):
                        await each
            assert (await work).eq(round).all()
            assert (await later).eq(round + 10).all()
        await comm.barrier()
    if raised is OSError:  # it breaks the comm of a rank that sends
        return
    if comm.rank == 0:
        with monkeypatch.context() as patched, pytest.raises(raised):
            patched.setattr(outbox, "_core", interrupted)
            comm.send(torch.full((SHORT // 4,), 5.0), 1)
        await comm.send(torch.full((3,), 6.0), 1)
    else:
        assert (await comm.recv(torch.zeros(SHORT // 4), 0)).eq(5).all()
        assert (await comm.recv(torch.zeros(3), 0)).eq(6).all()


@pytest.mark.ranks(3, backend="gloo")
async def test_a_receive_that_waits_holds_up_no_other_lane(comm: Comm) -> None:
    if comm.rank == 0:
        late = comm.recv(torch.ones(1), 1, 1)  # rank 1 sends it only after all the rest
        other_tag = comm.recv(torch.ones(1), 1, 2)
        other_peer = comm.recv(torch.ones(1), 2, 1)
        await asyncio.gather(comm.send(torch.ones(1), 1), comm.send(torch.ones(1), 2))
        await asyncio.gather(other_tag, other_peer)
        await comm.send(torch.ones(1), 1, 3)
        await late
    elif comm.rank == 1:
        await comm.recv(torch.ones(1), 0)
        await comm.send(torch.ones(1), 0, 2)
        await comm.recv(torch.ones(1), 0, 3)
        await comm.send(torch.ones(1), 0, 1)
    else:
        await comm.recv(torch.ones(1), 0)
        await comm.send(torch.ones(1), 0, 1)


@pytest.mark.ranks(3, backend="gloo")
async def test_receives_from_any_source_get_every_message_once_and_those_of_a_rank_in_order(comm: Comm) -> None:
    count = 40
    sizes = [3, 20_000]  # short and long ones in turn
    if comm.rank == 0:
        works = [comm.recv(torch.zeros(sizes[i % 2]), tag=i % 2) for i in range(2 * count)]
        got: dict[tuple[int, int], list[int]] = {}
        for i, work in enumerate(works):
            out = await work
            assert out.eq(out[0]).all()
            assert work.source is not None
            got.setdefault((work.source, i % 2), []).append(int(out[0].item()) - 1000 * work.source)
        assert got == {(rank, tag): [*range(tag, count, 2)] for rank in (1, 2) for tag in (0, 1)}
    else:
        await asyncio.gather(
            *(comm.send(torch.full((sizes[i % 2],), 1000.0 * comm.rank + i), 0, i % 2) for i in range(count))
        )


@pytest.mark.ranks(3, backend="gloo")
async def test_a_receive_from_any_source_does_not_wait_for_a_silent_rank(comm: Comm) -> None:
    if comm.rank == 0:
        for _ in range(20):
            work = comm.recv(torch.zeros(1))
            await work
            assert work.source == 1
        await comm.send(torch.ones(1), 2)
        work = comm.recv(torch.zeros(1))
        assert (await work).item() == 2
        assert work.source == 2
    elif comm.rank == 1:
        for _ in range(20):
            await comm.send(torch.ones(1), 0)
    else:
        await comm.recv(torch.zeros(1), 0)
        await comm.send(torch.full((1,), 2.0), 0)


@pytest.mark.ranks(2, backend="gloo")
async def test_a_cancelled_wait_for_any_source_loses_no_message(comm: Comm) -> None:
    if comm.rank == 0:
        work = comm.recv(torch.zeros(1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await work
        await comm.barrier()
        following = comm.recv(torch.zeros(1))
        assert [(await work).item(), (await following).item()] == [1, 2]
    else:
        await comm.barrier()
        await comm.send(torch.full((1,), 1.0), 0)
        await comm.send(torch.full((1,), 2.0), 0)


@pytest.mark.ranks(3, backend="gloo")
async def test_a_receive_from_any_source_fails_when_all_other_ranks_have_left(comm: Comm) -> None:
    async with asynccomm.new_comm("gloo", name="left alone", timeout=30, hints={"control": "off"}) as other:
        if comm.rank == 0:
            work = other.recv(torch.zeros(1))
            await comm.barrier()
            with pytest.raises(BrokenError, match="the connections of all other ranks have ended"):
                await work
        else:
            await comm.barrier()


def connections(comm: Comm) -> Any:
    backend: Any = comm.unsafe_get_backend()
    return backend._endpoint


def pair(control: str) -> PendingComm[Comm]:
    return asynccomm.new_comm("gloo", name="cut", timeout=15, hints={"control": control})


ENDED = "its connection for messages ended"


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("control", ["on", "off"])
@pytest.mark.parametrize("kind", ["tensor", "any source", "object", "stream"])
async def test_a_connection_that_ends_in_the_data_of_a_long_message_breaks_both_ranks(
    comm: Comm, monkeypatch: pytest.MonkeyPatch, kind: str, control: str
) -> None:
    data = torch.ones(4 << 20)
    async with pair(control) as other:
        if comm.rank == 0:
            endpoint = connections(other)
            with endpoint.lock:
                link = endpoint.link_to(1)
            write = link.write

            def write_a_part() -> None:
                write()
                if link.bulk:
                    link.sock.shutdown(socket.SHUT_RDWR)

            monkeypatch.setattr(link, "write", write_a_part)
            with pytest.raises(BackendError, match=ENDED):
                if kind == "object":
                    await other.send_object(data, 1)
                elif kind == "stream":
                    async with other.sink(1) as sink:
                        await sink.put(data)
                else:
                    await other.send(data, 1)
        else:
            with pytest.raises(BackendError, match=ENDED):
                if kind == "object":
                    await other.recv_object(0)
                elif kind == "stream":
                    async for _ in other.stream(0):
                        pass
                else:
                    await other.recv(torch.zeros_like(data), None if kind == "any source" else 0)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("call", ["receive", "receive of an object", "collective"])
async def test_a_rank_that_has_closed_the_comm_is_named_with_the_operation_that_needs_it(comm: Comm, call: str) -> None:
    async with pair("on") as other:
        if comm.rank == 1:
            return
        match call:
            case "receive":
                work: Any = other.recv(torch.zeros(3), 1)
                text = ", and recv(float32[3], src=1, tag=0) needs it"
            case "receive of an object":
                work, text = other.recv_object(1), ", and recv_object(src=1, tag=0) needs it"
            case _:
                work, text = other.all_reduce(torch.ones(3)), " and takes no part in all_reduce(float32[3], SUM)"
        with pytest.raises(BackendError, match=f"^{re.escape('rank 1 has closed the comm' + text)}$") as found:
            await work
        assert type(found.value) is BackendError


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("control", ["on", "off"])
@pytest.mark.parametrize("posted", ["first", "first, strided", "halfway", "last"])
async def test_a_connection_that_ends_in_a_short_message_breaks_its_receive(
    comm: Comm, posted: str, control: str
) -> None:
    async with pair(control) as other:
        endpoint = connections(other)
        if comm.rank == 0:
            await comm.barrier()
            with endpoint.lock:
                link = endpoint.link_to(1)
                endpoint.send(link, Header(Kind.TENSOR, 0, 0, 1000, CODES[torch.float32]).pack() + bytes(100))
            await comm.barrier()
            link.sock.shutdown(socket.SHUT_RDWR)
            await comm.barrier()
            return
        tensor = torch.zeros(2000)[::2] if "strided" in posted else torch.zeros(1000)
        work = other.recv(tensor, 0) if "first" in posted else None
        await comm.barrier()
        await until(lambda: 0 in endpoint._inbound and endpoint._inbound[0].receiving)
        if posted == "halfway":
            work = other.recv(tensor, 0)
        await comm.barrier()
        await until(lambda: endpoint._inbound[0].fd < 0)
        with pytest.raises(BackendError, match=ENDED):
            await (work or other.recv(tensor, 0))
        await comm.barrier()


@pytest.mark.ranks(2, backend="gloo")
async def test_the_connection_of_a_message_may_end_after_the_other_one(comm: Comm) -> None:
    async with pair("off") as other:
        endpoint = connections(other)
        if comm.rank == 0:
            with endpoint.lock:
                link = endpoint.link_to(1)
                endpoint.send(link, Header(Kind.TENSOR, 0, 0, 1000, CODES[torch.float32]).pack() + bytes(100))
            await comm.barrier()
            link.sock.shutdown(socket.SHUT_RDWR)
            await comm.barrier()
            return
        work = other.recv(torch.zeros(1000), 0)
        await until(lambda: 0 in endpoint._inbound and endpoint._inbound[0].receiving)
        away = endpoint._outbound[0]
        away.sock.shutdown(socket.SHUT_RDWR)
        await until(lambda: away.fd < 0)
        assert not work.done()
        await comm.barrier()
        with pytest.raises(BackendError, match=ENDED):
            await work
        await comm.barrier()


@pytest.mark.ranks(2, backend="gloo")
async def test_more_short_messages_than_fit_wait_with_their_sender(comm: Comm) -> None:
    """The receiving rank keeps a limited number of bytes."""
    count = 3 * WINDOW // SHORT
    floats = SHORT // 4
    if comm.rank == 0:
        works = [comm.send(torch.full((floats,), float(i)), 1) for i in range(count)]
        await comm.barrier()
        assert 0 < sum(work.done() for work in works) <= WINDOW // SHORT
        await comm.barrier()
        await asyncio.gather(*works)
    else:
        await comm.barrier()
        await comm.barrier()
        for i in range(count):
            assert (await comm.recv(torch.zeros(floats), 0)).eq(i).all()


@pytest.mark.ranks(2, backend="gloo")
async def test_messages_sent_before_closing_arrive_and_one_that_was_not_received_is_named(comm: Comm) -> None:
    logs = TestCase().assertLogs("asynccomm", "WARNING") if comm.rank == 1 else contextlib.nullcontext()
    with logs as logged:
        async with asynccomm.new_comm("gloo", name="last words", timeout=30) as other:
            if comm.rank == 0:
                for i in range(10):
                    await other.send(torch.full((10_000,), float(i)), 1)
            await comm.barrier()
            if comm.rank == 1:
                for i in range(9):
                    assert (await other.recv(torch.zeros(10_000), 0)).eq(i).all()
    assert logged is None or "not received: float32[10000] of rank 0" in logged.output[0]


@pytest.mark.ranks(2, backend="gloo")
async def test_messages_of_many_tags_at_once(comm: Comm) -> None:
    tags = range(20)
    if comm.rank == 0:
        await asyncio.gather(*(comm.send(torch.full((2,), float(tag)), 1, tag) for tag in tags))
    else:
        tensors = [torch.zeros(2) for _ in tags]
        await asyncio.gather(*(comm.recv(tensor, 0, tag) for tag, tensor in zip(tags, tensors, strict=True)))
        assert [tensor[0].item() for tensor in tensors] == list(tags)


# -- parcels -----------------------------------------------------------------------------------------------------------

LENGTHS = [0, 1, 4096, 4097, 300_000, 17_000_001]


def pieces(nbytes: int) -> list[torch.Tensor]:
    """Cut in many small ones, nothing, and the rest, which has gaps."""
    parts = [torch.zeros(n, dtype=torch.uint8) for n in [min(nbytes // 100, 5000)] * 50]
    rest = nbytes - sum(len(part) for part in parts)
    return [*parts, torch.zeros(0), torch.zeros(rest, 2, dtype=torch.uint8)[:, 1]]


@pytest.mark.ranks([1, 2], backend="gloo")
@pytest.mark.parametrize("cut", ["as sent", "otherwise"])
@pytest.mark.parametrize("nbytes", LENGTHS)
async def test_parcels_arrive(comm: Comm, nbytes: int, cut: str) -> None:
    peer = comm.size - 1 - comm.rank
    payload = [data(nbytes - nbytes // 3), data(nbytes // 3, 5)]
    given = Parcel(b"head" * 3, tuple(payload))
    shelf = Shelf((lambda n: [torch.zeros_like(t) for t in payload]) if cut == "as sent" else pieces)
    sent = send(comm, given, peer, 7)
    work = recv(comm, shelf, peer, 7)
    await asyncio.gather(sent, work)
    assert shelf.calls == [(peer, b"head" * 3, {peer: nbytes})]
    assert torch.equal(shelf.got(peer), joined(payload))
    assert work.source == peer


@pytest.mark.ranks([1, 2], backend="gloo")
@pytest.mark.parametrize("head", [0, 4000, 5000, 20 << 20])
async def test_long_heads_arrive(comm: Comm, head: int) -> None:
    peer = comm.size - 1 - comm.rank
    for nbytes in (0, 90, 9000, 1_000_000):
        shelf = Shelf()
        given = Parcel(b"#" * head, (data(nbytes),))
        await asyncio.gather(send(comm, given, peer), recv(comm, shelf, peer))
        assert shelf.calls == [(peer, b"#" * head, {peer: nbytes})]
        assert torch.equal(shelf.got(peer), joined([data(nbytes)]))


@pytest.mark.ranks([1, 2], backend="gloo")
async def test_parcels_of_many_tensors_of_all_dtypes(comm: Comm) -> None:
    peer = comm.size - 1 - comm.rank
    tensors = [sample(1, shape, dtype) for dtype in DTYPES for shape in [(), (3,), (0,), (70, 80), (400, 300)]]
    given = [strided(t) if i % 3 == 0 else t for i, t in enumerate(tensors)]
    given[-1] = given[-1].clone().requires_grad_() if given[-1].is_floating_point() else given[-1]
    shelf = Shelf(
        lambda _: [strided(torch.zeros_like(t)) if i % 2 else torch.zeros_like(t) for i, t in enumerate(tensors)]
    )
    await asyncio.gather(send(comm, Parcel(b"", tuple(given)), peer), recv(comm, shelf, peer))
    assert torch.equal(shelf.got(peer), joined(tensors))


@pytest.mark.ranks([1, 2], backend="gloo")
async def test_what_is_refused_is_thrown_away_and_the_comm_goes_on(comm: Comm) -> None:
    peer = comm.size - 1 - comm.rank

    def refuse(_: int) -> list[torch.Tensor]:
        raise ValueError("no room")

    for nbytes in LENGTHS:
        given = Parcel(b"x", (data(nbytes),))
        first, second = send(comm, given, peer), send(comm, given, peer)
        refused, taken = recv(comm, Shelf(refuse), peer), recv(comm, shelf := Shelf(), peer)
        with pytest.raises(PayloadError, match=f"rank {peer} sent cannot be taken: ValueError: no room"):
            await refused
        await asyncio.gather(first, second, taken)
        assert torch.equal(shelf.got(peer), joined([data(nbytes)]))
    await comm.barrier()


@pytest.mark.ranks(2, backend="gloo")
async def test_a_place_may_break_the_comm(comm: Comm) -> None:
    def broken(_: int) -> list[torch.Tensor]:
        raise BackendError("no memory left")

    if comm.rank == 0:
        with pytest.raises(BackendError, match="no memory left"):
            await recv(comm, Shelf(broken), 1)
        with pytest.raises(BrokenError):
            await comm.barrier()
    else:
        send(comm, Parcel(b"", ()), 0)
        with pytest.raises(BrokenError):
            await comm.barrier()


@pytest.mark.ranks(2, backend="gloo")
async def test_a_head_that_is_too_long_breaks_the_comm(comm: Comm) -> None:
    if comm.rank == 0:
        with pytest.raises(BackendError, match="rank 1 sent a head of 67108865 bytes; 67108864 are allowed"):
            await recv(comm, Shelf(), 1)
    else:
        with pytest.raises(BrokenError):
            await send(comm, Parcel(bytes(MAX_HEAD + 1), ()), 0)


@pytest.mark.ranks([1, 2], backend="gloo")
async def test_tensors_and_the_channels_of_parcels_never_meet(comm: Comm) -> None:
    peer = comm.size - 1 - comm.rank
    channels = [MessageSpace.OBJECTS, MessageSpace.STREAMS]
    tag = MAX_TAG
    works = [comm.send(torch.full((5000,), 3.0), peer, tag)]
    works += [send(comm, Parcel(channel.name.encode(), (data(9000),)), peer, tag, channel) for channel in channels]
    shelves = [Shelf() for _ in channels]
    for shelf, channel in reversed(list(zip(shelves, channels, strict=True))):
        await recv(comm, shelf, peer, tag, channel)
        assert shelf.calls[0][1] == channel.name.encode()
    tensor = torch.zeros(5000)
    await comm.recv(tensor, peer, tag)
    assert tensor.eq(3).all()
    await asyncio.gather(*works)


@pytest.mark.ranks(2, backend="gloo")
async def test_parcels_of_one_pair_keep_their_order(comm: Comm) -> None:
    peer = 1 - comm.rank
    sent = [send(comm, Parcel(b"%d" % i, (data(1 << (i % 20)),)), peer) for i in range(60)]
    shelves = [Shelf() for _ in range(60)]
    works = [recv(comm, shelf, peer) for shelf in shelves]
    await asyncio.gather(*sent, *works)
    assert [shelf.calls[0][1] for shelf in shelves] == [b"%d" % i for i in range(60)]
    assert all(torch.equal(shelf.got(peer), data(1 << (i % 20))) for i, shelf in enumerate(shelves))


@pytest.mark.ranks(3, backend="gloo")
async def test_parcels_from_any_source(comm: Comm) -> None:
    """Each rank's arrive in its order; the long and the short ones are delivered whole."""
    sizes = [5, 200_000, 70]
    if comm.rank == 0:
        shelves = [Shelf() for _ in range(2 * len(sizes))]
        works = [recv(comm, shelf, None) for shelf in shelves]
        await asyncio.gather(*works)
        for rank in (1, 2):
            found = [shelf for work, shelf in zip(works, shelves, strict=True) if work.source == rank]
            assert [shelf.calls[0][1] for shelf in found] == [b"0", b"1", b"2"]
            assert all(torch.equal(shelf.got(rank), data(n, rank)) for shelf, n in zip(found, sizes, strict=True))
    else:
        for i, n in enumerate(sizes):
            await send(comm, Parcel(b"%d" % i, (data(n, comm.rank),)), 0)


@pytest.mark.ranks(2, backend="gloo")
async def test_long_parcels_of_many_tags_at_once(comm: Comm) -> None:
    peer = 1 - comm.rank
    tags = range(10)
    shelves = [Shelf() for _ in tags]
    works = [recv(comm, shelf, peer, tag) for tag, shelf in zip(tags, shelves, strict=True)]
    works += [send(comm, Parcel(b"", (data(100_000, tag),)), peer, tag) for tag in tags]
    await asyncio.gather(*works)
    assert all(torch.equal(shelf.got(peer), data(100_000, tag)) for tag, shelf in zip(tags, shelves, strict=True))
