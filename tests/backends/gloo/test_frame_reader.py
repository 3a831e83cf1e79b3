"""Frames in C: read from sockets in whatever parts they come, written, and reduced."""

from __future__ import annotations

import fcntl
import math
import os
import random
import socket
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asynccomm.backends.arithmetic import accumulate
from asynccomm.backends.gloo.frames import LONGEST, beginning_of
from asynccomm.backends.gloo.messages import Header, Kind
from asynccomm.backends.kernels import exact_kernel
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.ops.reduce_op import RedOpType, ReduceOp

core = load("asynccomm.backends.gloo._frames")
pytestmark = pytest.mark.skipif(isinstance(core, CoreUnavailable), reason="the frames in C are not built")

LATE, ALL, OTHER, CARRIED = range(4)
EQUAL = bytes(range(48))
SECONDS = 20.0


class Peers:
    """Sockets of a rank, and their other ends."""

    def __init__(self, count: int) -> None:
        self.pairs = [socket.socketpair() for _ in range(count)]
        self.there = [there for _, there in self.pairs]
        self.fds = [here.fileno() for here, _ in self.pairs]
        for here, _ in self.pairs:
            here.setblocking(False)

    def close(self) -> None:
        for pair in self.pairs:
            for end in pair:
                end.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers(2)
    yield made
    made.close()


def framed(data: bytes) -> bytes:
    return Header(Kind.FRAME, first=len(data)).pack() + data


def message(data: bytes) -> bytes:
    return Header(Kind.TENSOR, 1, 0, len(data), 0).pack() + data


def reader(count: int = 2) -> Any:
    return core.FrameReader(count, LONGEST)


def test_frames_of_all_sources_are_received(peers: Peers) -> None:
    frames = reader()
    peers.there[0].sendall(framed(b"short" * 20))
    assert frames.receive(peers.fds, 100, 0.0) == LATE
    assert frames.holds
    peers.there[1].sendall(framed(b"more" * 5000))
    assert frames.receive(peers.fds, 100, SECONDS) == ALL
    assert [*frames.frames()] == [b"short" * 20, b"more" * 5000]
    assert not frames.holds


def test_a_frame_that_comes_byte_by_byte_does_not_hold_up_its_reader_to_the_end(peers: Peers) -> None:
    """Each byte prolongs the wait, though not for ever: the reader may be an event loop."""
    frames = reader(1)
    over = threading.Event()
    whole = framed(bytes(400_000))
    sent = 0

    def drip() -> None:
        nonlocal sent
        while not over.is_set() and sent < len(whole):
            sent += peers.there[0].send(whole[sent : sent + 1])
            while unread(peers.fds[0]) and not over.is_set():
                os.sched_yield()

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert frames.receive(peers.fds[:1], LONGEST, 0.05) == LATE
    finally:
        over.set()
        dripping.join()
    assert sent < len(whole)
    peers.there[0].setblocking(True)
    sending = threading.Thread(target=peers.there[0].sendall, args=(whole[sent:],))
    sending.start()
    assert frames.receive(peers.fds[:1], LONGEST, SECONDS) == ALL
    sending.join()
    assert [*frames.frames()] == [bytes(400_000)]


# -- messages ---------------------------------------------------------------------------------------------------------

SHORT_AND_LONG = (0, 1, 64, 4064, 4065, 64 << 10)


def received(peers: Peers, nbytes: int, seconds: float = SECONDS) -> tuple[bytes | None, bytes]:
    """The result of C, and the memory of the message."""
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    header = Header(Kind.TENSOR, 1, 0, nbytes, 0).pack()
    outcome: list[bytes | None] = []
    core.receive_message(peers.fds[0], header, memory.data_ptr(), nbytes, seconds, outcome)
    (data,) = outcome
    return data, memory.numpy().tobytes()


def written(peers: Peers, head: bytes, memory: torch.Tensor, seconds: float) -> int:
    outcome: list[int] = []
    core.send_message(peers.fds[0], head, memory.data_ptr(), memory.nbytes, seconds, outcome)
    (count,) = outcome
    return count


