"""Messages between endpoints in one process, each driven only when it was rung, as by an engine that sleeps."""

import ctypes
import mmap
import random
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.messages import SHORT, Messages
from asynccomm.backends.shm.rings import framed, largest_payload
from asynccomm.backends.shm.segment import LINE, Layout
from asynccomm.checks import MAX_TAG, Group
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import Recv, Send
from asynccomm.testing.conformance.data import DTYPES, SHAPES, expect_equal, layouts, sample, sentinel


class World:
    """All ranks over one piece of memory."""

    def __init__(self, size: int = 2, ring: int = 1024) -> None:
        self.layout = Layout(size, 64, 2, ring)
        self.memory = mmap.mmap(-1, self.layout.total)
        self.raw = memoryview(self.memory)
        self.words = self.raw.cast("Q")
        data = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.done: list[Submission] = []
        self.errors: list[BrokenError] = []
        self.rung = [False] * size
        self.ranks = [
            Messages(
                rank, self.layout, self.words, self.raw, data, Fence(), self.ring, self.done.append, self.errors.append
            )
            for rank in range(size)
        ]
        self.numbers = [0] * size

    def ring(self, peer: int) -> None:
        self.rung[peer] = True

    def group(self, rank: int) -> Group:
        return Group("test", rank, self.layout.size, torch.device("cpu"))

    def send(self, source: int, destination: int, tensor: Tensor, tag: int = 0) -> Submission:
        return self._submit(source, Send.of(self.group(source), tensor, destination, tag))

    def recv(self, destination: int, source: int | None, tensor: Tensor, tag: int = 0) -> Submission:
        return self._submit(destination, Recv.of(self.group(destination), tensor, source, tag))

    def _submit(self, rank: int, call: Any) -> Submission:
        work: Any = SimpleNamespace(seq=self.numbers[rank], source=None)
        self.numbers[rank] += 1
        submission = Submission(call, work)
        self.ranks[rank].submit(submission)
        self.rung[rank] = True  # an engine goes on with progress
        return submission

    def step(self, rank: int) -> None:
        """What an engine does that was rung: it goes on until nothing moves, and sleeps."""
        self.rung[rank] = False
        while self.ranks[rank].progress():
            pass

    def settle(self, choose: random.Random | None = None) -> None:
        """Go on until all sleep."""
        while awake := [rank for rank, rung in enumerate(self.rung) if rung]:
            self.step(choose.choice(awake) if choose else awake[0])
        for rank in self.ranks:
            assert not rank.progress(), "there was more to do, but nobody was told"

    @property
    def pending(self) -> list[int]:
        return [rank.pending for rank in self.ranks]


def pattern(nbytes: int, source: int, number: int) -> Tensor:
    return ((torch.arange(nbytes) * 7 + source * 31 + number * 13) % 251).to(torch.uint8)


# Around the limits of a ring of 1 KiB: 224 bytes are one frame, and the most that is short there.
TINY_SIZES = [0, 1, 31, 32, 33, 192, 223, 224, 225, 448, 449, 1023, 1024, 1025, 5000]


