"""Messages and parcels on a simulated GPU: a tensor whose elements are a multiple of five plays one on the host."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import struct
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import AbortedError, BackendError, BrokenError, CollectiveMismatchError, Comm, PayloadError
from asynccomm.backends import arithmetic, delivery, regions
from asynccomm.ops import Call, MessageSpace, Parcel, Parcels, SendParcel
from asynccomm.testing.conformance.data import DTYPES, sample, strided
from tests.backends.gloo.parcels import Shelf, collective, joined, recv, send, submit
from tests.sampling import amount, some
from tests.waiting import until

from .conftest import World
from .simulation import SimulatedBackend, SimulatedEvent, SimulatedStream, UserStream

SIZES = pytest.mark.parametrize("size", some([1, 2, 4, 3], 2))


def backend_of(comm: Comm) -> SimulatedBackend:
    backend = comm._session.backend
    assert isinstance(backend, SimulatedBackend)
    return backend


def data(numel: int, salt: int = 0) -> Tensor:
    return (torch.arange(numel) * 7 + salt + numel).to(torch.uint8)


def of(rank: int, lengths: Sequence[int], head: bytes = b"") -> Parcel:
    return Parcel(head + bytes([rank]), tuple([data(n, rank) for n in lengths]))


def cut(lengths: Iterable[int], *, gaps: bool = False) -> Shelf:
    """A place that has tensors of these lengths, ready-made, so that some play the host's part."""

    def make(_: int) -> list[Tensor]:
        return [torch.zeros(n, 1 + gaps, dtype=torch.uint8)[:, -1] for n in lengths]

    return Shelf(make)


def refusing(error: Exception) -> Shelf:
    def refuse(_: int) -> list[Tensor]:
        raise error

    return Shelf(refuse)


# -- where segments lie --------------------------------------------------------------------------------------------

SEGMENTS = [
    (),
    (0,),
    (8,),
    (10,),
    (8, 10),
    (10, 8),
    (10, 20, 8, 0, 9, 15),
    (8, 9, 11, 30, 12),
    (100_001, 100_000),
]


def cuts_of(total: int) -> list[list[int]]:
    """Ways to cut what comes."""
    if total < 2:
        return [[total]]
    half = total // 2
    return [[total], [half, total - half], [0, 1, total - 1], [3, total - 3] if total > 3 else [1] * total]


@pytest.mark.parametrize("lengths", SEGMENTS, ids=str)
@pytest.mark.parametrize("gaps", [False, True])
async def test_segments_on_host_and_device_come_into_any_tensors(
    world: World, events: list[SimulatedEvent], lengths: tuple[int, ...], gaps: bool
) -> None:
    total = sum(lengths)
    cuts = [list(lengths), *cuts_of(total)]
    async with world(2) as (giver, taker):
        parcel = of(0, lengths, b"head")
        shelves = [cut(ways, gaps=gaps) for ways in cuts]
        works = [recv(taker, shelf, 0) for shelf in shelves]
        works += [send(giver, parcel, 1) for _ in shelves]
        for shelf in shelves:
            works += [collective(comm, Parcels("x", giver=0), [parcel], shelf) for comm in (giver, taker)]
        await asyncio.gather(*works)
        for shelf in shelves:
            assert shelf.calls == [(0, b"head\0", {0: total})] * 2
            assert _came(shelf, 0, parcel)
    await until(lambda: all(event.released for event in events))


async def test_tensors_of_all_kinds(world: World) -> None:
    tensors = [sample(1, shape, dtype) for dtype in DTYPES for shape in [(), (3,), (5,), (0,), (7, 8), (40, 30)]]
    given = [strided(t) if i % 3 == 0 else t for i, t in enumerate(tensors)]
    given[-1] = given[-1].clone()
    async with world(2) as (giver, taker):
        outputs = [strided(torch.zeros_like(t)) if i % 2 else torch.zeros_like(t) for i, t in enumerate(tensors)]
        shelf = Shelf(lambda _: outputs)
        await asyncio.gather(send(giver, Parcel(b"", tuple(given)), 1), recv(taker, shelf, 0))
        assert torch.equal(shelf.got(0), joined(tensors))


