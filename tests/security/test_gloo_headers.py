"""What another rank sends on gloo: headers, tables and short payloads that a receiver must not believe.

A message of gloo's that is longer than its receive ends the process, in gloo itself: nothing here can help against
that. So those have the lengths that the receiver asks for.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import BackendError, BrokenError, Comm
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo import payloads
from asynccomm.backends.gloo.frame_exchange import FrameExchange
from asynccomm.backends.gloo.frames import LONGEST, PAIR, Frame
from asynccomm.backends.gloo.links import MessageLink
from asynccomm.backends.gloo.messages import SHORT, Header, Kind
from asynccomm.backends.gloo.p2p import PointToPoint
from asynccomm.backends.gloo.payload_collectives import PayloadExchange
from asynccomm.backends.gloo.payloads import InboundParcel, OutboundParcel
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops import Call, MessageSpace, Parcel, Parcels, Recv, RecvParcel
from asynccomm.ops.dtypes import CODES
from asynccomm.ops.parcels import MAX_HEAD
from asynccomm.ops.validation import CommInfo
from tests.cases import cases
from tests.sampling import amount

from .mutations import HUGE, little_memory, mutated


class Peer:
    """A gloo whose messages come from a list; after that they are zeros. Says what was asked for."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self.messages = list(messages)
        self.asked: list[int] = []

    def recv(self, tensor: Tensor, src: int, tag: int) -> Any:
        self.asked.append(len(tensor))
        assert len(tensor) <= 2 * MAX_HEAD, "more memory than a head may take"
        data = self.messages.pop(0) if self.messages else b""

        def wait() -> None:
            n = min(len(tensor), len(data))
            tensor[:n] = torch.frombuffer(bytearray(data[:n] or b"\0"), dtype=torch.uint8)[:n]

        return SimpleNamespace(wait=wait)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Any:
        self.messages.append(bytes(tensor.tolist()))
        return SimpleNamespace(wait=lambda: None)


