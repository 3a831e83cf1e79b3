"""What comes for a receive: parcels of every size and kind, placed in the order in which they were sent, or refused."""

import gc
import random
import sys
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.shm.arrivals import ParcelArrival, TensorArrival
from asynccomm.backends.shm.endpoint import CLEAR, DATA, OFFER, SHORT
from asynccomm.backends.shm.vectors import address_of
from asynccomm.errors import BackendError, PayloadError, PeerLostError
from asynccomm.ops import MessageSpace
from asynccomm.ops.parcels import MAX_HEAD
from asynccomm.ops.validation import MAX_TAG
from asynccomm.testing.conformance.data import DTYPES, layouts, sample
from tests.cases import cases
from tests.sampling import examples

from .ring_world import Box, World, as_bytes, executor, pattern, text  # noqa: F401

# In a ring of 1 KiB 224 bytes are the most that is short, and that a frame takes.
SIZES = [0, 1, 112, 223, 224, 225, 448, 1025, 5000]


@cases("source", [0, 1], ids=["from a peer", "from itself"])
@cases("early", [False, True], ids=["posted", "early"])
@cases("payload", SIZES)
@cases("head", SIZES)
def test_every_size(head: int, payload: int, early: bool, source: int) -> None:
    world = World()
    box = Box()
    if not early:
        receive = world.recv_parcel(1, source, box)
    send = world.send_parcel(source, 1, text(head), [pattern(payload, 0, 0)])
    if early:
        world.settle()
        receive = world.recv_parcel(1, source, box)
    world.settle()
    assert set(world.done) == {send, receive}
    assert len(world.done) == 2
    assert (box.calls, box.source, box.head) == (1, source, text(head))
    assert torch.equal(box.payload, pattern(payload, 0, 0))
    assert (receive.work.source, receive.error, send.work.source, send.error) == (source, None, None, None)
    assert world.pending == [0, 0]


@pytest.mark.parametrize("source", [0, 1], ids=["from a peer", "from itself"])
@pytest.mark.parametrize("early", [False, True], ids=["posted", "early"])
@pytest.mark.parametrize("ring", [1024, 1 << 17])
def test_tensors_of_every_kind_and_layout_into_every_layout(ring: int, early: bool, source: int) -> None:
    given_ = [t for dtype in DTYPES for shape in ((), (0,), (3, 5)) for _, t in layouts(sample(1, shape, dtype))]
    room = [t for dtype in DTYPES for shape in ((), (0,), (3, 5)) for _, t in layouts(sample(2, shape, dtype))]
    assert as_bytes(given_) != as_bytes(room)
    world = World(2, ring)
    if not early:
        receive = world.recv_parcel(1, source, lambda *_: room)
    world.send_parcel(source, 1, b"all", given_)
    if early:
        world.settle()
        receive = world.recv_parcel(1, source, lambda *_: room)
    world.settle()
    assert receive in world.done
    assert receive.error is None
    assert as_bytes(room) == as_bytes(given_)