@pytest.mark.parametrize("source", [0, 1])
async def test_tensors_made_in_inference_mode(world: World, source: int) -> None:
    async with world(2) as comms:
        taker = comms[1]
        with torch.inference_mode():
            outputs = [torch.zeros(8), torch.zeros(10), torch.zeros(9, 2)[:, 1]]
            pieces = [torch.zeros(n, dtype=torch.uint8) for n in (3, 20, 5)]
        sent = [comms[source].send(torch.arange(float(len(output))), 1) for output in outputs]
        received = [taker.recv(output, source) for output in outputs]
        await asyncio.gather(*sent, *received)
        assert [output.tolist() for output in outputs] == [list(range(len(output))) for output in outputs]
        shelf = Shelf(lambda _: pieces)
        await asyncio.gather(send(comms[source], of(0, [8, 20]), 1), recv(taker, shelf, source))
        assert torch.equal(joined([piece.clone() for piece in pieces]), joined(of(0, [8, 20]).tensors))


async def test_what_is_on_the_host_waits_for_the_memory_that_it_is_to_come_into(world: World) -> None:
    """The caller's stream may have something to do with it that was called before."""
    async with world(2) as (giver, taker):
        gate = threading.Event()
        user = SimulatedStream()
        user.put(gate.wait)
        target = torch.zeros(12, dtype=torch.uint8)
        user.put(lambda: target.fill_(1))
        backend_of(taker).device.user = user  # type: ignore[assignment]
        work = recv(taker, Shelf(lambda _: [target, torch.zeros(8, dtype=torch.uint8)]), 0)
        await send(giver, of(0, [20]), 1)
        await until(lambda: backend_of(taker)._lanes.join(0.0))
        assert not work.done()
        assert target.eq(0).all()
        gate.set()
        await work
        assert torch.equal(target, data(20)[:12])


async def test_new_memory_belongs_to_a_stream_that_runs_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch hands out memory of a stream again while work queued on that stream may still use it."""
    async with world(2) as (giver, taker):
        device, allocated = backend_of(taker).device, list[SimulatedStream]()

        def allocating(stream: SimulatedStream) -> contextlib.AbstractContextManager[object]:
            allocated.append(stream)
            return contextlib.nullcontext()

        monkeypatch.setattr(device, "allocating", allocating)
        monkeypatch.setattr(device, "empty", lambda n, stream: allocating(stream) and torch.empty(n, dtype=torch.uint8))
        shelf = cut([8, 9, 11, 6], gaps=True)  # pieces of two segments on the device, with gaps
        await asyncio.gather(send(giver, of(0, [13, 21]), 1), recv(taker, shelf, 0))
        assert torch.equal(shelf.got(0), joined(of(0, [13, 21]).tensors))
        output = strided(torch.zeros(3, 4))
        await asyncio.gather(giver.send(torch.ones(3, 4), 1), taker.recv(output, 0))
        assert output.eq(1).all()
        assert len(allocated) >= 3, "the memory of the message, and of two segments and their places"
        assert not any(stream.runs for stream in allocated)


async def test_payloads_wait_for_the_allocation_of_their_memory(world: World) -> None:
    """Torch may fill it, or allocate in the order of the stream."""
    async with world(2) as (giver, taker):
        await asyncio.gather(giver.send(torch.ones(12), 1), taker.recv(torch.zeros(12), 0))  # connects
        gate = threading.Event()
        backend_of(taker)._messenger._for_memory.put(gate.wait)  # type: ignore[attr-defined]
        output = strided(torch.zeros(3, 4))
        sent, received = giver.send(torch.ones(3, 4), 1), taker.recv(output, 0)
        await until(lambda: bool(backend_of(taker)._poller.in_flight()))
        await until(lambda: backend_of(taker)._lanes.join(0.0))
        assert not received.done()
        gate.set()
        await asyncio.gather(sent, received)
        assert output.eq(1).all()


@pytest.mark.parametrize("dim", [0, 1])
async def test_new_outputs_are_lent_to_the_callers_stream(
    world: World, monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    """The caller drops them while kernels on its stream may still use them. Along dim 1 they are filled by copies."""
    async with world(2) as comms:
        lent: set[int] = set()
        for comm in comms:
            device = backend_of(comm).device
            monkeypatch.setattr(device, "owns", lambda tensor: True)
            monkeypatch.setattr(device, "lend", lambda tensor, _: lent.add(tensor.untyped_storage().data_ptr()))
        outputs = await asyncio.gather(*(comm.all_gather_v(None, torch.ones(3, 4), dim=dim) for comm in comms))
        assert {output.untyped_storage().data_ptr() for output in outputs} <= lent


@pytest.mark.parametrize("what", ["a message", "parcels"])
async def test_memory_is_free_once_the_operation_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It does not wait for the garbage collector, which may not run for long."""
    async with world(2) as comms:
        for comm in comms:
            monkeypatch.setattr(backend_of(comm).device, "owns", lambda tensor: True)
        made: list[weakref.ref[object]] = []
        landing = arithmetic.landing

        def noted(output: Tensor) -> Any:
            found = landing(output)
            if found[1] is not None:
                made.append(weakref.ref(found[0].untyped_storage()))
            return found

        monkeypatch.setattr(arithmetic, "landing", noted)
        monkeypatch.setattr(delivery, "landing", noted)
        gc.collect()
        gc.disable()
        try:
            if what == "parcels":
                await asyncio.gather(*(comm.all_gather_v(None, torch.ones(3, 4), dim=1) for comm in comms))
            else:
                sent = torch.ones(12)
                made.append(weakref.ref(sent.untyped_storage()))
                received = torch.zeros(12, 2)[:, 0]
                await asyncio.gather(comms[0].send(sent, 1), comms[1].recv(received, 0))
                del sent
            assert len(made) == 2
            await until(lambda: not any(reference() is not None for reference in made))
        finally:
            gc.enable()