def sent(parcel: Parcel, code: int = 0, text: str = "") -> list[bytes]:
    peer = Peer([])
    OutboundParcel(parcel, code, text).send(peer, 1, 0)  # type: ignore[arg-type]
    return peer.messages


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is cut up is small."""
    for name, value in (("SHORT", 100), ("SEGMENT", 400), ("SMALL", 50), ("PACK", 120)):
        monkeypatch.setattr(payloads, name, value)


def take(messages: Sequence[bytes], room: int | None) -> BackendError | None:
    """Receive a parcel into ``room`` bytes, with nothing around them touched; None: throw it away."""
    memory = torch.zeros(2 * 1000 + (room or 0), dtype=torch.uint8)
    peer: Any = Peer(messages)
    try:
        incoming = InboundParcel(peer, 1, 0)
        incoming.read(lambda code, text: None)
        assert 0 <= len(incoming.head) <= MAX_HEAD
        assert incoming.nbytes >= 0
        # what a place makes room for is what was announced: all others are refused before this
        fits = room is not None and incoming.nbytes == room
        incoming.take([memory[1000 : 1000 + room]] if fits and room is not None else None)
    except BackendError as exc:
        return exc
    finally:
        assert not memory[:1000].any()
        assert not memory[1000 + (room or 0) :].any()
    return None


PARCELS = [
    Parcel(b"", ()),
    Parcel(b"head", (torch.arange(30, dtype=torch.uint8),)),
    Parcel(b"h" * 300, ()),
    Parcel(b"h" * 20, (torch.arange(1000).to(torch.uint8), torch.ones(20, dtype=torch.uint8))),
    Parcel(b"", tuple(torch.full((30,), 1, dtype=torch.uint8) for _ in range(20))),
]


@pytest.mark.usefixtures("small_pieces")
@cases("seed", range(amount(40, 15)))
def test_messages_that_are_almost_right(seed: int) -> None:
    choose = random.Random(seed)
    with little_memory():
        for _ in range(100):
            parcel = choose.choice(PARCELS)
            messages = sent(parcel, 5, "#1 x")
            which = choose.randrange(min(2, len(messages)))
            messages[which] = mutated(messages[which], choose)
            take(messages, choose.choice([None, parcel.nbytes]))


@pytest.mark.usefixtures("small_pieces")
def test_what_was_not_changed_is_taken() -> None:
    for parcel in PARCELS:
        for room in (None, parcel.nbytes):
            assert take(sent(parcel), room) is None


@cases("seed", range(amount(20, 8)))
def test_headers_of_any_numbers(seed: int) -> None:
    choose = random.Random(seed)
    numbers = [0, 1, 8, 4096, 4097, 1 << 20, 1 << 26, *HUGE]
    with little_memory(600 << 20):
        for _ in range(50):
            head, payload, segments = (choose.choice(numbers) for _ in range(3))
            first = struct.pack("<qqqI60s", head, payload, segments, 0, b"x").ljust(
                payloads._HEADER.size + payloads.SHORT
            )
            take([first, choose.randbytes(100)], choose.choice([None, 8]))


@cases(
    "note",
    [
        (-1, 0, 0),
        (0, -1, 0),
        (0, 5000, 0),
        (4000, 97, 0),
        (0, 2**60, 0),
        (0, 5000, -1),
        (-8, 5000, 1),
        (0, 5000, 2),
        (0, 2**60, 2**43),
        (0, 2**62, 2**44),
        (0, 10, 1),
        (0, 0, 1),
    ],
    ids=str,
)
def test_notes_that_cannot_be(note: tuple[int, int, int]) -> None:
    first = struct.pack("<qqqI60s", *note, 0, b"").ljust(payloads._HEADER.size + payloads.SHORT, b"\1")
    with little_memory(64 << 20):
        error = take([first, b"\1" * 1000], None)
    assert "rank 1 sent a header that cannot be" in str(error)


@cases(
    "lengths, what",
    [
        ([0, 600_000], "a length that cannot be"),
        ([-1, 600_001], "a length that cannot be"),
        ([(16 << 20) + 1, 600_000], "a length that cannot be"),
        ([300_000, 299_999], "other lengths than it has announced"),
        ([2**62, 2**62], "a length that cannot be"),
    ],
)
def test_tables_that_cannot_be(lengths: list[int], what: str) -> None:
    first = struct.pack("<qqqI60s", 0, 600_000, len(lengths), 0, b"") + struct.pack(f"<{len(lengths)}q", *lengths)
    with little_memory(64 << 20):
        error = take([first.ljust(payloads._HEADER.size + payloads.SHORT)], 600_000)
    assert what in str(error)


def test_many_small_tensors_between_large_ones_are_not_too_many_segments() -> None:
    """The limit is what a sender can come to at most."""
    small, large = torch.ones(1, dtype=torch.uint8), torch.ones(payloads.SMALL + 1, dtype=torch.uint8)
    parcel = Parcel(b"", (*[small, large] * 20, small))
    peer: Any = Peer([])
    OutboundParcel(parcel).send(peer, 1, 0)
    assert len(peer.messages) == 42
    incoming = InboundParcel(peer, 1, 0)
    incoming.read()
    room = torch.zeros(parcel.nbytes, dtype=torch.uint8)
    incoming.take([room])
    assert room.all()


# -- where they are received ------------------------------------------------------------------------------------------


class Lane:
    """Runs its jobs at once."""

    def put(self, lane: object, job: Callable[[], None]) -> None:
        job()


def outcome(submission: Submission, steps: Sequence[Callable[[], object]], over: object = None) -> None:
    """As a backend completes: what goes wrong is kept, to be looked at."""
    try:
        for step in steps:
            step()
    except Exception as exc:
        submission.work.error = exc  # type: ignore[attr-defined]


def receiving(call: Call) -> Submission:
    work: Any = SimpleNamespace(seq=3, source=None, error=None, started=0.0)
    return Submission(call, work)


GROUP = CommInfo("test", 0, 2, torch.device("cpu"))


class Quiet:
    """An endpoint that sends nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def link_to(self, peer: int) -> Any:
        return SimpleNamespace()

    def send(self, link: Any, data: bytes) -> None:
        pass

    def flush(self, link: Any) -> None:
        pass