@dataclass
class Receive:
    submission: Submission
    named: int | None
    tensor: Tensor


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_random_messages(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4), label="ranks")
    world = World(size, data.draw(st.sampled_from([1024, 1088, 4096]), label="ring"))
    choose = random.Random(data.draw(st.integers(0, 1 << 30), label="seed"))
    rank = st.integers(0, size - 1)
    tags = data.draw(st.lists(st.sampled_from([0, 1, 5, MAX_TAG]), min_size=1, max_size=3, unique=True), label="tags")
    sizes = {tag: data.draw(st.sampled_from(TINY_SIZES), label="size") for tag in tags}  # any source: all must fit
    moves = st.tuples(st.sampled_from(["send", "recv", "any", "step"]), rank, rank, st.sampled_from(tags))
    sent: defaultdict[tuple[int, int, int], int] = defaultdict(int)  # by (source, destination, tag)
    posted: defaultdict[tuple[int, int], list[Receive]] = defaultdict(list)  # by (destination, tag)
    for what, one, other, tag in data.draw(st.lists(moves, max_size=80), label="moves"):
        if what == "send":
            world.send(one, other, pattern(sizes[tag], one, sent[one, other, tag]), tag)
            sent[one, other, tag] += 1
        elif what == "step":
            world.step(one)
        else:
            tensor, source = torch.full((sizes[tag],), 255, dtype=torch.uint8), None if what == "any" else other
            posted[one, tag].append(Receive(world.recv(one, source, tensor, tag), source, tensor))
    world.settle(choose)
    assert not world.errors
    done = {id(submission) for submission in world.done}
    assert len(done) == len(world.done), "something was done twice"
    taken: defaultdict[tuple[int, int, int], int] = defaultdict(int)
    for (destination, tag), receives in posted.items():
        for receive in receives:
            if id(receive.submission) in done:
                source = receive.submission.work.source
                assert source is not None
                assert receive.named in (None, source)
                number = taken[source, destination, tag]
                expected = pattern(sizes[tag], source, number)
                assert torch.equal(receive.tensor, expected), f"not message {number} from {source} under {tag}"
                taken[source, destination, tag] += 1
    for (destination, tag), receives in posted.items():
        for receive in receives:
            if id(receive.submission) not in done:
                sources = range(size) if receive.named is None else [receive.named]
                for source in sources:
                    assert taken[source, destination, tag] == sent[source, destination, tag], "a message was held back"
    assert sum(world.pending) == sum(sent.values()) + sum(map(len, posted.values())) - len(done)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_random_sizes_both_ways(data: st.DataObject) -> None:
    world = World(3)
    choose = random.Random(data.draw(st.integers(0, 1 << 30), label="seed"))
    messages = data.draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([0, 1, 2]), st.sampled_from(TINY_SIZES)),
            max_size=60,
        ),
        label="messages",
    )
    halves = [("send", i) for i in range(len(messages))]
    receives: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, (source, destination, tag, _) in enumerate(messages):
        receives[source, destination, tag].append(i)
    queues = [[("send", i) for _, i in halves], *([("recv", i) for i in queue] for queue in receives.values())]
    outputs = {}
    while any(queues):
        what, i = choose.choice([queue for queue in queues if queue]).pop(0)
        source, destination, tag, nbytes = messages[i]
        if what == "send":
            world.send(source, destination, pattern(nbytes, source, i), tag)
        else:
            outputs[i] = torch.zeros(nbytes, dtype=torch.uint8)
            world.recv(destination, source, outputs[i], tag)
        if choose.random() < 0.5:
            world.step(choose.randrange(3))
    world.settle(choose)
    assert not world.errors
    assert world.pending == [0, 0, 0]
    for i, (source, _, _, nbytes) in enumerate(messages):
        assert torch.equal(outputs[i], pattern(nbytes, source, i))


@pytest.mark.parametrize("early", [False, True], ids=["posted", "early"])
@pytest.mark.parametrize("ring", [1024, 1 << 16])
def test_every_dtype_and_layout(ring: int, early: bool) -> None:
    world = World(2, ring)
    for dtype in DTYPES:
        for shape in (*SHAPES, (40, 13)):
            for name, output in layouts(sentinel(shape, dtype)):
                source = next(t for n, t in layouts(sample(0, shape, dtype)) if n == name)
                for receiver in (1, 0):  # through the ring, and to oneself
                    if not early:
                        world.recv(receiver, 0, output, 3)
                    world.send(0, receiver, source, 3)
                    if early:
                        world.settle()
                        world.recv(receiver, 0, output, 3)
                    world.settle()
                    expect_equal(output.resolve_conj(), sample(0, shape, dtype), f"{dtype} {shape} {name}")
    assert not world.errors
    assert world.pending == [0, 0]


@pytest.mark.parametrize("nbytes", [5, 300], ids=["short", "long"])
def test_what_cannot_be_compared_travels_as_bytes(nbytes: int) -> None:
    world = World()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint64, torch.complex32):
        source = pattern(nbytes * dtype.itemsize, 0, 0).view(dtype)
        output = torch.zeros(nbytes, dtype=dtype)
        world.send(0, 1, source)
        world.recv(1, 0, output)
        world.settle()
        assert torch.equal(output.view(torch.uint8), source.view(torch.uint8))


def test_autograd_sees_nothing() -> None:
    world = World()
    leaf = torch.ones(200, requires_grad=True)
    graph = leaf * 2
    for output in (torch.zeros(200, requires_grad=True), torch.zeros(2, 100, requires_grad=True).t()):
        world.send(0, 1, graph)
        world.recv(1, 0, output)
        world.settle()
        assert output.requires_grad
        assert output.sum().item() == 400