async def test_tensors_are_copied_on_the_stream_of_the_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scope may end while another stream is current."""
    async with world(2) as (giver, taker):
        device = backend_of(giver).device
        inside: list[Any] = []
        copied: list[list[Any]] = []

        @contextlib.contextmanager
        def allocating(stream: Any) -> Iterator[None]:
            inside.append(stream)
            yield
            inside.pop()

        plain = arithmetic.plain

        def noted(tensor: Tensor) -> Tensor:
            if not arithmetic.is_plain(tensor):
                copied.append(list(inside))
            return plain(tensor)

        monkeypatch.setattr(device, "allocating", allocating)
        for module in (arithmetic, regions):
            if hasattr(module, "plain"):
                monkeypatch.setattr(module, "plain", noted)
        called, received = device.user, torch.zeros(4, 3)
        async with giver.coalesce():
            sent = giver.send(torch.ones(4, 6)[:, ::2], 1)
            device.user = UserStream()
        await asyncio.gather(sent, taker.recv(received, 0))
        assert copied == [[called]]
        assert received.eq(1).all()


async def test_tensors_are_kept_until_a_late_copy_has_passed(world: World) -> None:
    """A collective that has waited for its memory reads it on a stream that the caller's stream does not know of."""
    async with world(2) as comms:
        backends = [backend_of(comm) for comm in comms]
        all_reduces, copies = threading.Event(), threading.Event()
        await asyncio.gather(*(comm.all_reduce(torch.ones(8)) for comm in comms))
        reduced, rows = list[Awaitable[Any]](), list[Awaitable[Any]]()
        rooms, copied = list[Tensor](), list[weakref.ref[object]]()
        for comm, backend in zip(comms, backends, strict=True):
            backend._collectives.communicator.stream.put(all_reduces.wait)  # type: ignore[attr-defined]
            backend._messenger._for_collectives.put(copies.wait)  # type: ignore[attr-defined]
            given, room = torch.ones(8), torch.zeros(8)
            reduced.append(comm.all_reduce(given))
            parcel = Parcel(b"", (room,))
            op = Parcels("rows", True)
            rows.append(submit(comm, Call(op, (), (), None, None, (parcel,), Shelf(), copies=((room.copy_, given),))))
            rooms.append(room)
            copied.append(weakref.ref(given.untyped_storage()))
        del given
        assert all(backend._in_flight.waiting for backend in backends)
        all_reduces.set()
        await until(lambda: not any(backend._in_flight.waiting for backend in backends))
        assert all(room.eq(2).all() for room in rooms)
        while reduced:
            await reduced.pop()  # without keeping it: it holds its result
        assert all(reference() is not None for reference in copied)
        copies.set()
        await asyncio.gather(*rows)
        await until(lambda: all(reference() is None for reference in copied))