@pytest.mark.parametrize("nbytes", [60, 900], ids=["short", "long"])
def test_the_payload_is_divided_otherwise_where_it_comes(nbytes: int) -> None:
    world = World()
    room = [torch.zeros(n, dtype=torch.uint8) for n in (0, nbytes // 2 - 1, 1, nbytes // 2)]
    world.send_parcel(0, 1, b"", [pattern(nbytes, 0, 0).view(torch.float32)])
    world.recv_parcel(1, 0, lambda *_: room)
    world.settle()
    assert torch.equal(torch.cat(room), pattern(nbytes, 0, 0))


def test_autograd_sees_nothing() -> None:
    world = World()
    leaf = torch.ones(200, requires_grad=True)
    room = [torch.zeros(100, requires_grad=True), torch.zeros(2, 50, requires_grad=True).t()]
    world.send_parcel(0, 1, b"", [leaf * 2])
    world.recv_parcel(1, 0, lambda *_: room)
    world.settle()
    assert all(tensor.requires_grad and tensor.sum().item() == 200 for tensor in room)


@pytest.mark.parametrize("head", [5, 500], ids=["short", "long"])
def test_the_memory_of_a_parcel_is_let_go(head: int) -> None:
    world = World()
    tensor = torch.ones(100)
    gone = weakref.ref(tensor)
    world.send_parcel(0, 1, text(head), [tensor])
    del tensor
    world.recv_parcel(1, 0, Box())
    world.settle()
    world.done.clear()
    gc.collect()
    assert gone() is None


def test_nothing_keeps_the_segment_once_it_is_dropped() -> None:
    world = World()
    world.recv_parcel(1, 0, Box())
    world.recv_parcel(1, 0, Box())
    world.send_parcel(0, 1, text(5000), [torch.ones(3000)])
    world.send_parcel(0, 1, text(5))
    world.send_parcel(1, 1, text(5), tag=1)
    world.send_parcel(1, 0, text(5), tag=1)
    world.send_parcel(1, 0, text(500), tag=1)
    world.settle_some(3)
    assert sys.getrefcount(world.words) > 10
    gc.disable()  # a cycle would keep it
    try:
        for rank in world.ranks:
            rank.drop()
            assert rank.pending == 0
            assert not rank.progress()
        del rank
        world.ranks.clear()
        left = sys.getrefcount(world.words)
        assert left == 2, "more than the world and that call"
    finally:
        gc.enable()


# -- who gets what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [5, 500], ids=["short", "long"])
@pytest.mark.parametrize("early", [False, True], ids=["posted", "early"])
def test_channels_and_tags_do_not_mix(nbytes: int, early: bool) -> None:
    """Also where tags of one channel are larger than the keys of another would be without the channel."""
    world = World(2, 4096)
    keys = [(channel, tag) for channel in list(MessageSpace)[1:] for tag in (0, 1, MAX_TAG)]
    boxes = [Box() for _ in keys]
    tensors = {tag: torch.zeros(nbytes, dtype=torch.uint8) for tag in (0, 1, MAX_TAG)}

    def receive() -> None:
        for (channel, tag), box in zip(keys, boxes, strict=True):
            world.recv_parcel(1, None, box, tag, channel)
        for tag, tensor in tensors.items():
            world.recv(1, None, tensor, tag)

    if not early:
        receive()
    for source in (0, 1):
        order = list(enumerate(keys))
        random.Random(source).shuffle(order)
        for i, (channel, tag) in order:
            world.send_parcel(source, 1, text(nbytes, i), tag=tag, channel=channel)
        for tag in (MAX_TAG, 1, 0):
            world.send(source, 1, pattern(nbytes, 0, tag), tag)
        if early:
            world.settle()
            receive()
        world.settle()
        assert not world.errors
        assert [box.head for box in boxes] == [text(nbytes, i) for i in range(len(keys))]
        assert all(torch.equal(tensor, pattern(nbytes, 0, tag)) for tag, tensor in tensors.items())
        assert world.pending == [0, 0]
        if not early and source == 0:
            receive()


def test_a_tensor_never_meets_the_receive_of_a_parcel() -> None:
    world = World()
    for source in (0, 1):
        tensor, box = torch.zeros(3), Box()
        sends = [world.send(source, 1, torch.ones(3)), world.send_parcel(source, 1, b"parcel")]
        world.settle()
        receives = [world.recv_parcel(1, source, box)]
        world.settle()
        assert receives[0] in world.done
        assert box.head == b"parcel"
        receives.append(world.recv(1, source, tensor))
        world.settle()
        assert {*sends, *receives} <= {*world.done}
        assert tensor.tolist() == [1, 1, 1]
    assert not world.errors


@cases("side", ["send", "recv"])
def test_no_parcel_is_on_the_channel_of_tensors(side: str) -> None:
    world = World()
    with pytest.raises(AssertionError, match="would meet tensors"):
        if side == "send":
            world.send_parcel(0, 1, b"", channel=MessageSpace.TENSORS)
        else:
            world.recv_parcel(0, 1, Box(), channel=MessageSpace.TENSORS)


@pytest.mark.parametrize("early", [False, True], ids=["posted", "early"])
def test_any_source_takes_each_sender_s_in_order(early: bool) -> None:
    world = World(4)
    boxes = [Box() for _ in range(40)]
    if not early:
        receives = [world.recv_parcel(3, None, box) for box in boxes]
    choose = random.Random(1)
    left = {source: list(range(10)) for source in range(4)}
    while any(left.values()):
        source = choose.choice([source for source, numbers in left.items() if numbers])
        number = left[source].pop(0)
        nbytes = choose.choice(SIZES)
        world.send_parcel(source, 3, text(choose.choice([10, 300]), number), [pattern(nbytes, source, number)])
        if choose.random() < 0.5:
            world.step(choose.randrange(4))
    if early:
        receives = [world.recv_parcel(3, None, box) for box in boxes]
    world.settle(choose)
    taken: defaultdict[int, int] = defaultdict(int)
    for box, receive in zip(boxes, receives, strict=True):
        assert receive.work.source == box.source
        number = taken[box.source]
        assert box.head == text(len(box.head), number)
        assert torch.equal(box.payload, pattern(len(box.payload), box.source, number))
        taken[box.source] += 1
    assert taken == dict.fromkeys(range(4), 10)
    assert world.pending == [0] * 4


@pytest.mark.parametrize("early", [False, True], ids=["posted", "early"])
@pytest.mark.parametrize("second", [0, 5, 300], ids=["empty", "short", "long"])
def test_a_parcel_waits_for_the_head_of_the_one_before_it(second: int, early: bool) -> None:
    world = World()
    boxes = [Box(), Box(), Box()]
    if not early:
        for box in boxes:
            world.recv_parcel(1, 0, box)
    world.send_parcel(0, 1, text(3000), [torch.ones(3000)])
    world.send_parcel(0, 1, text(second, 1), [torch.ones(3)])
    world.send_parcel(0, 1, b"", [torch.ones(5000)])
    if early:
        world.step(1)
        for box in boxes:
            world.recv_parcel(1, 0, box)
    seen = set()
    for _ in range(200):
        world.settle_some(1)
        calls = tuple([box.calls for box in boxes])
        assert calls in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1))
        seen.add((*calls, len(world.done)))
    assert any(calls[:3] == (0, 0, 0) for calls in seen), "the head is longer than the ring"
    assert world.pending == [0, 0]
    assert [box.head for box in boxes] == [text(3000), text(second, 1), b""]


