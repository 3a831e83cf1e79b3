"""Long data over sockets of our own: groups of several ranks in one process, and comms of real processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import AbortedError, BrokenError, Comm, ReduceOp, new_comm
from asynccomm.backends.gloo import streams
from asynccomm.backends.gloo.backend import GlooBackend
from asynccomm.backends.gloo.endpoint import Contact, Endpoint
from asynccomm.backends.gloo.groups import TransferGroups
from asynccomm.backends.gloo.streams import StreamGroup, StreamSockets, StreamWork
from asynccomm.testing.conformance.data import reduced
from tests.sampling import some

pytestmark = pytest.mark.skipif(not streams.available(), reason="the module in C was not built")

PIECE = 64 << 10  # bytes, as in _streams.c
NUMELS = (0, 1, 2, 5, PIECE // 4 - 1, PIECE + 3)
LITTLE = 4096  # bytes of a socket's buffer: most system calls then move a part of what they could


class Pairs:
    """In place of ``StreamSockets``: the sockets of one rank, from socketpairs."""

    def __init__(self) -> None:
        self.sinks: dict[int, socket.socket] = {}  # by peer
        self.sources: dict[int, socket.socket] = {}

    def all(self) -> list[socket.socket]:
        return [*self.sinks.values(), *self.sources.values()]

    def descriptors(self, sinks: Sequence[int], sources: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        to, back = ({peer: each[peer].fileno() for peer in peers} for each, peers in self._asked(sinks, sources))
        return to, back

    def _asked(
        self, sinks: Sequence[int], sources: Sequence[int]
    ) -> list[tuple[dict[int, socket.socket], Sequence[int]]]:
        return [(self.sinks, sinks), (self.sources, sources)]

    def end(self) -> None:
        for sock in self.all():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self.all():
            sock.close()


class World:
    """The groups of all ranks."""

    def __init__(self, size: int, buffer: int = 0) -> None:
        self.size = size
        self.pairs = [Pairs() for _ in range(size)]
        for sender, receiver in itertools.permutations(range(size), 2):
            sink, source = socket.socketpair()
            if buffer:
                sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
            self.pairs[sender].sinks[receiver], self.pairs[receiver].sources[sender] = sink, source
        self.groups = [StreamGroup(rank, size, self.pairs[rank], f"rank {rank}") for rank in range(size)]  # type: ignore[arg-type]

    def run(self, call: Callable[[StreamGroup, int], StreamWork]) -> None:
        """Have each rank make its call, in any order, and wait for all."""
        works = [call(self.groups[rank], rank) for rank in random.sample(range(self.size), self.size)]
        for work in works:
            result(work)

    def close(self) -> None:
        for group in self.groups:
            group.close(20)


def result(work: StreamWork, seconds: float = 20) -> None:
    over = threading.Event()
    work.get_future().add_done_callback(lambda _: over.set())
    assert over.wait(seconds), "the collective does not end"
    work.value()


@pytest.fixture(params=[(2, 0), (3, 0), (4, LITTLE)], ids=["2", "3", "4, small buffers"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(*request.param)
    yield world
    world.close()


def data(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize("kind", ["SUM", "PRODUCT", "MIN", "MAX", "BOR"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64])
def test_all_reduce_and_reduce(world: World, dtype: torch.dtype, kind: str) -> None:
    op: ReduceOp = getattr(ReduceOp, kind)
    if kind == "BOR" and dtype.is_floating_point:
        pytest.skip("floats have no bits")
    for numel in NUMELS:
        inputs = [data(rank, numel, dtype) for rank in range(world.size)]
        expected = reduced(inputs, op)
        outputs = [tensor.clone() for tensor in inputs]
        world.run(lambda group, rank, outputs=outputs: group.all_reduce(outputs[rank], op))
        for output in outputs:
            assert torch.equal(output, outputs[0]), numel
            torch.testing.assert_close(output, expected)  # more than two ranks add in another order
        root = numel % world.size
        outputs = [tensor.clone() for tensor in inputs]
        world.run(lambda group, rank, outputs=outputs, root=root: group.reduce(outputs[rank], root, op))
        torch.testing.assert_close(outputs[root], expected)


def test_nan_is_kept_and_bools_are_combined(world: World) -> None:
    for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
        for holder in some(range(world.size), 2):
            tensors = [torch.zeros(3 * PIECE) for _ in range(world.size)]
            tensors[holder][::7] = torch.nan
            world.run(lambda group, rank, tensors=tensors, op=op: group.all_reduce(tensors[rank], op))
            for tensor in tensors:
                assert tensor[::7].isnan().all()
                assert not tensor[1::7].any()
    for op, expected in ((ReduceOp.SUM, 1), (ReduceOp.PRODUCT, 0)):
        tensors = [torch.full((9,), int(rank == 1), dtype=torch.uint8) for rank in range(world.size)]
        world.run(lambda group, rank, tensors=tensors, op=op: group.all_reduce(tensors[rank], op, bools=True))
        assert all(tensor.tolist() == [expected] * 9 for tensor in tensors)


def test_averages_and_factors_are_the_callers() -> None:
    group = StreamGroup(0, 2, Pairs(), "unused")  # type: ignore[arg-type]
    assert group.is_native(torch.bfloat16, ReduceOp.MIN)
    assert not group.is_native(torch.float32, ReduceOp.AVG)
    assert not group.is_native(torch.float32, ReduceOp.PREMUL_SUM(2.0))
    assert not group.is_native(torch.int16, ReduceOp.SUM)


def test_data_that_is_moved(world: World) -> None:
    size = world.size
    for numel in NUMELS:
        inputs = [data(rank, numel, torch.float32) for rank in range(size)]
        for root in range(size):
            outputs = [inputs[root].clone() if rank == root else torch.empty(numel) for rank in range(size)]
            world.run(lambda group, rank, outputs=outputs, root=root: group.broadcast(outputs[rank], root))
            assert all(torch.equal(output, inputs[root]) for output in outputs)
        lists = [[torch.empty(numel) for _ in range(size)] for _ in range(size)]
        world.run(lambda group, rank, lists=lists, inputs=inputs: group.all_gather(lists[rank], inputs[rank]))
        assert all(torch.equal(torch.cat(outputs), torch.cat(inputs)) for outputs in lists)
        whole = [torch.empty(size * numel) for _ in range(size)]
        whole[0][:numel] = inputs[0]
        first = [whole[0][:numel], *inputs[1:]]  # rank 0 has its input where its part of the output is
        world.run(lambda group, rank, whole=whole, first=first: group.all_gather_single(whole[rank], first[rank]))
        assert all(torch.equal(output, torch.cat(inputs)) for output in whole)
        exchanged = [torch.empty(size * numel) for _ in range(size)]
        world.run(lambda group, rank, a=exchanged, b=whole: group.all_to_all_single(a[rank], b[rank]))
        for rank, output in enumerate(exchanged):
            assert torch.equal(output, inputs[rank].repeat(size))
        root = numel % size
        gathered = [torch.empty(numel) for _ in range(size)]

        def gather(group: StreamGroup, rank: int) -> StreamWork:
            return group.gather(gathered if rank == root else [], inputs[rank], root)  # noqa: B023

        world.run(gather)
        assert torch.equal(torch.cat(gathered), torch.cat(inputs))
        scattered = [torch.empty(numel) for _ in range(size)]

        def scatter(group: StreamGroup, rank: int) -> StreamWork:
            return group.scatter(scattered[rank], inputs if rank == root else [], root)  # noqa: B023

        world.run(scatter)
        assert torch.equal(torch.cat(scattered), torch.cat(inputs))


def test_uneven_chunks_and_a_barrier(world: World) -> None:
    size = world.size
    counts = [[(3 * giver + 5 * taker) % 7 * 5000 for taker in range(size)] for giver in range(size)]
    inputs = [data(rank, sum(counts[rank]), torch.int32) for rank in range(size)]
    outputs = [torch.empty(sum(row[rank] for row in counts), dtype=torch.int32) for rank in range(size)]

    def exchange(group: StreamGroup, rank: int) -> StreamWork:
        receives = [row[rank] for row in counts]
        return group.all_to_all_single(outputs[rank], inputs[rank], receives, counts[rank])

    world.run(exchange)
    for rank, output in enumerate(outputs):
        parts = [inputs[giver].split(counts[giver])[rank] for giver in range(size)]
        assert torch.equal(output, torch.cat(parts))
    waiting = [world.groups[rank].barrier() for rank in range(size - 1)]
    assert not any(work._over for work in waiting)
    for work in [*waiting, world.groups[size - 1].barrier()]:
        result(work)


def test_collectives_end_in_order_and_callbacks_run_between_them() -> None:
    world = World(2)
    events: list[str] = []
    tensors = [[torch.ones(PIECE) for _ in range(3)] for _ in range(2)]
    works = [world.groups[0].all_reduce(tensor, ReduceOp.SUM) for tensor in tensors[0]]
    ended = threading.Event()
    for number, work in enumerate(works):

        def over(_: object, number: int = number) -> None:
            later = [tensor[0].item() for tensor in tensors[0][number + 1 :]]
            events.append(f"{number}: {later}")  # the memory of later ones is untouched
            if number == 2:
                ended.set()

        work.get_future().add_done_callback(over)
    for tensor in tensors[1]:
        result(world.groups[1].all_reduce(tensor, ReduceOp.SUM))
    assert ended.wait(20)
    assert events == ["0: [1.0, 1.0]", "1: [1.0]", "2: []"]
    world.close()


def test_the_end_of_a_rank_fails_all_collectives_and_names_the_rank() -> None:
    world = World(3)
    works = [world.groups[0].all_reduce(torch.ones(PIECE), ReduceOp.SUM) for _ in range(2)]
    world.pairs[2].end()
    for work in works:
        with pytest.raises(RuntimeError, match="rank 2: its connection ended"):
            result(work)
    with pytest.raises(RuntimeError, match="rank 2: its connection ended"):
        result(world.groups[0].barrier())
    world.close()


@pytest.mark.parametrize("call", ["abort", "close"])
def test_an_abort_ends_a_collective_that_waits(call: str) -> None:
    world = World(2)
    work = world.groups[0].all_reduce(torch.ones(PIECE), ReduceOp.SUM)
    if call == "abort":
        world.groups[0].abort()
        with pytest.raises(RuntimeError, match="rank 1: its connection ended"):
            result(work)
    world.groups[0].close(20)
    with pytest.raises(RuntimeError):
        result(work)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(world.pairs[0].sinks[1].fileno())
    world.groups[1].close(20)


@pytest.mark.parametrize(
    "arguments",
    [
        ([0], [0], b"", 0, 0, 0, 0, -1, -1, 0),  # no segments
        ([0], [], bytes(64), 0, 0, 0, 0, -1, -1, 0),  # no source
        ([], [], b"", 1, 0, 0, 0, -1, -1, 0),  # no such rank
        ([], [], b"", 0, 0, 0, 0, 0, -1, 0),  # no such stream
        ([], [], b"", 0, 0, 0, 0, -1, 99, 0),  # no such dtype
        ([], [], b"", 0, 0, 0, 0, -1, 0, 4),  # no bits of floats
        ([], [], b"", 0, 0, 3, 0, -1, 0, 0),  # no whole elements
        ([0], [0], bytes(64), 0, 0, 4, 0, -1, 0, 0),  # no contribution
    ],
)
def test_segments_that_cannot_be(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"streams|contribution"):
        streams._core.move(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        (b"", 0, 0, 0),  # no ranks
        (bytes(15), 0, 0, 0),
        (bytes(16), 2, 0, 0),  # no such rank
        (bytes(16), 0, -1, 0),  # no such dtype
        (bytes(16), 0, 0, 4),  # no bits of floats
    ],
)
def test_rings_that_cannot_be(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="kernel"):
        streams._core.ring(0, 0, 0, *arguments)


# -- the sockets -------------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoints() -> Iterator[list[Endpoint]]:
    made = [Endpoint(rank, 3, "127.0.0.1", f"test-streams-{rank}", streams=True) for rank in range(3)]
    yield made
    for endpoint in made:
        endpoint.close()
        endpoint.join(5)


def serve(endpoints: Sequence[Endpoint]) -> None:
    contacts = [Contact.unpack(endpoint.contact.pack()) for endpoint in endpoints]
    assert all(contact.streams for contact in contacts)
    for endpoint in endpoints:
        endpoint.start(contacts, lambda *_: None, lambda *_: None, lambda: None)


def test_ranks_connect_at_the_first_use_and_channels_are_apart(endpoints: list[Endpoint]) -> None:
    pairs = [(rank, channel) for rank in range(3) for channel in (1, 2)]
    sockets = {pair: StreamSockets(pair[0], 3, endpoints[pair[0]], pair[1]) for pair in pairs}
    serve(endpoints)
    groups = {pair: StreamGroup(pair[0], 3, sockets[pair], f"test {pair}") for pair in pairs}
    tensors = {pair: torch.full((5,), 10.0 * pair[1] + pair[0]) for pair in pairs}
    for work in [groups[pair].all_reduce(tensors[pair], ReduceOp.SUM) for pair in reversed(pairs)]:
        result(work)
    assert {pair: tensor[0].item() for pair, tensor in tensors.items()} == {pair: 30.0 * pair[1] + 3 for pair in pairs}
    for group in groups.values():
        group.close(20)
    assert not any(each._all() for each in sockets.values())


def test_a_rank_that_waits_for_others_to_connect_can_be_aborted(endpoints: list[Endpoint]) -> None:
    sockets = [StreamSockets(rank, 3, endpoint, 1) for rank, endpoint in enumerate(endpoints)]
    serve(endpoints)
    group = StreamGroup(1, 3, sockets[1], "test")
    work = group.barrier()  # ranks 0 and 2 accept, and never connect
    while not sockets[2]._sources:
        os.sched_yield()
    group.abort()
    with pytest.raises(RuntimeError, match="the group has ended"):
        result(work)
    group.close(20)
    for each in sockets:
        each.end()
        each.close()


def test_a_group_that_was_closed_uses_no_descriptor(endpoints: list[Endpoint]) -> None:
    sockets = [StreamSockets(rank, 3, endpoint, 1) for rank, endpoint in enumerate(endpoints)]
    serve(endpoints)
    groups = [StreamGroup(rank, 3, each, f"test {rank}") for rank, each in enumerate(sockets)]
    for work in [group.all_reduce(torch.ones(5), ReduceOp.SUM) for group in groups]:
        result(work)
    assert [len(each._all()) for each in sockets] == [2, 2, 2], "a ring needs its neighbours only"
    for group in groups:
        group.close(20)
    for group in groups:  # a thread may be about to start one
        with pytest.raises(RuntimeError, match="the group has ended"):
            result(group.all_reduce(torch.ones(5), ReduceOp.SUM))


def test_a_connection_for_no_channel_or_of_an_impossible_rank_is_refused(endpoints: list[Endpoint]) -> None:
    StreamSockets(1, 3, endpoints[1], 1)
    serve(endpoints)
    endpoints[2]._rank = 3  # of 3 ranks
    for rank, channel in ((0, 2), (2, 1)):
        adopted: list[socket.socket] = []
        endpoints[rank].connect_channel(1, channel, adopted.append)
        assert not adopted[0].recv(1)
        adopted[0].close()


def test_data_ahead_of_the_answer_is_refused(endpoints: list[Endpoint]) -> None:
    StreamSockets(1, 3, endpoints[1], 1)
    serve(endpoints)
    contact = endpoints[1].contact
    with socket.create_connection((contact.address, contact.port)) as sock:
        sock.sendall(contact.token + (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"early")
        with contextlib.suppress(ConnectionResetError):
            assert not sock.recv(1)


# -- comms -------------------------------------------------------------------------------------------------------------


def moves(comm: Comm) -> list[object]:
    """The collectives that the comm's groups carry out, from now on."""
    seen: list[object] = []
    for group in comm.unsafe_get_backend()._streams:  # type: ignore[attr-defined]

        def noted(plan: object, work: object, carry_out: Any = group._carry_out) -> None:
            seen.append(plan)
            carry_out(plan, work)

        group._carry_out = noted
    return seen