# -- collectives ---------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("shared", [True, False])
async def test_collectives_of_every_form(world: World, events: list[SimulatedEvent], size: int, shared: bool) -> None:
    ranks: list[int | None] = [None, *range(size)]
    async with world(size) as comms:
        for giver, taker in itertools.product(ranks, ranks):
            op = Parcels("form", shared, giver, taker)

            def between(source: int, target: int) -> Parcel:
                return of(source, [8 + source, 10, 3 * source], b"" if shared else bytes([target] * 9))

            shelves = [Shelf() for _ in comms]
            works = []
            for comm, shelf in zip(comms, shelves, strict=True):
                mine = [between(comm.rank, 0)] if shared else [between(comm.rank, target) for target in range(size)]
                works.append(collective(comm, op, mine, shelf))
            await asyncio.gather(*works)
            for rank, shelf in enumerate(shelves):
                sources = [r for r in range(size) if r != rank and op.gives(r) and op.takes(rank)]
                parcels = {source: between(source, rank) for source in sources}
                lengths = {source: parcel.nbytes for source, parcel in parcels.items()}
                assert shelf.calls == [(source, parcel.head, lengths) for source, parcel in parcels.items()]
                assert all(torch.equal(shelf.got(r), joined(parcel.tensors)) for r, parcel in parcels.items())
            assert all(work.source is None for work in works)
    await until(lambda: all(event.released for event in events))


async def test_parcels_are_taken_while_nccl_waits_for_the_next_collective(world: World) -> None:
    """The other rank calls that only when it has seen its parcel taken."""
    async with world(2) as (early, late):
        op, parcel = Parcels("x"), of(0, [8])
        taken = collective(early, op, [parcel], Shelf())
        waiting = early.all_reduce(torch.ones(8))
        await until(lambda: "all_reduce" in backend_of(early).nccl.calls)
        await asyncio.gather(collective(late, op, [parcel], Shelf()), taken)
        assert not waiting.done()
        await asyncio.gather(late.all_reduce(torch.ones(8)), waiting)


@SIZES
async def test_one_that_has_nothing_to_give(world: World, size: int) -> None:
    async with world(size) as comms:
        for empty in range(size):
            parcels = [Parcel(b"", ()) if rank == empty else of(rank, [9, 10]) for rank in range(size)]
            shelves = [Shelf() for _ in comms]
            await asyncio.gather(
                *(
                    collective(comm, Parcels("all"), [parcels[comm.rank]], shelf)
                    for comm, shelf in zip(comms, shelves, strict=True)
                )
            )
            for rank, shelf in enumerate(shelves):
                assert [len(shelf.got(r)) for r in range(size) if r != rank] == [
                    parcels[r].nbytes for r in range(size) if r != rank
                ]


@SIZES
async def test_hundreds_in_flight(world: World, events: list[SimulatedEvent], size: int) -> None:
    choose = random.Random(size)
    async with world(size) as comms:
        works: list[Awaitable[Any]] = []
        checks: list[Callable[[], bool]] = []
        count = amount(240, 100) // size
        for i in range(count):
            lengths = [choose.choice([0, 1, 5, 64, 1000, 4001]) for _ in range(choose.randrange(4))]
            for comm in comms:
                peer = (comm.rank + i) % size
                works.append(send(comm, of(comm.rank, lengths, b"%d-" % i), peer, i % 3))
                source = (comm.rank - i) % size
                shelf = Shelf()
                works.append(recv(comm, shelf, source, i % 3))
                checks.append(partial(_came, shelf, source, of(source, lengths, b"%d-" % i)))
                tensor = torch.zeros(1 + i % 6)
                works.append(comm.send(torch.full((1 + i % 6,), comm.rank * 1000.0 + i), peer, i % 3))
                works.append(comm.recv(tensor, source, i % 3))
                checks.append(partial(_is, tensor, source * 1000.0 + i))
                if i % 4 == 0:
                    total = torch.full((6,), float(i))
                    works.append(comm.all_reduce(total))
                    checks.append(partial(_is, total, float(i * size)))
                    shelf = Shelf()
                    works.append(collective(comm, Parcels("all"), [of(comm.rank, lengths)], shelf))
                    checks += [
                        partial(_came, shelf, r, of(r, lengths), slice(None)) for r in range(size) if r != comm.rank
                    ]
        async with asyncio.timeout(60):
            await asyncio.gather(*works)
        assert all(check() for check in checks)
        assert all(comm.statistics().in_flight == 0 for comm in comms)
    await until(lambda: all(event.released for event in events))