def test_a_parcel_does_not_wait_for_the_payload_of_the_one_before_it() -> None:
    world = World()
    first, second = Box(), Box()
    world.recv_parcel(1, 0, first)
    receive = world.recv_parcel(1, 0, second)
    world.send_parcel(0, 1, text(10), [torch.ones(10_000)])
    world.send_parcel(0, 1, b"short")
    world.settle_some(4)
    assert receive in world.done
    assert first.payload.eq(255).any(), "it has all come already"
    world.settle()
    assert world.pending == [0, 0]


def test_many_both_ways() -> None:
    world = World(3)
    boxes: dict[tuple[int, int, int], Box] = {}
    for i in range(20):
        for source in range(3):
            for destination in range(3):
                box = boxes[source, destination, i] = Box()
                world.recv_parcel(destination, source, box, i % 2)
                world.send_parcel(source, destination, text(i * 20, i), [pattern(1000 - 50 * i, source, i)], i % 2)
    world.settle(random.Random(0))
    for (source, _, i), box in boxes.items():
        assert box.head == text(i * 20, i)
        assert torch.equal(box.payload, pattern(1000 - 50 * i, source, i))
    assert world.pending == [0, 0, 0]


def test_the_receive_grows_when_it_is_known_what_comes() -> None:
    world = World()
    for expected in (0, 300, 5000):
        receive = world.recv_parcel(1, 0, Box(), expected=expected)
        world.send_parcel(0, 1, text(100), [torch.ones(1000)])
        world.step(1)
        assert world.grown == ([(receive, 4100)] if expected < 4100 else [])
        world.grown.clear()
        world.settle()
    world.recv_parcel(1, 0, Box())
    world.send_parcel(0, 1, text(100))
    world.settle()
    assert world.grown == [], "short ones are over by then"


# -- refusals ---------------------------------------------------------------------------------------------------------


class Refusal:
    """A place that takes nothing."""

    def __init__(self, error: BaseException | None, room: Sequence[Tensor] = ()) -> None:
        self.error = error
        self.room = room

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        if self.error is not None:
            raise self.error
        return self.room