@pytest.mark.ranks(2)
async def test_long_collectives_use_the_streams() -> None:
    async with new_comm("gloo", name="long") as comm:
        seen = moves(comm)
        backend = comm.unsafe_get_backend()
        assert isinstance(backend, GlooBackend)
        assert not backend._streams[0]._sockets._all()
        assert backend._gloos is not None
        assert backend._gloos.large is None
        tensors = [torch.full((n,), float(comm.rank)) for n in (300_000, 2_000_000)]
        for tensor in tensors:
            await comm.all_reduce(tensor)
            assert tensor.eq(1).all()
        assert len(seen) == 2
        await comm.all_reduce(torch.ones(3))
        assert len(seen) == 2


@pytest.mark.parametrize("without", ["hint", "C"])
@pytest.mark.ranks(2)
async def test_one_rank_without_streams_leaves_all_to_gloo(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = int(os.environ["RANK"])
    if without == "C" and rank == 0:
        monkeypatch.setattr("asynccomm.backends.gloo.backend.available", lambda: False)
    hints = {"streams": "0"} if without == "hint" and rank == 0 else {}
    async with new_comm("gloo", name="mixed", hints=hints) as comm:
        backend = comm.unsafe_get_backend()
        assert isinstance(backend, GlooBackend)
        assert not backend._streams
        assert backend._gloos is not None
        assert backend.collectives._groups == TransferGroups(backend._gloos.small, backend._gloos.large)
        for n in (300_000, 1_500_000):
            tensor = torch.full((n,), float(comm.rank))
            await comm.all_reduce(tensor)
            assert tensor.eq(1).all()


def laid_out(values: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """An input with ``values``, and the output of its all_reduce."""
    if layout == "strided":
        tensor = torch.empty(2 * len(values), dtype=values.dtype)[::2].copy_(values)
        return tensor, tensor
    if layout == "apart":
        return values.clone(), torch.zeros(2, len(values) // 2, dtype=values.dtype)
    if layout == "apart and strided":
        return values.clone(), torch.zeros(len(values), 3, dtype=values.dtype)[:, 1]
    tensor = values.clone()
    return tensor, tensor


@pytest.mark.parametrize("numel", some([300_000, 1_500_000], 1))
@pytest.mark.ranks(some([3, 2], 1))
async def test_ranks_with_tensors_of_other_layouts_send_the_same_dtype(numel: int, comm: Comm) -> None:
    layouts = ["plain", "strided", "apart", "apart and strided"]
    async with new_comm("gloo", name="layouts", timeout=60) as own:
        seen = moves(own)
        for dtype in some((torch.bfloat16, torch.float32, torch.float64, torch.int16), 3):
            inputs = [data(rank, numel, dtype) for rank in range(own.size)]
            for op in some((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG), 2):
                expected = reduced(inputs, op)
                for k in range(len(layouts)):
                    source, output = laid_out(inputs[own.rank], layouts[(own.rank + k) % len(layouts)])
                    await own.all_reduce(source, op=op, out=None if output is source else output)
                    if op == ReduceOp.MAX or not dtype.is_floating_point:
                        assert torch.equal(output.reshape(-1), expected), (dtype, op, k)
                    else:
                        torch.testing.assert_close(output.reshape(-1), expected)
                    if source is not output:
                        assert torch.equal(source, inputs[own.rank]), "inputs are never changed"
        assert seen


@pytest.mark.ranks(2)
async def test_an_abort_in_the_middle_of_long_data_reaches_both_ranks() -> None:
    async with new_comm("gloo", name="cut", timeout=60) as comm:
        await comm.all_reduce(torch.ones(300_000))
        if comm.rank == 0:
            work = comm.all_reduce(torch.ones(300_000))
            await asyncio.sleep(0)
            comm.abort("enough")
            with pytest.raises(AbortedError):
                await work
        else:
            with pytest.raises(BrokenError):
                await comm.all_reduce(torch.ones(300_000))
                await comm.all_reduce(torch.ones(300_000))


def test_the_hint_is_checked() -> None:
    from asynccomm.backends.gloo.backend import GlooBackend

    with pytest.raises(ValueError, match="hint 'streams' must be 0 or 1, got 'no'"):
        GlooBackend.check_hints({"streams": "no"})