def _came(shelf: Shelf, source: int, parcel: Parcel, calls: slice = slice(1)) -> bool:
    return any(call[:2] == (source, parcel.head) for call in shelf.calls[calls]) and torch.equal(
        joined([*shelf.tensors[source], torch.zeros(0)]), joined([*parcel.tensors, torch.zeros(0)])
    )


def _is(tensor: Tensor, value: float) -> bool:
    return bool(tensor.eq(value).all())


# -- messages ------------------------------------------------------------------------------------------------------


@SIZES
async def test_the_source_is_told_of_receives_alone(world: World, size: int) -> None:
    async with world(size) as comms:
        others: list[Any] = []
        receives: list[tuple[Any, int]] = []
        for comm in comms:
            peer, source = (comm.rank + 1) % size, (comm.rank - 1) % size
            for n in (8, 10, 0):
                others += [comm.send(torch.ones(n), peer), send(comm, of(comm.rank, [n]), peer)]
                others.append(collective(comm, Parcels("x", giver=0), [of(0, [n])], Shelf()))
                receives += [(comm.recv(torch.ones(n), source), source), (recv(comm, Shelf(), source), source)]
            others.append(comm.barrier())
        await asyncio.gather(*others, *(work for work, _ in receives))
        assert all(work.source is None for work in others)
        assert all(work.source == source for work, source in receives)


@SIZES
async def test_any_source(world: World, size: int) -> None:
    async with world(size) as comms:
        tensors = [torch.zeros(3) for _ in comms]
        shelves = [Shelf() for _ in comms]
        receives = [comms[0].recv(tensor, None, 3) for tensor in tensors]
        parcels = [recv(comms[0], shelf, None, 3) for shelf in shelves]
        sends = [comm.send(torch.full((3,), float(comm.rank)), 0, 3) for comm in comms]
        sends += [send(comm, of(comm.rank, [comm.rank + 6]), 0, 3) for comm in comms]
        await asyncio.gather(*receives, *parcels, *sends)
        assert sorted(str(work.source) for work in receives) == [str(rank) for rank in range(size)]
        assert all(_is(tensor, float(work.source or 0)) for tensor, work in zip(tensors, receives, strict=True))
        for shelf, parcel in zip(shelves, parcels, strict=True):
            assert parcel.source is not None
            assert _came(shelf, parcel.source, of(parcel.source, [parcel.source + 6]))


async def test_tags_and_channels_do_not_meet_and_wait_for_nobody(world: World) -> None:
    async with world(2) as (a, b):
        channels = [MessageSpace.OBJECTS, MessageSpace.STREAMS]
        sent: list[Any] = [a.send(torch.full((8,), float(tag)), 1, tag) for tag in (5, 3, 9)]
        sent += [send(a, of(0, [tag], b"%d" % channel), 1, tag, channel) for tag in (5, 8) for channel in channels]
        never = [b.recv(torch.ones(8), 0, 4), recv(b, Shelf(), 0, 4)]
        for tag in (9, 5, 3):
            tensor = torch.zeros(8)
            await b.recv(tensor, 0, tag)
            assert _is(tensor, float(tag))
        for channel in reversed(channels):
            for tag in (8, 5):
                await recv(b, shelf := Shelf(), 0, tag, channel)
                assert _came(shelf, 0, of(0, [tag], b"%d" % channel))
        await asyncio.gather(*sent)
        assert not any(work.done() for work in never)
        a.send(torch.ones(8), 1, 4)
        send(a, of(0, []), 1, 4)
        await asyncio.gather(*never)