@pytest.mark.parametrize("source", [0, 1], ids=["from a peer", "from itself"])
@pytest.mark.parametrize("early", [False, True], ids=["posted", "early"])
@pytest.mark.parametrize("nbytes", [0, 100, 5000], ids=["empty", "short", "long"])
@pytest.mark.parametrize("head", [5, 500], ids=["short head", "long head"])
def test_what_is_refused_is_thrown_away_and_the_next_one_comes(
    head: int, nbytes: int, early: bool, source: int
) -> None:
    world = World()
    error, box = PayloadError("no"), Box()
    if not early:
        receives = [world.recv_parcel(1, source, Refusal(error)), world.recv_parcel(1, source, box)]
    sends = [world.send_parcel(source, 1, text(head, i), [pattern(nbytes, 0, i)]) for i in range(2)]
    if early:
        world.settle()
        receives = [world.recv_parcel(1, source, Refusal(error)), world.recv_parcel(1, source, box)]
    world.settle()
    assert set(world.done) == {*sends, *receives}
    assert not world.errors
    assert receives[0].error is error
    assert receives[0].work.source == source
    assert receives[1].error is None
    assert box.head == text(head, 1)
    assert torch.equal(box.payload, pattern(nbytes, 0, 1))
    assert world.pending == [0, 0]


@pytest.mark.parametrize("nbytes", [100, 5000], ids=["short", "long"])
def test_what_place_raises_is_the_cause(nbytes: int) -> None:
    world = World()
    receive = world.recv_parcel(1, 0, Refusal(KeyError("x")))
    world.send_parcel(0, 1, b"", [pattern(nbytes, 0, 0)])
    world.settle()
    assert isinstance(receive.error, PayloadError)
    assert isinstance(receive.error.__cause__, KeyError)
    assert "what rank 0 sent cannot be taken: KeyError" in str(receive.error)
    assert receive in world.done


@pytest.mark.parametrize("source", [0, 1], ids=["from a peer", "from itself"])
@pytest.mark.parametrize(("sent", "room"), [(100, 99), (100, 101), (0, 1), (1, 0), (5000, 4999), (5000, 5001)])
def test_a_place_of_another_size_is_named_and_not_touched(sent: int, room: int, source: int) -> None:
    world = World()
    memory = torch.full((room + 2,), 7, dtype=torch.uint8)
    receive = world.recv_parcel(1, source, Refusal(None, [memory[1:-1]]))
    send = world.send_parcel(source, 1, b"head", [pattern(sent, 0, 0)])
    world.settle()
    assert str(receive.error) == f"rank {source} sent {sent} bytes where {room} fit"
    assert memory.unique().tolist() == [7]
    assert {send, receive} == {*world.done}


@pytest.mark.parametrize("source", [0, 1], ids=["from a peer", "from itself"])
@pytest.mark.parametrize("nbytes", [100, 5000], ids=["short", "long"])
def test_an_error_that_breaks_the_comm_does_so(nbytes: int, source: int) -> None:
    world = World()
    receive = world.recv_parcel(1, source, Refusal(error := PeerLostError(0, "as if")))
    send = world.send_parcel(source, 1, b"", [pattern(nbytes, 0, 0)])
    world.settle()
    assert world.errors == [error]
    assert receive not in world.done
    assert send in world.done
    assert world.pending == [0, 0]


def test_strided_memory_is_written_at_the_end_and_not_where_a_payload_was_refused() -> None:
    world = World()
    room = torch.zeros(1000, 2)
    receive = world.recv_parcel(1, 0, Refusal(None, [room[:, 1]]))
    world.send_parcel(0, 1, b"", [torch.ones(1000)])
    world.settle_some(4)
    assert not room.any()
    world.settle()
    assert room.sum(0).tolist() == [0, 1000]
    assert receive in world.done


# -- what others have written -----------------------------------------------------------------------------------------

OBJECTS = MessageSpace.OBJECTS.key(0)


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize(
    ("frame", "detail"),
    [
        ((10, SHORT, OBJECTS, 5, 0, 6), "sent 10 bytes for a parcel of 5 and 6"),
        ((10, SHORT, OBJECTS, 5, 0, 4), "sent 10 bytes for a parcel of 5 and 4"),
        ((10, SHORT, OBJECTS, 11, 0, 2**64 - 1), "sent 10 bytes for a parcel of 11 and 18446744073709551615"),
        ((0, OFFER, OBJECTS, MAX_HEAD + 1, 0, 0), f"a head of {MAX_HEAD + 1} bytes, of which {MAX_HEAD} are taken"),
        ((0, OFFER, OBJECTS, 2**32 - 1, 0, 0), "a head of 4294967295 bytes"),
        ((0, CLEAR, OBJECTS, 0, 5, 0), "clear for message 5, which was not offered"),
        ((8, DATA, OBJECTS, 0, 5, 0), "sends 8 bytes of message 5, which are not due"),
    ],
)
def test_frames_that_cannot_be(frame: tuple[int, ...], detail: str, posted: bool) -> None:
    world = World()
    box = Box()
    if posted:
        world.recv_parcel(1, 0, box)
    world.write(frame, payload=bytes(frame[0]))
    world.step(1)
    (error,) = world.errors
    assert isinstance(error, BackendError)
    assert detail in str(error)
    assert box.calls == 0
    assert not world.ranks[1].progress(), "it is said once"


