"""The exchange of frames over sockets: in order, whatever the threads, and with an end."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from asynccomm import BackendError, Comm, new_comm
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.frame_exchange import FrameExchange
from asynccomm.backends.gloo.frames import Frame, heading_of
from asynccomm.backends.gloo.links import MessageLink
from asynccomm.ops import AllReduce
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.sampling import amount, some

SIZE = 3


def frame_of(rank: int, place: int, n: int = 3) -> Frame:
    work: Any = type("Numbered", (), {"seq": place})
    group = CommInfo("t", rank, SIZE, torch.device("cpu"))
    submission = Submission(AllReduce.of(group, torch.full((n,), float(rank)), ReduceOp.SUM), work)
    frame = Frame(rank, SIZE)
    frame.fill(submission, place, heading_of(submission))
    return frame


def test_an_exchange_is_over_when_all_frames_are_there_and_exchanges_end_in_order() -> None:
    exchange = FrameExchange(0, SIZE)
    over: list[tuple[int, Exception | None]] = []
    frames = [frame_of(0, place) for place in range(2)]
    exchange.arrived(1, frame_of(1, 0).packed(0))  # ahead of this rank
    for place, frame in enumerate(frames):
        exchange.begin(frame, lambda error, place=place: over.append((place, error)))
    exchange.arrived(1, frame_of(1, 1).packed(0))
    exchange.arrived(2, frame_of(2, 0).packed(0))
    assert not over, "reported by settle() alone"
    exchange.settle()
    assert over == [(0, None)]
    exchange.arrived(2, frame_of(2, 1).packed(0))
    exchange.settle()
    assert over == [(0, None), (1, None)]
    for frame in frames:
        given, _ = frame.given()
        assert given is not None
        assert [list(memoryview(each).cast("f")) for each in given] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
        assert frame.differing() is None


def test_the_end_of_a_rank_fails_the_exchanges_that_lack_its_frame() -> None:
    exchange = FrameExchange(0, SIZE)
    over: list[Exception | None] = []
    for place in range(2):
        exchange.begin(frame_of(0, place), over.append)
    exchange.arrived(1, frame_of(1, 0).packed(0))
    exchange.arrived(2, frame_of(2, 0).packed(0))
    exchange.gone(2, "it is away")
    exchange.settle()
    assert over[0] is None
    assert isinstance(over[1], BackendError)
    assert str(over[1]) == "rank 2: it is away"
    exchange.begin(frame_of(0, 2), over.append)
    exchange.settle()
    assert isinstance(over[2], BackendError)


@pytest.mark.parametrize("length", [0, 10, 63, 65, 75, 5000])
def test_a_frame_of_another_length_than_it_says_is_an_error(length: int) -> None:
    exchange = FrameExchange(0, 2)
    over: list[Exception | None] = []
    exchange.begin(frame_of(0, 0), over.append)
    exchange.arrived(1, frame_of(1, 0).packed(0).ljust(5000, b"\0")[:length])
    exchange.settle()
    assert "rank 1 sent a frame that cannot be" in str(over[0])


def test_one_thread_reports_and_none_is_left_out() -> None:
    exchange = FrameExchange(0, SIZE)
    over: list[int] = []
    at_once: list[bool] = []
    reporting = threading.Lock()

    def report(place: int) -> None:
        at_once.append(not reporting.acquire(blocking=False))
        over.append(place)
        exchange.settle()  # as from inside of a callback
        reporting.release()

    count = 300
    for place in range(count):
        exchange.begin(frame_of(0, place), lambda _, place=place: report(place))
    packed = {rank: frame_of(rank, 0).packed(0) for rank in (1, 2)}
    lock = threading.Lock()

    def peer(rank: int) -> None:
        for _ in range(count):
            with lock:
                exchange.arrived(rank, packed[rank])
            exchange.settle()

    threads = [threading.Thread(target=peer, args=[rank]) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert over == [*range(count)]
    assert not any(at_once)


@pytest.mark.ranks(some([3, 2], 1), backend="gloo")
async def test_a_rank_may_run_ahead_with_short_collectives(comm: Comm) -> None:
    count = amount(2000, 1000)
    async with new_comm("gloo", name="ahead", timeout=30) as other:
        if comm.rank == 0:
            works = [other.broadcast(torch.full((2,), float(i)), 0) for i in range(count)]
            await comm.barrier()
        else:
            await comm.barrier()
            works = [other.broadcast(torch.zeros(2), 0) for _ in range(count)]
        for i, work in enumerate(works):
            assert (await work).eq(i).all()


def test_reports_of_another_thread_are_waited_for() -> None:
    exchange = FrameExchange(0, SIZE)
    began, goes_on, order = threading.Event(), threading.Event(), []

    def report(error: Exception | None) -> None:
        began.set()
        assert goes_on.wait(20)
        order.append("reported")
        exchange.finish_reports(20)  # the reporter itself does not wait

    exchange.begin(frame_of(0, 0), report)
    for peer in (1, 2):
        exchange.arrived(peer, frame_of(peer, 0).packed(0))
    reporter = threading.Thread(target=exchange.settle)
    reporter.start()
    assert began.wait(20)
    exchange.finish_reports(0)  # gives up at once
    assert not order
    waiter = threading.Thread(target=lambda: (exchange.finish_reports(20), order.append("waited")))
    waiter.start()
    goes_on.set()
    for thread in (reporter, waiter):
        thread.join(20)
    assert order == ["reported", "waited"]


def test_an_exchange_is_not_over_before_the_sockets_have_taken_its_frames() -> None:
    """The process may end right behind a collective, and the data that it still holds with it."""
    exchange = FrameExchange(0, SIZE)
    links: dict[int, Any] = {}
    for peer in (1, 2):
        here, there = socket.socketpair()
        here.setblocking(False)
        links[peer] = MessageLink(here, peer, outbound=True, arrived=lambda link, header: None)
        links[peer].there = there
    full = links[1]
    full.put(bytes(8))  # as a connection that is not there yet

    class Sockets:
        lock = threading.Lock()
        link_to = staticmethod(links.__getitem__)

        def send(self, link: MessageLink, data: bytes) -> None:
            link.send(data)

    sockets: Any = Sockets()
    exchange.open(sockets)
    over: list[Exception | None] = []
    for place in range(2):
        exchange.begin(frame_of(0, place), over.append)
        for peer in (1, 2):
            exchange.arrived(peer, frame_of(peer, place).packed(0))
    full.put(b"a message, which has to wait behind the frames")
    exchange.settle()
    assert not over
    full.write()
    exchange.settle()
    assert over == [None, None]
    full.put(bytes(8))
    exchange.begin(frame_of(0, 2), over.append)
    for peer in (1, 2):
        exchange.arrived(peer, frame_of(peer, 2).packed(0))
    exchange.gone(1, "it is away")  # nothing to send there any more
    exchange.settle()
    assert over == [None, None, None]
    for link in links.values():
        link.sock.close()
        link.there.close()


@pytest.mark.ranks(2, backend="gloo")
async def test_messages_behind_frames_that_the_sockets_have_not_taken(comm: Comm) -> None:
    """A receiver that is late fills the sockets, so messages queue up behind frames."""
    tensors = [torch.full((1 << 17,), float(comm.rank + 1)) for _ in range(12)]
    received = [torch.zeros(1) for _ in range(4)]
    works = []
    for i, tensor in enumerate(tensors):
        works.append(comm.all_reduce(tensor))
        if i % 3 == 0:
            works.append(comm.send(torch.tensor([float(i)]), 1 - comm.rank))
            works.append(comm.recv(received[i // 3], 1 - comm.rank))
    for work in works:
        await work
    assert all(torch.equal(tensor, torch.full((1 << 17,), 3.0)) for tensor in tensors)
    assert [each.item() for each in received] == [0.0, 3.0, 6.0, 9.0]