async def test_messages_of_one_tag_keep_their_order(world: World) -> None:
    """Objects, dicts and parcels are of one kind, whatever they move."""
    async with world(2) as (a, b):
        dicts = [{"x": torch.full((8,), float(i)), "y": torch.full((10,), float(i))} for i in range(20)]
        for i, tensors in enumerate(dicts):
            a.send_object(("object", i), 1)
            a.send_tensor_dict(tensors, 1)
        for i, tensors in enumerate(dicts):
            assert await b.recv_object(0) == ("object", i)
            got = await b.recv_tensor_dict(0)
            assert all(torch.equal(got[key], tensor) for key, tensor in tensors.items())


async def test_one_giver_streams_while_another_waits(world: World) -> None:
    async with world(3) as comms:
        gate = threading.Event()
        user = SimulatedStream()
        user.put(gate.wait)
        backend_of(comms[0]).device.user = user  # type: ignore[assignment]
        late = [comms[0].send(torch.ones(8), 1), comms[1].recv(torch.ones(8), 0)]
        await asyncio.gather(
            comms[2].send(torch.ones(8), 1),
            comms[1].recv(torch.ones(8), 2),
            comms[1].send(torch.ones(8), 2, 1),
            comms[2].recv(torch.ones(8), 1, 1),
        )
        assert not any(work.done() for work in late)
        gate.set()
        await asyncio.gather(*late)


async def test_waiting_can_be_given_up(world: World) -> None:
    async with world(2) as (a, b):
        tensor, shelf = torch.zeros(8), Shelf()
        works: list[Any] = [b.recv(tensor, 0), recv(b, shelf, 0)]
        tasks = [asyncio.ensure_future(_result(work)) for work in works]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        sending = [asyncio.ensure_future(_result(work)) for work in (a.send(torch.ones(8), 1), send(a, of(0, [8]), 1))]
        await asyncio.sleep(0)
        for task in sending:
            task.cancel()
        await asyncio.gather(*works)
        assert _is(tensor, 1.0)
        assert _came(shelf, 0, of(0, [8]))
        await asyncio.gather(*sending, return_exceptions=True)


async def _result(work: Awaitable[Any]) -> Any:
    return await work


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(), (8,), (10,), (8, 10)], ids=str)
@pytest.mark.parametrize("source", [0, 1])
async def test_what_is_refused_is_not_moved_and_the_comm_goes_on(
    world: World, events: list[SimulatedEvent], lengths: tuple[int, ...], source: int
) -> None:
    async with world(2) as comms:
        giver, taker = comms[source], comms[1]
        works = [send(giver, of(source, lengths), 1) for _ in range(4)]
        with pytest.raises(PayloadError, match=f"rank {source} sent cannot be taken: ValueError: no room"):
            await recv(taker, refusing(ValueError("no room")), source)
        with pytest.raises(PayloadError, match="mine"):
            await recv(taker, refusing(PayloadError("mine")), source)
        with pytest.raises(PayloadError, match=f"rank {source} sent {sum(lengths)} bytes where {sum(lengths) + 3} fit"):
            await recv(taker, cut([sum(lengths) + 3]), source)
        await asyncio.gather(*works[:3])
        assert not any({"send", "recv"} & set(backend_of(comm).nccl.calls) for comm in comms)
        await recv(taker, shelf := Shelf(), source)
        assert _came(shelf, source, of(source, lengths))
        await works[3]
        await asyncio.gather(*(comm.barrier() for comm in comms))
    await until(lambda: all(event.released for event in events))