def test_a_short_send_is_done_when_it_is_in_the_ring() -> None:
    world = World()
    source = torch.ones(3)
    send = world.send(0, 1, source)
    assert world.done == [send]
    source.zero_()
    output = torch.zeros(3)
    receive = world.recv(1, 0, output)
    world.step(1)
    assert world.done == [send, receive]
    assert output.tolist() == [1, 1, 1]
    assert receive.work.source == 0
    assert send.work.source is None


def test_tags_and_pairs_do_not_hold_up_each_other() -> None:
    world = World(3)
    late = [world.recv(1, 0, torch.zeros(2000), tag) for tag in range(10, 20)]
    for tag in range(10):  # long ones that nobody wants yet
        world.send(0, 1, torch.ones(2000), tag)
    last = world.send(0, 1, torch.ones(2), 99)
    other = world.send(2, 1, torch.ones(2), 99)
    receives = [world.recv(1, source, torch.zeros(2), 99) for source in (0, 2)]
    world.settle()
    assert {last, other, *receives} == set(world.done)
    assert not {*late} & {*world.done}


def test_long_messages_advance_in_turn_and_short_ones_pass() -> None:
    world = World()
    outputs = [torch.zeros(20_000, dtype=torch.uint8) for _ in range(3)]
    for tag, output in enumerate(outputs):
        world.recv(1, 0, output, tag)
        world.send(0, 1, torch.ones(20_000, dtype=torch.uint8), tag)
    for _ in range(10):
        for rank in world.ranks:
            rank.progress()
    arrived = [int(output.sum()) for output in outputs]
    assert min(arrived) > 0
    assert max(arrived) - min(arrived) <= 1024
    short = world.recv(1, 0, torch.zeros(1), 9)
    world.ranks[0].progress()
    assert world.send(0, 1, torch.ones(1), 9) not in world.done, "the ring is full"
    for _ in range(3):
        for rank in world.ranks:
            rank.progress()
    assert short in world.done
    assert not any(output.all() for output in outputs)
    world.settle()
    assert world.pending == [0, 0]


def test_a_small_frame_does_not_pass_a_large_one_that_found_no_room() -> None:
    world = World()
    for _ in range(13):
        world.send(0, 1, torch.ones(300), 1)  # a line each, until they are wanted
    for nbytes in (224, 8):
        assert world.send(0, 1, pattern(nbytes, 0, nbytes)) not in world.done
    for nbytes in (224, 8):
        output = torch.zeros(nbytes, dtype=torch.uint8)
        world.recv(1, 0, output)
        world.settle()
        assert not world.errors
        assert torch.equal(output, pattern(nbytes, 0, nbytes))


@pytest.mark.parametrize("nbytes", [0, 8, 200])
def test_what_comes_unexpected_is_bounded(nbytes: int) -> None:
    world = World()
    count = 500
    sends = [world.send(0, 1, pattern(nbytes, 0, i)) for i in range(count)]
    world.settle()
    early = len(world.done)
    assert 0 < early * framed(nbytes) <= 1024, "the receiver keeps more than a ring of short messages"
    assert world.pending == [count - early, 0]
    outputs = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(count)]
    for output in outputs:
        world.recv(1, 0, output)
    world.settle()
    assert world.pending == [0, 0]
    assert sends == [submission for submission in world.done if isinstance(submission.op, Send)], "out of order"
    for i, output in enumerate(outputs):
        assert torch.equal(output, pattern(nbytes, 0, i))
    again = world.send(0, 1, pattern(nbytes, 0, 0))
    assert again in world.done, "what was matched no longer counts"


def test_the_default_limits_meet() -> None:
    ring = 1 << 20
    for nbytes in (SHORT - 1, SHORT, SHORT + 1, largest_payload(ring), largest_payload(ring) + 1, 3 * ring + 5):
        world = World(2, ring)
        output = torch.zeros(nbytes, dtype=torch.uint8)
        send = world.send(0, 1, pattern(nbytes, 0, 1))
        assert (send in world.done) == (nbytes <= SHORT)
        world.recv(1, 0, output)
        world.settle()
        assert torch.equal(output, pattern(nbytes, 0, 1))