def received(submission: Submission, data: bytes) -> BaseException | None:
    """Receive ``data`` on a real socket, as from rank 1; returns the error, if any."""
    errors: list[BaseException] = []
    quiet: Any = Quiet()
    point = PointToPoint(0, 2, quiet, FrameExchange(0, 2), errors.append)
    submission.work.settle = lambda error=None: errors.append(error) if error else None  # type: ignore[method-assign]
    point.submit(submission)
    theirs, ours = socket.socketpair()
    with theirs, ours:
        ours.setblocking(False)
        link = MessageLink(ours, 1, outbound=False, arrived=point.arrived)
        theirs.sendall(data)
        while link.read():
            pass
    point.settle()
    return errors[0] if errors else None


def tensor_received(data: bytes, n: int = 8) -> BaseException | None:
    guard = torch.zeros(3000, dtype=torch.uint8)
    error = received(receiving(Recv.of(GROUP, guard[1000 : 1000 + n], 1, 0)), data)
    assert not guard[:1000].any()
    assert not guard[1000 + n :].any()
    return error


BYTE = CODES[torch.uint8]
TENSOR = Header(Kind.TENSOR, 0, 0, 8, BYTE)


def test_a_message_as_it_should_be() -> None:
    assert tensor_received(TENSOR.pack() + b"\1" * 8) is None


@cases("seed", range(amount(20, 8)))
def test_headers_of_messages_that_are_almost_right(seed: int) -> None:
    choose = random.Random(seed)
    with little_memory():
        for _ in range(50):
            right = TENSOR.pack() + b"\1" * 8
            error = tensor_received(mutated(right, choose) + b"\1" * 100)
            assert error is None or isinstance(error, BrokenError), error


@cases("code, numel", product([0, -1, 1 << 40, BYTE + 1, 2**63 - 1], [8, 0, -1]))
def test_a_dtype_that_does_not_exist(code: int, numel: int) -> None:
    error = tensor_received(TENSOR._replace(first=numel, second=code).pack() + b"\1" * 8)
    assert isinstance(error, BackendError)
    assert "rank 1 sent a header that cannot be" in str(error)


@cases("numel, kind", product([-1, -(2**63), 7, 9, 2**62], [Kind.TENSOR, Kind.TENSOR_OFFER]))
def test_other_numbers_of_elements(numel: int, kind: int) -> None:
    error = tensor_received(TENSOR._replace(kind=kind, first=numel).pack() + b"\1" * 16)
    possible = 0 <= numel < 100 or (numel > 0 and kind == Kind.TENSOR_OFFER)
    assert isinstance(error, CollectiveMismatchError if possible else BackendError)


@cases(
    "header",
    [
        Header(0),
        Header(255),
        Header(Kind.FRAME),
        Header(Kind.FRAME, first=LONGEST + 1),
        Header(Kind.FRAME, first=-1),
        Header(9),
        Header(Kind.DATA, number=1),
        Header(Kind.CLEAR, number=1),
        Header(Kind.TAKEN, first=1),
        Header(Kind.PARCEL, 0, 0, 1, 1),
        Header(Kind.TENSOR, MessageSpace.OBJECTS.key(0), 0, 8, BYTE),
        Header(Kind.PARCEL, MessageSpace.OBJECTS.key(0), 0, -1, 1),
        Header(Kind.PARCEL, MessageSpace.OBJECTS.key(0), 0, 1, -1),
        Header(Kind.PARCEL, MessageSpace.OBJECTS.key(0), 0, 1, SHORT),
        Header(Kind.PARCEL_OFFER, MessageSpace.OBJECTS.key(0), 0, 2**62, -(2**62)),
        Header(Kind.PARCEL_OFFER, MessageSpace.INTERNAL.key(0) << 1, 0, 1, 1),
        Header(Kind.TENSOR, 0, 0, SHORT + 1, BYTE),
    ],
    ids=str,
)
def test_headers_that_cannot_be(header: Header) -> None:
    error = tensor_received(header.pack() + b"\1" * 8)
    assert isinstance(error, BackendError)
    assert "rank 1 sent a" in str(error)