@pytest.mark.parametrize("size", some([3, 2, 4], 1))
async def test_refused_from_one_rank_in_a_collective(world: World, events: list[SimulatedEvent], size: int) -> None:
    class Picky(Shelf):
        def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
            if source == size - 1:
                raise ValueError("not from you")
            return super().__call__(source, head, lengths)

    async with world(size) as comms:
        for lengths in ([8, 10], [10], [8]):
            shelves = [Picky() if comm.rank == 0 else Shelf() for comm in comms]
            works = [
                collective(comm, Parcels("x"), [of(comm.rank, lengths)], shelf)
                for comm, shelf in zip(comms, shelves, strict=True)
            ]
            with pytest.raises(PayloadError, match=f"rank {size - 1} sent cannot be taken: ValueError: not from you"):
                await works[0]
            await asyncio.gather(*works[1:])
            for rank in range(1, size):
                assert all(_came(shelves[rank], r, of(r, lengths), slice(None)) for r in range(size) if r != rank)
        await asyncio.gather(*(comm.all_reduce(torch.ones(4)) for comm in comms))
    await until(lambda: all(event.released for event in events))


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("lengths", [(), (8,), (10,)], ids=str)
async def test_a_place_may_break_the_comm(world: World, lengths: tuple[int, ...]) -> None:
    async with world(2, timeout=20) as (giver, taker):
        sent = send(giver, of(0, lengths), 1)
        with pytest.raises(BackendError, match="no memory left"):
            await recv(taker, refusing(BackendError("no memory left")), 0)
        if lengths == (8,):
            with pytest.raises(BrokenError, match="no memory left"):
                await sent
        with pytest.raises(BrokenError, match="no memory left"):
            await giver.recv(torch.ones(3), 1)


# -- what does not fit ---------------------------------------------------------------------------------------------

MISFITS = [
    (torch.ones(8), torch.ones(9), r"send\(float32\[8\].*recv\(float32\[9\]"),
    (torch.ones(9), torch.ones(8), r"send\(float32\[9\].*recv\(float32\[8\]"),
    (torch.ones(0), torch.ones(8), r"send\(float32\[0\].*recv\(float32\[8\]"),
    (torch.ones(8), torch.ones(0), r"send\(float32\[8\].*recv\(float32\[0\]"),
    (torch.ones(8), torch.ones(8, dtype=torch.int32), r"send\(float32\[8\].*recv\(int32\[8\]"),
]


@pytest.mark.parametrize(("sent", "expected", "message"), MISFITS)
async def test_messages_that_differ_are_named_on_both_ranks(
    world: World, sent: Tensor, expected: Tensor, message: str
) -> None:
    async with world(2, timeout=20) as (giver, taker):
        work = giver.send(sent, 1)
        with pytest.raises(CollectiveMismatchError, match=message) as found:
            await taker.recv(expected, 0)
        assert (found.value.rank, found.value.other_rank) == (0, 1)
        if sent.numel():
            with pytest.raises(CollectiveMismatchError, match=message):
                await work
        with pytest.raises(CollectiveMismatchError, match=message):
            await giver.recv(torch.ones(4), 1)


async def test_a_mismatch_with_oneself(world: World) -> None:
    async with world(1, timeout=20) as (comm,):
        comm.send(torch.ones(8), 0)
        with pytest.raises(CollectiveMismatchError, match=r"send\(float32\[8\].*recv\(float32\[4\]"):
            await comm.recv(torch.ones(4), 0)


async def test_collectives_that_differ(world: World) -> None:
    async with world(2, timeout=20) as comms:
        works = [collective(comm, Parcels(f"of rank {comm.rank}"), [of(0, [8])], Shelf()) for comm in comms]
        for work in works:
            with pytest.raises(BrokenError, match=r"of rank 0.*of rank 1"):
                await work


def raw(comm: Comm, head: bytes, peer: int, channel: MessageSpace, tensors: tuple[Tensor, ...] = ()) -> None:
    """A message that no Messenger would send."""
    call = Call(SendParcel("raw", peer, 0, channel), (), (), None, parcels=(Parcel(head, tensors),))
    backend_of(comm)._side.submit(call, lambda error: None)