def test_messages_to_oneself_wait_for_their_receive() -> None:
    world = World(1)
    send = world.send(0, 0, torch.ones(3000))
    assert world.done == []
    output = torch.zeros(3000)
    receive = world.recv(0, None, output)
    assert set(world.done) == {send, receive}
    assert receive.work.source == 0
    assert output.sum().item() == 3000
    world.recv(0, 0, output, 4)
    world.send(0, 0, torch.zeros(3000), 4)
    assert output.sum().item() == 0
    assert world.pending == [0]


@pytest.mark.parametrize("source", [0, 1], ids=["from a peer", "from itself"])
@pytest.mark.parametrize("early", [False, True], ids=["posted", "early"])
@pytest.mark.parametrize(("sent", "expected"), [(3, 5), (5, 3), (0, 2), (2, 0), (500, 3), (3, 500), (500, 600)])
def test_what_does_not_fit_is_named(sent: int, expected: int, early: bool, source: int) -> None:
    world = World()
    output = torch.full((expected + 1,), 99.0)
    if not early:
        world.recv(1, source, output[:expected])
    world.send(source, 1, torch.ones(sent))
    if early:
        world.settle()
        world.recv(1, source, output[:expected])
    world.settle()
    (error,) = world.errors
    assert isinstance(error, CollectiveMismatchError)
    assert (error.rank, error.other_rank) == (source, 1)
    assert error.op == f"send(float32[{sent}], dst=1, tag=0)"
    assert error.other_op == f"recv(float32[{expected}], src={source}, tag=0)"
    assert output.unique().tolist() == [99]


def test_dtypes_that_differ_are_named() -> None:
    world = World()
    world.recv(1, None, torch.ones(3))
    world.send(0, 1, torch.ones(3, dtype=torch.int32))
    world.settle()
    (error,) = world.errors
    assert "has send(int32[3], dst=1, tag=0), rank 1 has recv(float32[3], src=any, tag=0)" in str(error)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_operations_that_need_a_rank_that_has_gone_come_back() -> None:
    world = World(3)
    kept = world.recv(0, 1, torch.zeros(2), 1)
    world.send(1, 0, torch.ones(2), 1)
    world.send(1, 0, torch.ones(2), 2)
    lost = [world.recv(0, 1, torch.zeros(2), 3), world.send(0, 1, torch.ones(1000), 4)]
    anybody = world.recv(0, None, torch.zeros(2), 5)
    other = world.recv(0, 2, torch.zeros(2), 6)
    assert world.ranks[0].gone(1) == lost
    assert kept in world.done, "what it sent before it went still arrives"
    early = world.recv(0, 1, torch.zeros(2), 2)
    assert early in world.done
    assert world.ranks[0].gone(1) == []
    later = [world.recv(0, 1, torch.zeros(2), 7), world.send(0, 1, torch.ones(1), 7)]
    assert world.ranks[0].gone(1) == later
    assert world.pending[0] == 2
    world.send(2, 0, torch.ones(2), 5)
    world.settle()
    assert anybody in world.done
    hopeless = world.recv(0, None, torch.zeros(2), 8)
    assert world.ranks[0].gone(2) == [other, hopeless]
    assert world.pending[0] == 0


def test_sends_that_found_no_room_come_back() -> None:
    world = World()
    sends = [world.send(0, 1, torch.ones(50)) for _ in range(40)]
    unfinished = [send for send in sends if send not in world.done]
    assert unfinished
    assert sorted(map(id, world.ranks[0].gone(1))) == sorted(map(id, unfinished))
    assert not world.ranks[0].progress()


def test_a_long_message_half_way_comes_back() -> None:
    world = World()
    receive, send = world.recv(1, 0, torch.zeros(5000)), world.send(0, 1, torch.ones(5000))
    for _ in range(4):
        for rank in world.ranks:
            rank.progress()
    assert world.ranks[0].gone(1) == [send]
    assert world.ranks[1].gone(0) == [receive]


def test_drop_forgets_everything() -> None:
    world = World()
    world.recv(0, 1, torch.zeros(2))
    world.send(0, 1, torch.ones(5000), 1)
    world.send(0, 0, torch.ones(2), 1)
    world.send(1, 0, torch.ones(2))
    world.ranks[0].drop()
    assert world.ranks[0].pending == 0
    assert not world.ranks[0].progress()
    assert world.done == [world.done[0]], "only the short send of rank 1 is done"


# -- what others have written -----------------------------------------------------------------------------------------