def test_the_largest_head_may_come() -> None:
    world = World()
    world.recv_parcel(1, 0, Box())
    world.write((0, OFFER, OBJECTS, MAX_HEAD, 0, 0))
    world.step(1)
    assert not world.errors
    assert world.ranks[1].pending == 1


def test_a_payload_that_cannot_be_is_refused() -> None:
    world = World()

    def place(source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        return [torch.empty(lengths[source], dtype=torch.uint8)]

    receive = world.recv_parcel(1, 0, place)
    world.write((0, OFFER, OBJECTS, 0, 0, 2**64 - 1))
    world.step(1)
    world.write((8, DATA, 0, 0, 0, 0), 64, bytes(8))
    world.step(1)
    assert not world.errors
    assert receive not in world.done, "the rest is awaited"


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 1151), st.integers(0, 255)), min_size=1, max_size=20), st.booleans())
def test_scribbles_end_in_an_error_or_in_nothing(scribbles: list[tuple[int, int]], long: bool) -> None:
    world = World()
    guard = torch.zeros(3 * 2000, dtype=torch.uint8)
    world.recv_parcel(1, 0, lambda *_: [guard[2000 : 2000 + (900 if long else 100)]])
    world.recv_parcel(1, 0, lambda *_: [guard[3000:3050]], 1)
    world.send_parcel(0, 1, text(20), [torch.ones(900 if long else 100, dtype=torch.uint8)])
    world.send_parcel(0, 1, text(20), [torch.ones(50, dtype=torch.uint8)], 1)
    if long:
        world.step(1)
        world.step(0)
    world.scribble(scribbles)
    assert not guard[:2000].any()
    assert not guard[2900:3000].any()
    assert not guard[3050:].any()
    assert len(world.errors) <= 2


# -- at random --------------------------------------------------------------------------------------------------------


@dataclass
class Sent:
    head: bytes
    payload: bytes