HEAD = struct.Struct("<QI")
GARBAGE = {
    "nothing": b"",
    "short": b"12345",
    "fewer segments than it says": HEAD.pack(0, 3) + bytes(8),
    "a part of a segment": HEAD.pack(0, 1) + bytes(5),
    "a segment that did not come along": HEAD.pack(0, 1) + struct.pack("<Q", 16),
}


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize(("kind", "head"), some(list(itertools.product(["send", "parcel", "collective"], GARBAGE)), 8))
async def test_heads_that_are_garbage(world: World, kind: str, head: str) -> None:
    async with world(2, timeout=20) as (giver, taker):
        if kind == "send":
            raw(giver, GARBAGE[head], 1, MessageSpace.HEADERS)
            work: Any = taker.recv(torch.ones(8), 0)
        elif kind == "parcel":
            raw(giver, GARBAGE[head], 1, MessageSpace.OBJECTS)
            work = recv(taker, Shelf(), 0)
        else:
            call = Call(Parcels("x", giver=0), (), (), None, parcels=(Parcel(GARBAGE[head], ()),))
            backend_of(giver)._side.submit(call, lambda error: None)
            work = collective(taker, Parcels("x", giver=0), [], Shelf())
        with pytest.raises(BackendError, match="rank 0 sent a head that"):
            await work
        with pytest.raises(BrokenError, match="rank 0 sent a head that"):
            await giver.recv(torch.ones(1), 1)


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("own", [b"", b"12345", struct.pack("<IQQ", 77, 8, 0)])
async def test_messages_that_are_garbage(world: World, own: bytes) -> None:
    async with world(2, timeout=20) as (giver, taker):
        raw(giver, HEAD.pack(0, 0) + own, 1, MessageSpace.HEADERS)
        with pytest.raises(BackendError, match=r"nccl could not take a message: (error|KeyError)"):
            await taker.recv(torch.ones(8), 0)
        with pytest.raises(BrokenError, match="could not take a message"):
            await giver.recv(torch.ones(1), 1)


async def test_a_segment_on_the_device_that_was_never_offered(world: World) -> None:
    async with world(2, timeout=20) as (giver, taker):
        raw(giver, HEAD.pack(4, 1) + struct.pack("<Q", 8 << 1 | 1), 1, MessageSpace.OBJECTS)
        # waits for ever, as it would for a device that hangs; its deadline ends it
        work = recv(taker, Shelf(), 0)
        await until(lambda: backend_of(taker).nccl.calls.count("init") == 2)
        assert not work.done()
        taker.abort("enough")
        with pytest.raises(AbortedError):
            await work
        group = backend_of(taker).nccl.groups[max(backend_of(taker).nccl.groups)]
        with group.lock:  # lets go of the thread that still connects
            group.joined.add(0)
            group.lock.notify_all()


@pytest.mark.usefixtures("unexplained")
async def test_a_device_that_fails_at_the_last_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is on the poller's thread, where torch raises RuntimeError, whatever CUDA says."""
    async with world(2, timeout=20) as (giver, taker):

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("CUDA error: out of memory")

        stream = backend_of(taker)._messenger._for_messages
        monkeypatch.setattr(stream, "run", fail)
        send(giver, of(0, [8]), 1)
        with pytest.raises(BackendError, match="out of memory"):
            await recv(taker, Shelf(), 0)
        with pytest.raises(BrokenError, match="out of memory"):
            await giver.recv(torch.ones(1), 1)


# -- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["message", "parcel", "any source"])
async def test_closing_with_receives_that_nobody_answers(world: World, what: str) -> None:
    async with world(2, timeout=20) as (comm, _):
        comm.set_timeout(0.3)
        if what == "message":
            work: Any = comm.recv(torch.ones(8), 1)
        else:
            work = recv(comm, Shelf(), 1 if what == "parcel" else None)
        closing = asyncio.ensure_future(comm.aclose())
        with pytest.raises(BrokenError, match="not finished after"):
            await work
        await closing


async def test_abort_in_the_middle(world: World, events: list[SimulatedEvent]) -> None:
    choose = random.Random(1)
    for turn in some(range(10), 2):
        async with world(3, timeout=20) as comms:
            works: list[Any] = []
            for i in range(30):
                lengths = [choose.choice([8, 10, 3001]) for _ in range(3)]
                for comm in comms:
                    peer, source = (comm.rank + 1) % 3, (comm.rank - 1) % 3
                    works += [send(comm, of(comm.rank, lengths), peer), recv(comm, Shelf(), source)]
                    works += [comm.send(torch.ones(8), peer), comm.recv(torch.ones(8), source)]
                    if i % 5 == 0:
                        works.append(collective(comm, Parcels("x"), [of(comm.rank, lengths)], Shelf()))
            await asyncio.gather(*works[: turn * 6])
            comms[turn % 3].abort("enough")
            outcomes = await asyncio.gather(*works, return_exceptions=True)
            assert all(outcome is None or isinstance(outcome, (Tensor, AbortedError)) for outcome in outcomes)