def unread(fd: int) -> int:
    """Bytes that have come and were not read."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("nbytes", SHORT_AND_LONG)
def test_a_message_is_read_to_its_place(peers: Peers, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    peers.there[0].setblocking(True)
    sending = threading.Thread(target=peers.there[0].sendall, args=(message(data) + b"the next",))
    sending.start()
    assert received(peers, nbytes) == (None, data)
    sending.join()
    assert peers.pairs[0][0].recv(100) == b"the next"


@pytest.mark.parametrize("cuts", [(0, 1), (1, 31), (31, 33), (32, 100), (33, 4096), (100, 5000), (5000, 9000)])
def test_a_message_comes_in_parts(peers: Peers, cuts: tuple[int, int]) -> None:
    for nbytes in (3000, 10_000):
        data = random.Random(nbytes).randbytes(nbytes)
        whole = message(data)
        parts = [whole[: cuts[0]], whole[cuts[0] : cuts[1]], whole[cuts[1] :]]

        def send(parts: list[bytes] = parts) -> None:
            for part in parts:
                peers.there[0].sendall(part)
                while unread(peers.fds[0]):
                    os.sched_yield()

        sending = threading.Thread(target=send)
        sending.start()
        assert received(peers, nbytes) == (None, data)
        sending.join()


@pytest.mark.parametrize("nbytes", SHORT_AND_LONG)
def test_all_bytes_of_something_else_are_returned(peers: Peers, nbytes: int) -> None:
    """Of another message, of a part of the message, and of none."""
    assert received(peers, nbytes, 0.0)[0] == b""
    other = Header(Kind.TENSOR, 2, 0, nbytes, 0).pack() + b"x" * nbytes
    peers.there[0].sendall(other)
    data, memory = received(peers, nbytes)
    assert data
    assert memory == bytes(nbytes)
    left = len(other) - len(data)
    assert data + (peers.pairs[0][0].recv(left) if left else b"") == other
    for there in (7, 32, 32 + nbytes // 2, 31 + nbytes):
        part = message(b"y" * nbytes)[:there]
        peers.there[0].sendall(part)
        assert received(peers, nbytes, 0.0)[0] in (part, None if there == 32 + nbytes else part)


def test_the_end_of_the_connection_is_left_to_python(peers: Peers) -> None:
    peers.there[0].close()
    assert received(peers, 10)[0] == b""


def test_a_header_of_another_length_is_refused(peers: Peers) -> None:
    with pytest.raises(ValueError, match="31 bytes of a header, 5 of data"):
        core.receive_message(peers.fds[0], bytes(31), 0, 5, 0.0, [])
    with pytest.raises(ValueError, match="32 bytes of a header, -1 of data"):
        core.receive_message(peers.fds[0], bytes(32), 0, -1, 0.0, [])


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 4 << 20])
def test_a_message_is_written_as_far_as_there_is_room(peers: Peers, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
    for head in (b"", b"head"):
        count = written(peers, head, memory, 0.0)
        assert count == len(head) + nbytes or (nbytes > 5000 and 0 < count < nbytes)
        got = bytearray()
        while len(got) < count:
            got += peers.there[0].recv(1 << 20)
        assert got == (head + data)[:count]
    if nbytes:
        reading = threading.Thread(target=lambda: got.extend(peers.there[0].recv(nbytes, socket.MSG_WAITALL)))
        got = bytearray()
        reading.start()
        assert written(peers, b"", memory, SECONDS) == nbytes
        reading.join()
        assert got == data


def test_an_end_of_the_connection_ends_the_writing(peers: Peers) -> None:
    peers.there[0].close()
    assert written(peers, b"head", torch.empty(0), 0.0) == 0
    with pytest.raises(ValueError, match="-5 bytes of data"):
        core.send_message(peers.fds[0], b"head", 0, -5, 0.0, [])


# -- frames -----------------------------------------------------------------------------------------------------------


def test_data_behind_a_frame_is_not_kept_while_others_are_late(peers: Peers) -> None:
    frames = reader()
    peers.there[0].sendall(framed(b"f" * 70) + message(b"behind"))
    assert frames.receive(peers.fds, 1000, 0.0) == OTHER
    assert frames.returned() == [framed(b"f" * 70) + message(b"behind"), b""]


def test_a_source_without_descriptor_is_left_out(peers: Peers) -> None:
    frames = reader()
    peers.there[1].sendall(framed(b"x" * 70))
    assert frames.receive([-1, peers.fds[1]], 70, SECONDS) == ALL
    assert frames.frames() == [None, b"x" * 70]


def test_a_thread_that_waits_lets_others_run(peers: Peers) -> None:
    frames = reader()

    def send() -> None:
        for there in peers.there:
            for byte in framed(b"abc" * 30):  # one by one
                there.sendall(bytes([byte]))

    sender = threading.Thread(target=send)
    sender.start()
    assert frames.receive(peers.fds, 90, SECONDS) == ALL
    sender.join()
    assert frames.frames() == [b"abc" * 30] * 2


@pytest.mark.parametrize(
    "sent",
    [
        message(b"four"),
        Header(Kind.FRAME, first=0).pack(),
        Header(Kind.FRAME, first=-1).pack(),
        Header(Kind.FRAME, first=LONGEST + 1).pack(),
        Header(255, first=70).pack(),
    ],
    ids=["a message", "empty", "negative", "too long", "unknown"],
)
def test_whatever_is_no_frame_is_given_back(peers: Peers, sent: bytes) -> None:
    frames = reader()
    peers.there[0].sendall(framed(b"y" * 80)[:50])
    peers.there[1].sendall(sent + b"behind")
    assert frames.receive(peers.fds, 1000, SECONDS) == OTHER
    assert frames.holds
    assert frames.returned() == [framed(b"y" * 80)[:50], sent + b"behind"]
    assert not frames.holds


def test_the_end_of_a_source_is_for_python(peers: Peers) -> None:
    frames = reader()
    peers.there[0].sendall(framed(b"z" * 70)[:40])
    peers.there[0].close()
    assert frames.receive(peers.fds, 70, SECONDS) == OTHER
    assert frames.returned() == [framed(b"z" * 70)[:40], b""]


def test_no_byte_is_lost_however_they_come() -> None:
    """Frames and messages in random order and parts: what is given out and given back is what was sent."""
    chance = random.Random(3)
    for _ in range(200):
        peers, frames = Peers(2), reader()
        streams = []
        for _ in range(2):
            parts = []
            for _ in range(chance.randrange(1, 5)):
                data = chance.randbytes(chance.choice([64, 70, 1000, 4000, 4064, 4065, 9000]))
                parts.append(framed(data) if chance.random() < 0.8 else message(data))
            streams.append(b"".join(parts))
        left, taken = list(streams), [b"", b""]
        while any(left):
            k = chance.choice([k for k in range(2) if left[k]])
            count = chance.randrange(1, 6000)
            peers.there[k].sendall(left[k][:count])
            left[k] = left[k][count:]
            result = frames.receive(peers.fds, chance.choice([0, 64, 1000, 9000]), 0.0)
            if result == ALL:
                for k, frame in enumerate(frames.frames()):
                    taken[k] += framed(bytes(frame))
            if result or chance.random() < 0.2:
                for k, data in enumerate(frames.returned()):
                    taken[k] += data
                assert not frames.holds
            if result == OTHER:
                break
        for k, data in enumerate(frames.returned()):
            taken[k] += data
            peers.there[k].sendall(left[k] or b" ")
            rest = b""
            while len(taken[k]) + len(rest) < len(streams[k]):
                rest += peers.pairs[k][0].recv(1 << 20)
            taken[k] += rest
        assert [data[: len(stream)] for data, stream in zip(taken, streams, strict=True)] == streams
        peers.close()


def beginning(nbytes: int) -> bytes:
    """Of a frame with a contribution of ``nbytes``."""
    return beginning_of(EQUAL, nbytes)


def carry(frames: Any, peers: Peers, rank: int, tensor: torch.Tensor, kernel: Any, seconds: float) -> int:
    """The result of an all_reduce in place."""
    address = tensor.data_ptr()
    count = len(peers.fds)
    own = address, address, tensor.nbytes, rank, *kernel
    result: int = frames.carry(peers.fds, peers.fds, EQUAL, [address] * count, [1] * count, *own, seconds)
    return result


def exchanged(rank: int, tensor: torch.Tensor, reduction: ReduceOp, peers: Peers, others: list[torch.Tensor]) -> int:
    """The result of an exchange of ``rank`` with the ranks behind it, which have sent their frames."""
    for there, other in zip(peers.there, others, strict=True):
        there.sendall(framed(beginning(other.nbytes) + bytes(other.view(torch.uint8).tolist())))
    return carry(reader(), peers, rank, tensor, exact_kernel(tensor.dtype, reduction.type), SECONDS)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64])
def test_frames_are_reduced_in_the_order_of_ranks(dtype: torch.dtype, rank: int) -> None:
    torch.manual_seed(5)
    for reduction in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BXOR):
        floating = dtype.is_floating_point
        ordered = reduction.type in (RedOpType.MIN, RedOpType.MAX)
        if floating and (ordered or reduction.type in (RedOpType.BAND, RedOpType.BXOR)):
            continue
        rows = [torch.randn(33, dtype=torch.float64).mul(50).to(dtype) for _ in range(3)]
        if floating:
            rows[1][0], rows[2][0] = float("inf"), -float("inf")
        expected = accumulate([row.clone() for row in rows], reduction)
        tensor, peers = rows[rank].clone(), Peers(2)
        assert exchanged(rank, tensor, reduction, peers, [rows[(rank + k) % 3] for k in (1, 2)]) == CARRIED
        assert tensor.view(torch.uint8).equal(expected.view(torch.uint8)), reduction
        sent = framed(beginning(tensor.nbytes) + bytes(rows[rank].view(torch.uint8).tolist()))
        assert [there.recv(1 << 16) for there in peers.there] == [sent] * 2
        peers.close()


@pytest.mark.parametrize("odd", ["place", "flag", "balance", "shorter", "longer", "nan", "kernel"])
def test_frames_that_differ_are_left_to_python(peers: Peers, odd: str) -> None:
    mine, theirs = torch.ones(4), struct.pack("<ff", 0.0, math.nan if odd == "nan" else 1.0) * 2
    frames = reader()
    usual = beginning(16) + theirs
    peers.there[0].sendall(framed(usual))
    changed = {
        "place": b"\x01" + usual[1:],
        "flag": usual[:60] + struct.pack("<I", 0) + usual[64:],
        "balance": usual[:48] + b"\x05" + usual[49:],
        "shorter": beginning(8) + theirs[:8],
        "longer": beginning(20) + theirs + b"1234",
    }.get(odd, usual)
    peers.there[1].sendall(framed(changed))
    kernel = (-2, 0) if odd == "kernel" else exact_kernel(torch.float32, RedOpType.SUM)
    assert carry(frames, peers, 0, mine, kernel, SECONDS) == ALL
    assert frames.frames() == [usual, changed]
    assert mine.tolist() == [1.0] * 4


def test_contributions_are_copied_to_their_places(peers: Peers) -> None:
    """This rank, 1 of 3, gives its part to rank 0 only, and takes one from rank 2 only."""
    frames, part, whole = reader(), torch.arange(4.0), torch.zeros(3, 4)
    peers.there[0].sendall(framed(beginning(16) + struct.pack("<4f", 5, 6, 7, 8)))  # rank 2
    peers.there[1].sendall(framed(beginning(0)))
    gives, takes = [0, part.data_ptr()], [whole[2].data_ptr(), 0]
    own = part.data_ptr(), whole[1].data_ptr(), 16, 1, -1, 0
    assert frames.carry(peers.fds, peers.fds, EQUAL, gives, takes, *own, SECONDS) == CARRIED
    assert whole.tolist() == [[0.0] * 4, [0.0, 1.0, 2.0, 3.0], [5.0, 6.0, 7.0, 8.0]]
    sent = [there.recv(1000) for there in peers.there]
    assert sent == [framed(beginning(0)), framed(beginning(16) + struct.pack("<4f", 0, 1, 2, 3))]
    assert not frames.holds


def test_a_late_frame_leaves_the_tensor_alone(peers: Peers) -> None:
    mine, frames = torch.ones(4), reader()
    peers.there[1].sendall(framed(beginning(16) + bytes(16)))
    assert carry(frames, peers, 2, mine, (0, 0), 0.0) == LATE
    assert frames.unsent() == [0, 0]
    assert mine.tolist() == [1.0] * 4
    peers.there[0].sendall(framed(beginning(16) + bytes(16)))
    assert frames.receive(peers.fds, 80, SECONDS) == ALL
    assert frames.frames() == [beginning(16) + bytes(16)] * 2


def test_what_a_socket_does_not_take_is_known(peers: Peers) -> None:
    mine, frames = torch.arange(1 << 16, dtype=torch.int64), reader()  # 512 KiB
    peers.pairs[1][0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    assert carry(frames, peers, 0, mine, (7, 0), 0.0) == LATE
    whole = framed(beginning(mine.nbytes) + struct.pack(f"<{len(mine)}q", *mine.tolist()))
    for there, unsent in zip(peers.there, frames.unsent(), strict=True):
        assert unsent
        got = b""
        while len(got) < len(whole) - unsent:
            got += there.recv(1 << 20)
        assert got == whole[: len(whole) - unsent]
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.recv(1)


def test_frames_that_have_all_come_are_not_kept_while_a_sink_is_full(peers: Peers) -> None:
    """The sink's event would tell that there is room, and no event of the frames."""
    mine, frames = torch.zeros(1 << 17), reader()
    for here, _ in peers.pairs:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for there in peers.there:
        there.sendall(framed(beginning(0)))
    gives, own = [mine.data_ptr()] * 2, (0, 0, mine.nbytes, 0, -1, 0)
    assert frames.carry(peers.fds, peers.fds, EQUAL, gives, [0, 0], *own, 0.0) == OTHER
    assert all(frames.unsent())
    assert frames.returned() == [framed(beginning(0))] * 2