def test_data_that_was_cleared_once_does_not_come_twice() -> None:
    offer = TENSOR._replace(kind=Kind.TENSOR_OFFER, number=5).pack()
    data = Header(Kind.DATA, number=5).pack() + b"\1" * 8
    assert tensor_received(offer + data) is None
    assert isinstance(tensor_received(offer + data + data), BackendError)


@cases("seed", range(amount(10, 5)))
def test_collectives_of_parcels(seed: int) -> None:
    choose = random.Random(seed)
    lane: Any = Lane()
    exchange = PayloadExchange(0, 2, lane, outcome)
    op = Parcels("broadcast", giver=1)
    for _ in range(50):
        parcel = Parcel(b"head", (torch.ones(30, dtype=torch.uint8),))
        messages = sent(parcel, choose.getrandbits(32), choose.choice(["#3 x", "", "#9", "ä" * 40, "# " * 40]))
        if choose.random() < 0.5:
            messages[0] = mutated(messages[0], choose)
        call = Call(op, (), (), None, place=lambda *_: [torch.zeros(30, dtype=torch.uint8)])
        submission = receiving(call)
        gloo: Any = Peer(messages)
        exchange.submit(gloo, op, submission, lambda: None)
        error = submission.work.error  # type: ignore[attr-defined]
        assert isinstance(error, (CollectiveMismatchError, BackendError)), error


def test_a_parcel_whose_place_has_other_room_is_discarded() -> None:
    op = RecvParcel("recv_object", 1, 0, MessageSpace.OBJECTS)
    submission = receiving(Call(op, (), (), None, place=lambda *_: [torch.zeros(3)]))
    header = Header(Kind.PARCEL, MessageSpace.OBJECTS.key(0), 0, 4, 120)
    error = received(submission, header.pack() + b"head" + b"\1" * 120)
    assert "where 12 fit" in str(error)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("what", ["tensor", "parcel", "collective", "frame"])
async def test_a_rank_that_sends_nonsense_over_a_real_gloo(comm: Comm, what: str) -> None:
    """The receiver lives on, and says what was wrong."""
    from asynccomm import new_comm
    from asynccomm.backends.gloo.backend import GlooBackend

    collectives = {"collective": "x" * 5000, "frame": "x"}  # what is broadcast, if it is one
    async with new_comm("gloo", name=f"nonsense {what}", timeout=30) as doomed:
        if comm.rank == 0:
            backend = doomed._session.backend
            assert isinstance(backend, GlooBackend)
            assert backend._gloos is not None
            message = torch.full((200,), 255, dtype=torch.uint8)
            small = backend._gloos.small

            def nonsense(*_: object) -> None:
                small.send(message, 1, 2 * MessageSpace.INTERNAL.key(0)).wait()

            if what in ("tensor", "parcel"):
                endpoint = backend._endpoint
                assert endpoint is not None
                with endpoint.lock:
                    link = endpoint.link_to(1)
                    assert link is not None
                    endpoint.send(link, b"\xff" * 200)
            else:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(backend.collectives._exchange, "submit", nonsense)
                    if what == "frame":
                        patch.setattr(Frame, "_parcel", lambda *_: bytes(PAIR + 1))
                    with pytest.raises(BrokenError, match=r"rank 0 (sent|has)"):
                        await doomed.broadcast_object(collectives[what], 0)  # which the giver may leave
                        await doomed.barrier()
            await comm.barrier()
        else:
            works: dict[str, Callable[[], Any]] = {
                "tensor": lambda: doomed.recv(torch.ones(8), 0),
                "parcel": lambda: doomed.recv_object(0),
                "collective": lambda: doomed.broadcast_object(None, 0),
                "frame": lambda: doomed.broadcast_object(None, 0),
            }
            with pytest.raises(BrokenError, match=r"rank 0 (sent|has)"):
                await works[what]()
            await comm.barrier()
    await comm.barrier()