@dataclass(eq=False)
class Taker:
    """A receive of a parcel, which takes it in one of several ways."""

    log: list["Taker"]
    manner: str
    source: int = -1
    head: bytes = b""
    room: list[Tensor] = field(default_factory=list)

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        self.log.append(self)
        self.source, self.head = source, head
        n = lengths[source]
        if self.manner == "raises":
            raise ValueError("not wanted")
        if self.manner == "strided":
            self.room = [torch.zeros(n, 2, dtype=torch.uint8)[:, 0]]
        elif self.manner == "pieces":
            self.room = list(torch.zeros(n, dtype=torch.uint8).split([n // 3, 0, n - n // 3]))
        else:
            self.room = [torch.zeros(n + (self.manner == "wrong"), dtype=torch.uint8)]
        return self.room


@examples(200)
@given(st.data())
def test_random_parcels_and_tensors(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4), label="ranks")
    world = World(size, data.draw(st.sampled_from([1024, 1088, 4096]), label="ring"))
    choose = random.Random(data.draw(st.integers(0, 1 << 30), label="seed"))
    rank = st.integers(0, size - 1)
    keys = data.draw(
        st.lists(
            st.tuples(st.sampled_from(list(MessageSpace)), st.sampled_from([0, 5, MAX_TAG])),
            min_size=1,
            max_size=3,
            unique=True,
        ),
        label="keys",
    )
    moves = st.tuples(st.sampled_from(["send", "recv", "any", "step"]), rank, rank, st.sampled_from(keys))
    sent: defaultdict[tuple[int, int, tuple[MessageSpace, int]], list[Sent]] = defaultdict(list)
    placed: defaultdict[tuple[int, tuple[MessageSpace, int]], list[Taker]] = defaultdict(
        list
    )  # in order, by destination
    receives: list[tuple[Submission, Taker | Tensor, int, tuple[MessageSpace, int], int | None]] = []
    for what, one, other, key in data.draw(st.lists(moves, max_size=80), label="moves"):
        channel, tag = key
        if what == "step":
            world.step(one)
        elif what == "send":
            number = len(sent[one, other, key])
            payload = pattern(choose.choice(SIZES) if channel else 300, one, number)
            head = text(choose.choice([0, 4, 30, 300, 1500]), number) if channel else b""
            sent[one, other, key].append(Sent(head, bytes(payload.tolist())))
            if channel:
                cut = choose.randrange(len(payload) + 1)
                pair = torch.stack([payload, payload], 1)[:, 1]  # strided
                world.send_parcel(one, other, head, choose.choice([[pair], [payload[:cut], pair[cut:]]]), tag, channel)
            else:
                world.send(one, other, payload, tag)
        else:
            source = None if what == "any" else other
            if channel:
                manner = choose.choice(["plain", "plain", "pieces", "strided", "raises", "wrong"])
                taker = Taker(placed[one, key], manner)
                receives.append((world.recv_parcel(one, source, taker, tag, channel), taker, one, key, source))
            else:
                tensor = torch.zeros(300, dtype=torch.uint8)
                receives.append((world.recv(one, source, tensor, tag), tensor, one, key, source))
    world.settle(choose)
    assert not world.errors
    done = {id(submission) for submission in world.done}
    assert len(done) == len(world.done), "something was done twice"

    order: defaultdict[tuple[int, int, tuple[MessageSpace, int]], list[Taker | Tensor]] = defaultdict(list)
    for (destination, key), takers in placed.items():
        for taker in takers:
            order[taker.source, destination, key].append(taker)
    for submission, taken, destination, key, named in receives:
        if id(submission) in done:
            source = submission.work.source
            assert source is not None
            assert named in (None, source)
            if isinstance(taken, Tensor):
                order[source, destination, key].append(taken)
            else:
                assert taken.source == source
                assert isinstance(submission.error, PayloadError) == (taken.manner in ("raises", "wrong"))
        else:
            for source in range(size) if named is None else [named]:
                matched = order[source, destination, key]
                assert len(matched) <= len(sent[source, destination, key])
    for (source, destination, key), taken_here in order.items():
        for expected, item in zip(sent[source, destination, key], taken_here, strict=False):
            if isinstance(item, Tensor):
                assert as_bytes([item]) == expected.payload
            else:
                assert item.head == expected.head
                if item.manner not in ("raises", "wrong"):
                    assert as_bytes(item.room) == expected.payload
    for submission, _, destination, key, named in receives:
        if id(submission) not in done:
            for source in range(size) if named is None else [named]:
                left = len(sent[source, destination, key]) - len(order[source, destination, key])
                assert left == 0, "a message was held back"
    assert sum(world.pending) == sum(map(len, sent.values())) + len(receives) - len(done)


# -- alone ------------------------------------------------------------------------------------------------------------


def test_a_parcel_byte_by_byte() -> None:
    world = World()
    receive = world.recv_parcel(0, 1, box := Box())
    arrival = ParcelArrival(receive, 1, 3, 2)
    data = b"abcde"
    found = [arrival.take(0, 0)]
    found += [arrival.take(address_of(data) + i, 1) for i in range(5)]
    assert found == [False, False, False, True, False, False]
    assert arrival.left == 0
    arrival.finish(1)
    assert (box.head, bytes(box.payload.tolist())) == (b"abc", b"de")
    assert receive.work.source == 1


def test_a_parcel_without_a_head_is_placed_at_once() -> None:
    world = World()
    arrival = ParcelArrival(world.recv_parcel(0, 1, box := Box()), 1, 0, 4)
    assert arrival.take(0, 0)
    assert box.calls == 1
    assert not arrival.take(0, 0)
    assert arrival.left == 4


def test_a_tensor_lands_at_its_end() -> None:
    world = World()
    room = torch.zeros(2, 2, dtype=torch.uint8)
    arrival = TensorArrival(receive := world.recv(0, 1, room.t()))
    data = b"\1\2\3\4"
    for i in range(4):
        assert arrival.left == 4 - i
        assert not arrival.take(address_of(data) + i, 1)
    assert not room.any()
    arrival.finish(1)
    assert room.tolist() == [[1, 3], [2, 4]]
    assert receive.work.source == 1