def write(world: World, frame: Sequence[int], head: int = LINE) -> None:
    """Publish a frame from rank 0 to rank 1: bytes of payload, kind, tag, dtype, ident, elements."""
    start = world.layout.ring_start(0, 1)
    struct.pack_into("=IIIIIxxxxQ", world.raw, start + 2 * LINE, *frame)
    world.words[start // 8] = head


@pytest.mark.parametrize(
    ("frame", "detail"),
    [
        ((0, 0, 0, 0, 0, 0), "a frame of kind 0"),
        ((0, 77, 0, 0, 0, 0), "a frame of kind 77"),
        ((1 << 20, 2, 0, 0, 0, 0), "a frame with 1048576 bytes"),
        ((0, 4, 0, 0, 5, 0), "clear for message 5, which was not offered"),
        ((8, 5, 0, 0, 5, 0), "sends 8 bytes of message 5, which are not due"),
    ],
)
def test_frames_that_cannot_be(frame: tuple[int, ...], detail: str) -> None:
    world = World()
    write(world, frame)
    world.step(1)
    (error,) = world.errors
    assert isinstance(error, BackendError)
    assert detail in str(error)
    assert not world.ranks[1].progress(), "it is said once"


@pytest.mark.parametrize("posted", [False, True])
def test_a_payload_that_is_not_its_elements(posted: bool) -> None:
    world = World()
    guarded = torch.zeros(16, dtype=torch.uint8)
    if posted:
        world.recv(1, 0, guarded[:8])
    world.send(0, 1, torch.ones(8, dtype=torch.uint8))
    start = world.layout.ring_start(0, 1) + 2 * LINE
    struct.pack_into("=I", world.raw, start, 16)
    world.step(1)
    (error,) = world.errors
    assert isinstance(error, BackendError)
    assert "sent 16 bytes for" in str(error)
    assert not guarded.any()


def test_data_beyond_the_end_of_its_message() -> None:
    world = World()
    guarded = torch.zeros(2000, dtype=torch.uint8)
    world.recv(1, 0, guarded[:300])
    world.send(0, 1, torch.ones(300, dtype=torch.uint8))
    world.step(1)
    world.step(0)  # sends all of it
    start = world.layout.ring_start(0, 1) + 2 * LINE
    at = start + LINE  # behind the offer
    assert struct.unpack_from("=II", world.raw, at) == (224, 5)
    struct.pack_into("=I", world.raw, at + 256, 77)  # one more than is left
    world.step(1)
    (error,) = world.errors
    assert "sends 77 bytes of message 0, which are not due" in str(error)
    assert not guarded[300:].any()


def test_a_dtype_that_is_unknown_here() -> None:
    world = World()
    world.recv(1, 0, torch.zeros(1, dtype=torch.uint8))
    write(world, (1, 2, 0, 0xDEAD, 0, 1))
    world.step(1)
    (error,) = world.errors
    assert "a dtype unknown here (code 0xdead)" in str(error)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 1151), st.integers(0, 255)), min_size=1, max_size=20), st.booleans())
def test_scribbles_end_in_an_error_or_in_nothing(scribbles: list[tuple[int, int]], long: bool) -> None:
    world = World()
    guard = torch.zeros(3 * 2000, dtype=torch.uint8)
    world.recv(1, 0, guard[2000 : 2000 + (900 if long else 100)])
    world.recv(1, 0, guard[3000:3050], 1)
    world.send(0, 1, torch.ones(900 if long else 100, dtype=torch.uint8))
    world.send(0, 1, torch.ones(50, dtype=torch.uint8), 1)
    if long:
        world.step(1)
        world.step(0)
    before = bytes(world.raw)
    start = world.layout.ring_start(0, 1)
    for at, value in scribbles:
        world.raw[start + at] = value
    for _ in range(5):
        world.ranks[1].progress()
    assert not guard[:2000].any()
    assert not guard[2900:3000].any()
    assert not guard[3050:].any()
    assert len(world.errors) <= 2
    others = world.layout.ring_start(1, 0)
    assert bytes(world.raw[:start]) == before[:start]
    assert bytes(world.raw[others + 2 * LINE + 1024 :]) == before[others + 2 * LINE + 1024 :]


def test_memory_is_copied_without_the_gil() -> None:
    assert not ctypes.memmove._flags_ & 0x4  # type: ignore[attr-defined]  # FUNCFLAG_PYTHONAPI would keep it