def test_long_frames_go_both_ways_at_once() -> None:
    """More bytes than the sockets hold: each rank has to read while it writes."""
    ends = socket.socketpair(), socket.socketpair()
    tensors = [torch.arange(1 << 16, dtype=torch.int64), torch.ones(1 << 16, dtype=torch.int64)]
    results: list[int] = []
    for pair in ends:
        for end in pair:
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)

    def exchange(rank: int) -> None:
        tensor = tensors[rank]
        sinks, sources = [ends[rank][0].fileno()], [ends[1 - rank][1].fileno()]
        address = tensor.data_ptr()
        own = address, address, tensor.nbytes, rank, 7, 0
        results.append(reader(1).carry(sinks, sources, EQUAL, [address], [1], *own, SECONDS))

    threads = [threading.Thread(target=exchange, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CARRIED] * 2
    assert all(tensor.equal(torch.arange(1, (1 << 16) + 1)) for tensor in tensors)
    for pair in ends:
        for end in pair:
            end.close()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="-1 sources"):
        core.FrameReader(-1, LONGEST)
    with pytest.raises(ValueError, match="1 descriptors"):
        reader().receive([3], 64, 0.0)
    with pytest.raises(ValueError, match="3 addresses"):
        reader().carry([-1, -1], [-1, -1], EQUAL, [0, 0], [0, 0, 0], 0, 0, 0, 0, -1, 0, 0.0)
    for equal, *own in (
        (EQUAL[:-1], 8, 0, 0, 0),
        (EQUAL, -1, 0, 0, 0),
        (EQUAL, LONGEST, 0, 0, 0),
        (EQUAL, 8, 3, 0, 0),
        (EQUAL, 8, 0, 99, 0),
        (EQUAL, 8, 0, 0, 4),  # no kernel: bits of floats
        (EQUAL, 8, 0, 0, 7),
    ):
        with pytest.raises(ValueError, match=f"{own[0]} of data"):
            reader().carry([-1, -1], [-1, -1], equal, [0, 0], [0, 0], 0, 0, *own, 0.0)
