"""Messages between endpoints in one process, each driven only when it was rung, as by an engine that sleeps."""

import mmap
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.executor import core_segment
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import LINE, Layout, Word
from asynccomm.backends.shm.p2p import Messages
from asynccomm.backends.shm.rings import Mapped
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.errors import BrokenError
from asynccomm.ops import Call, MessageSpace, Parcel, Recv, RecvParcel, Send, SendParcel
from asynccomm.ops.validation import CommInfo

#: by name, the ranks whose long messages move in C
EXECUTORS: Mapping[str, Callable[[int], bool]] = {
    "reference": lambda rank: False,
    "core": lambda rank: True,
    "mixed": lambda rank: rank % 2 == 0,
}
Place = Callable[[int, bytes, Mapping[int, int]], Sequence[Tensor]]


class World:
    """All ranks over one piece of memory."""

    native: ClassVar[Callable[[int], bool]] = staticmethod(EXECUTORS["reference"])

    def __init__(self, size: int = 2, ring: int = 1024) -> None:
        self.layout = Layout(size, 64, 2, ring)
        self.memory = mmap.mmap(-1, self.layout.total)
        self.raw = memoryview(self.memory)
        self.words = self.raw.cast("Q")
        self.data = torch.frombuffer(self.memory, dtype=torch.uint8)
        mapped = Mapped(self.layout, self.words, self.raw, self.data.data_ptr())
        self.done: list[Submission] = []
        self.errors: list[BrokenError] = []
        self.grown: list[tuple[Submission, int]] = []
        self.rung = [False] * size
        self.ranks = [
            Messages(
                rank,
                mapped,
                Fence(),
                self.ring,
                self.done.append,
                self.errors.append,
                self.grow,
                segment=self.segment(rank) if World.native(rank) else None,
            )
            for rank in range(size)
        ]
        self.numbers = [0] * size

    def segment(self, rank: int) -> Any:
        """The segment as C knows it; its rings clear the word of a sleeper, and go to no descriptor."""
        core = load_core()
        if isinstance(core, CoreUnavailable):
            pytest.skip(core.reason)
        for other in range(self.layout.size):
            self.words[self.layout.word(other, Word.SLEEPING)] = 1
        return core_segment(core, self.layout, rank, self.raw, [(-1, -1)] * self.layout.size)

    def ring(self, peer: int) -> None:
        self.rung[peer] = True

    def grow(self, receive: Submission, nbytes: int) -> None:
        self.grown.append((receive, nbytes))

    def group(self, rank: int) -> CommInfo:
        return CommInfo("test", rank, self.layout.size, torch.device("cpu"))

    def send(self, source: int, destination: int, tensor: Tensor, tag: int = 0) -> Submission:
        return self._submit(source, Send.of(self.group(source), tensor, destination, tag))

    def recv(self, destination: int, source: int | None, tensor: Tensor, tag: int = 0) -> Submission:
        return self._submit(destination, Recv.of(self.group(destination), tensor, source, tag))

    def send_parcel(
        self,
        source: int,
        destination: int,
        head: bytes,
        tensors: Sequence[Tensor] = (),
        tag: int = 0,
        channel: MessageSpace = MessageSpace.OBJECTS,
    ) -> Submission:
        op = SendParcel("send_object", destination, tag, channel)
        return self._submit(source, Call(op, (), (), None, parcels=(Parcel(head, tuple(tensors)),)))

    def recv_parcel(
        self,
        destination: int,
        source: int | None,
        place: Place,
        tag: int = 0,
        channel: MessageSpace = MessageSpace.OBJECTS,
        expected: int = 0,
    ) -> Submission:
        op = RecvParcel("recv_object", source, tag, channel)
        return self._submit(destination, Call(op, (), (), None, place=place, expected=expected))

    def _submit(self, rank: int, call: Call) -> Submission:
        work: Any = SimpleNamespace(seq=self.numbers[rank], source=None)
        self.numbers[rank] += 1
        submission = Submission(call, work)
        self.ranks[rank].submit(submission)
        self.rung[rank] = True  # an engine goes on with progress
        return submission

    def step(self, rank: int) -> None:
        """What an engine does that was rung: it goes on until nothing moves, and sleeps."""
        self.rung[rank] = False
        self.words[self.layout.word(rank, Word.SLEEPING)] = 1
        while self.ranks[rank].progress():
            pass

    def nobody_sleeps(self) -> None:
        """Nobody is woken from now on, and no word cleared for it."""
        for rank in range(self.layout.size):
            self.words[self.layout.word(rank, Word.SLEEPING)] = 0

    def is_rung(self, rank: int) -> bool:
        by_core = any(World.native(each) for each in range(self.layout.size))
        return self.rung[rank] or (by_core and not self.words[self.layout.word(rank, Word.SLEEPING)])

    def settle_some(self, rounds: int) -> None:
        """Let all take a turn so many times."""
        for _ in range(rounds):
            for rank in self.ranks:
                rank.progress()

    def settle(self, choose: random.Random | None = None) -> None:
        """Go on until all sleep."""
        while awake := [rank for rank in range(self.layout.size) if self.is_rung(rank)]:
            self.step(choose.choice(awake) if choose else awake[0])
        for rank in self.ranks:
            assert not rank.progress(), "there was more to do, but nobody was told"

    @property
    def pending(self) -> list[int]:
        return [rank.pending for rank in self.ranks]

    def write(self, frame: Sequence[int], at: int = 0, payload: bytes = b"") -> None:
        """Publish a frame from rank 0 to rank 1, and all before it: bytes of payload, kind, tag, extra, ident, length.

        Args:
            at: where it begins in the ring.
        """
        start = self.layout.ring_start(0, 1)
        begin = start + 2 * LINE + at
        struct.pack_into("=IIIIIxxxxQ", self.raw, begin, *frame)
        self.raw[begin + 32 : begin + 32 + len(payload)] = payload
        self.words[start // 8] = at + (32 + len(payload) + LINE - 1) // LINE * LINE

    def scribble(self, scribbles: Sequence[tuple[int, int]]) -> None:
        """Overwrite bytes of the ring from rank 0 to rank 1, and have rank 1 read it: it may write into rings only.

        Args:
            scribbles: where, counted from the ring's start, and the byte.
        """
        self.nobody_sleeps()
        before = bytes(self.raw)
        start = self.layout.ring_start(0, 1)
        for at, value in scribbles:
            self.raw[start + at] = value
        for _ in range(5):
            self.ranks[1].progress()
        end = self.layout.ring_start(1, 0) + 2 * LINE + 1024
        assert bytes(self.raw[:start]) == before[:start]
        assert bytes(self.raw[end:]) == before[end:]


@pytest.fixture(params=EXECUTORS, autouse=True, scope="module")
def executor(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where it is imported, all tests of the module run with each executor."""
    World.native = staticmethod(EXECUTORS[request.param])
    yield
    World.native = staticmethod(EXECUTORS["reference"])


class Box:
    """Takes a parcel as it is."""

    def __init__(self) -> None:
        self.calls = 0
        self.source = -1
        self.head = b""
        self.payload = torch.empty(0, dtype=torch.uint8)

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        self.calls += 1
        assert list(lengths) == [source]
        assert type(head) is bytes
        self.source, self.head = source, head
        self.payload = torch.full((lengths[source],), 255, dtype=torch.uint8)
        return [self.payload]


def pattern(nbytes: int, source: int, number: int) -> Tensor:
    return ((torch.arange(nbytes) * 7 + source * 31 + number * 13) % 251).to(torch.uint8)


def text(nbytes: int, number: int = 0) -> bytes:
    """A head."""
    return bytes(pattern(nbytes, 5, number).tolist())


def as_bytes(tensors: Sequence[Tensor]) -> bytes:
    """What travels of them."""
    flat = [torch.cat([tensor.resolve_conj().resolve_neg().flatten()]) for tensor in tensors if tensor.numel()]
    return b"".join([bytes(tensor.view(torch.uint8).tolist()) for tensor in flat])
