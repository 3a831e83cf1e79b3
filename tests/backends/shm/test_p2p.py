"""Tensors from rank to rank: matched, in order, of every kind; and what goes wrong. Parcels are in test_arrivals.py."""

import random
import struct
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.layout import LINE
from asynccomm.errors import BackendError, CollectiveMismatchError
from asynccomm.ops.validation import MAX_TAG
from asynccomm.testing.conformance.data import DTYPES, SHAPES, expect_equal, layouts, sample, sentinel
from tests.cases import cases
from tests.sampling import examples, some

from .ring_world import World, executor, pattern  # noqa: F401

# Around the limits of a ring of 1 KiB: 224 bytes are one frame of DATA, and 256 bytes the most that is short there.
TINY_SIZES = [0, 1, 31, 32, 33, 192, 223, 224, 225, 256, 257, 448, 449, 1023, 1024, 1025, 5000]


@dataclass
class Receive:
    submission: Submission
    named: int | None
    tensor: Tensor


@examples(150)
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


@examples(60)
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


@pytest.mark.parametrize(("ring", "early"), some([(1024, False), (1024, True), (1 << 16, False), (1 << 16, True)], 2))
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


@cases(
    "frame, detail",
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
    world.write(frame)
    world.step(1)
    (error,) = world.errors
    assert isinstance(error, BackendError)
    assert detail in str(error)
    assert not world.ranks[1].progress(), "it is said once"


@cases("posted", [False, True])
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


def test_a_dtype_that_is_unknown_here() -> None:
    world = World()
    world.recv(1, 0, torch.zeros(1, dtype=torch.uint8))
    world.write((1, 2, 0, 0xDEAD, 0, 1))
    world.step(1)
    (error,) = world.errors
    assert "a dtype unknown here (code 0xdead)" in str(error)


@examples(200)
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
    world.scribble(scribbles)
    assert not guard[:2000].any()
    assert not guard[2900:3000].any()
    assert not guard[3050:].any()
    assert len(world.errors) <= 2
