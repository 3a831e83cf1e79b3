"""How messages travel: short and long, in turn and within limits, whatever they carry."""

import ctypes
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asynccomm.backends.shm.arrivals import TensorArrival
from asynccomm.backends.shm.endpoint import DATA, OFFER, SHORT, SHORT_BYTES, TRIAL, Link, Ways
from asynccomm.backends.shm.executor import Pace
from asynccomm.backends.shm.layout import LINE
from asynccomm.backends.shm.p2p import Messages
from asynccomm.backends.shm.rings import framed, largest_payload
from asynccomm.errors import BackendError
from asynccomm.ops import MessageSpace, Send
from tests.cases import cases

from .ring_world import Box, World, executor, pattern, text  # noqa: F401


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


def test_frames_of_long_messages_move_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    if not World.native(1):
        pytest.skip("Python moves them")
    monkeypatch.setattr(TensorArrival, "take", None)
    monkeypatch.setattr(Link, "_stream", None if World.native(0) else Link._stream)
    world = World()
    output = torch.zeros(20_000, dtype=torch.uint8)
    world.recv(1, 0, output)
    world.send(0, 1, pattern(20_000, 1, 2))
    world.settle()
    assert torch.equal(output, pattern(20_000, 1, 2))


def test_ranks_that_move_messages_at_once() -> None:
    """On threads that C drives without the GIL; with a thread sanitizer this checks the order of memory accesses."""
    world = World(2, 4096)
    outputs = {}
    for source in range(2):
        for tag, nbytes in enumerate((100_000, 5000, 300, 200_000)):
            outputs[source, tag] = torch.zeros(nbytes, dtype=torch.uint8)
            world.recv(1 - source, source, outputs[source, tag], tag)
            world.send(source, 1 - source, pattern(nbytes, source, tag), tag)

    def run(rank: Messages) -> None:
        while rank.pending:
            if not rank.progress(Pace(1e-4)):
                os.sched_yield()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, rank) for rank in world.ranks]:
            done.result(60)
    for (source, tag), output in outputs.items():
        assert torch.equal(output, pattern(output.nbytes, source, tag))


def test_a_frame_of_another_rank_ends_a_transfer_that_waits() -> None:
    world = World(3)
    output = torch.zeros(1)
    world.recv(1, 0, torch.zeros(20_000))
    world.send(0, 1, torch.ones(20_000))
    for rank in (1, 0, 1, 0, 1):  # on its way, and then its sender does nothing more
        world.ranks[rank].progress()
    last = world.recv(1, 2, output)
    world.send(2, 1, torch.ones(1))
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(world.ranks[1].progress, Pace(1e6)).result(20)
        finally:
            if (segment := world.ranks[1]._segment) is not None:
                segment.interrupt()
    assert last in world.done


def test_an_interrupted_transfer_reads_no_more_than_the_ring_holds() -> None:
    """However fast its sender is."""
    if not (World.native(0) and World.native(1)):
        pytest.skip("Python moves them")
    world, nbytes = World(2, 4096), 200_000
    output = torch.zeros(nbytes, dtype=torch.uint8)
    world.recv(1, 0, output)
    world.send(0, 1, torch.ones(nbytes, dtype=torch.uint8))
    for rank in (1, 0, 1):
        world.ranks[rank].progress()
    sender, receiver = world.ranks
    segment = receiver._segment
    assert segment is not None

    def send() -> None:
        while sender.pending:
            sender.progress(Pace(1e-3))

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(send)
        segment.interrupt()
        while receiver.pending:
            before = int(receiver._links[0].state.tail)
            receiver.progress(Pace(1e-3))
            assert receiver._links[0].state.tail - before <= 2 * 4096  # in C, and in Python behind it
        done.result(60)
    assert output.eq(1).all()


def test_wrong_transfers_are_refused() -> None:
    if not World.native(0):
        pytest.skip("Python moves them")
    segment = World().ranks[0]._segment
    assert segment is not None
    for peer, nbytes, frame in (0, 8, 64), (2, 8, 64), (-1, 8, 64), (1, 0, 64), (1, 8, 0), (1, 8, 225):
        with pytest.raises(ValueError, match=r"a (transfer|frame) of"):
            segment.transfer(((peer, True, 0, 4096, nbytes),), frame, 0.0, 0.0, -1)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        segment.link(2)


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


@cases("nbytes", [0, 8, 200])
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
    for nbytes in (
        SHORT_BYTES - 1,
        SHORT_BYTES,
        SHORT_BYTES + 1,
        largest_payload(ring),
        largest_payload(ring) + 1,
        3 * ring + 5,
    ):
        world = World(2, ring)
        output = torch.zeros(nbytes, dtype=torch.uint8)
        send = world.send(0, 1, pattern(nbytes, 0, 1))
        assert (send in world.done) == (nbytes <= SHORT_BYTES)
        world.recv(1, 0, output)
        world.settle()
        assert torch.equal(output, pattern(nbytes, 0, 1))


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


def test_memory_is_copied_without_the_gil() -> None:
    assert not ctypes.memmove._flags_ & 0x4  # type: ignore[attr-defined]  # FUNCFLAG_PYTHONAPI would keep it


# -- parcels ----------------------------------------------------------------------------------------------------------


def kinds(world: World, source: int = 0, destination: int = 1) -> list[int]:
    """Of the frames that wait in a ring which has not been read yet."""
    start = world.layout.ring_start(source, destination)
    found, at = [], 0
    while at < world.words[start // 8]:
        nbytes, kind = struct.unpack_from("=II", world.raw, start + 2 * LINE + at)
        found.append(kind)
        at += framed(nbytes)
    return found


@pytest.mark.parametrize("parts", [(256,), (0, 256), (256, 0), (100, 156), (1, 1, 254)], ids=str)
@pytest.mark.parametrize("over", [0, 1])
def test_a_short_parcel_is_one_frame(parts: tuple[int, ...], over: int) -> None:
    world = World()
    head, *payload = parts
    send = world.send_parcel(0, 1, text(head + over), [pattern(n, 0, i) for i, n in enumerate(payload)])
    assert kinds(world) == ([OFFER] if over else [SHORT])
    assert (send in world.done) is not over
    box = Box()
    world.recv_parcel(1, 0, box)
    world.settle()
    assert (box.head, len(box.payload)) == (text(head + over), sum(payload))
    assert world.pending == [0, 0]


def test_a_long_head_and_payload_share_frames() -> None:
    world = World(2, 4096)
    tensors = [pattern(40, 0, i) for i in range(40)]
    world.recv_parcel(1, 0, box := Box())
    world.send_parcel(0, 1, text(50), tensors)
    world.step(1)
    world.step(0)
    assert kinds(world) == [OFFER, DATA, DATA], "as few frames as there can be"
    world.settle()
    assert box.head == text(50)
    assert torch.equal(box.payload, torch.cat(tensors))


def test_the_default_limits_of_parcels_meet() -> None:
    ring = 1 << 20
    for nbytes in (SHORT_BYTES, SHORT_BYTES + 1, largest_payload(ring) + 1, 3 * ring + 5):
        for head in (0, 5, nbytes - 5, nbytes):
            world = World(2, ring)
            box, source = Box(), pattern(nbytes - head, 0, 1)
            send = world.send_parcel(0, 1, text(head), [source])
            assert (send in world.done) == (nbytes <= SHORT_BYTES)
            world.recv_parcel(1, 0, box)
            world.settle()
            assert send in world.done
            assert box.head == text(head)
            assert torch.equal(box.payload, source)


@cases("nbytes", [0, 8, 200])
def test_parcels_that_come_unexpected_are_bounded(nbytes: int) -> None:
    """With tensors: there is one limit for both."""
    world = World()
    count = 250
    for i in range(count):
        world.send_parcel(0, 1, text(nbytes // 2), [pattern(nbytes - nbytes // 2, 0, i)])
        world.send(0, 1, pattern(nbytes, 0, i))
    world.settle()
    early = len(world.done)
    assert 0 < early * framed(nbytes) <= 1024
    boxes = [Box() for _ in range(count)]
    for box in boxes:
        world.recv_parcel(1, 0, box)
        world.recv(1, 0, torch.zeros(nbytes, dtype=torch.uint8))
    world.settle()
    assert world.pending == [0, 0]
    for i, box in enumerate(boxes):
        assert torch.equal(box.payload, pattern(nbytes - nbytes // 2, 0, i))
    for _ in range(3):
        assert world.send_parcel(0, 1, text(nbytes)) in world.done, "what was matched no longer counts"


def test_what_has_its_receive_never_counts() -> None:
    world = World()
    for i in range(100):
        world.recv_parcel(1, 0, box := Box())
        world.recv(1, 0, output := torch.zeros(50, dtype=torch.uint8))
        sends = [world.send_parcel(0, 1, text(50, i)), world.send(0, 1, pattern(50, 0, i))]
        assert {*sends} <= {*world.done}, "as short ones, in the call"
        world.step(1)
        assert box.head == text(50, i)
        assert torch.equal(output, pattern(50, 0, i))


def test_parcels_in_line_behind_a_long_head_count_as_unmatched() -> None:
    world = World()
    first = Box()
    world.recv_parcel(1, 0, first)
    world.send_parcel(0, 1, text(5000))
    boxes = [Box() for _ in range(40)]
    for i, box in enumerate(boxes):
        world.recv_parcel(1, 0, box)
        world.send_parcel(0, 1, text(100, i))
    world.step(1)
    taken = world.words[(world.layout.ring_start(0, 1) + LINE) // 8 + 1]
    assert taken == 0, "they are still kept"
    world.settle()
    assert [box.head for box in boxes] == [text(100, i) for i in range(40)]
    assert world.pending == [0, 0]


def test_parcels_do_not_hold_up_each_other_across_tags_channels_and_pairs() -> None:
    world = World(3)
    world.recv_parcel(1, 0, Box())
    world.send_parcel(0, 1, text(3000))  # its head is awaited
    world.settle_some(4)
    for tag in range(1, 5):  # long ones that nobody wants yet
        world.send_parcel(0, 1, b"", [torch.ones(2000)], tag)
    boxes = [Box() for _ in range(4)]
    late = world.recv_parcel(1, 0, Box(), 77)
    sends = [
        world.send_parcel(0, 1, b"tag", tag=9),
        world.send_parcel(0, 1, b"channel", channel=MessageSpace.STREAMS),
        world.send_parcel(2, 1, b"pair"),
    ]
    receives = [
        world.recv_parcel(1, 0, boxes[0], 9),
        world.recv_parcel(1, 0, boxes[1], channel=MessageSpace.STREAMS),
        world.recv_parcel(1, 2, boxes[2]),
    ]
    world.settle()
    assert {*sends, *receives} <= {*world.done}
    assert late not in world.done
    assert [box.head for box in boxes] == [b"tag", b"channel", b"pair", b""]


def test_long_parcels_and_tensors_advance_in_turn() -> None:
    world = World()
    box, output = Box(), torch.zeros(20_000, dtype=torch.uint8)
    world.recv_parcel(1, 0, box)
    world.recv(1, 0, output)
    world.send_parcel(0, 1, b"head", [torch.ones(20_000, dtype=torch.uint8)])
    world.send(0, 1, torch.ones(20_000, dtype=torch.uint8))
    world.settle_some(10)
    arrived = [int(box.payload.eq(1).sum()), int(output.sum())]
    assert min(arrived) > 0
    assert max(arrived) - min(arrived) <= 1024
    world.settle()
    assert box.payload.eq(1).all()
    assert output.eq(1).all()


def test_parcels_under_way_come_back_when_the_peer_is_gone() -> None:
    world = World()
    posted = world.recv_parcel(1, 0, Box(), 9)
    receives = [world.recv_parcel(1, 0, Box()) for _ in range(3)]  # one awaits its head, two stand in line behind it
    payload = world.recv_parcel(1, 0, box := Box(), 1)
    sends = [
        world.send_parcel(0, 1, text(5000)),
        world.send_parcel(0, 1, text(5)),
        world.send_parcel(0, 1, text(300)),
        world.send_parcel(0, 1, b"", [torch.ones(2000)], 1),
        world.send_parcel(0, 1, text(300), tag=2),
    ]
    world.settle_some(6)
    assert box.calls == 1
    unfinished = [send for send in sends if send not in world.done]
    assert len(unfinished) == 4
    lost = world.ranks[1].gone(0)
    assert sorted(map(id, lost)) == sorted(map(id, [posted, *receives, payload]))
    assert sorted(map(id, world.ranks[0].gone(1))) == sorted(map(id, unfinished))
    assert world.pending == [0, 0]
    assert world.ranks[1].gone(0) == []
    late = world.recv_parcel(1, 0, Box(), 2)  # its offer has come
    assert world.ranks[1].gone(0) == [late]
    assert not any(rank.progress() for rank in world.ranks)
    assert not world.errors


def test_nothing_is_sent_to_a_peer_that_has_gone() -> None:
    world = World()
    world.send_parcel(1, 0, text(500))
    world.ranks[0].gone(1)
    sends = [world.send_parcel(0, 1, b"short"), world.send(0, 1, torch.ones(1))]
    receive = world.recv_parcel(0, 1, Box())  # finds the offer
    assert not world.ranks[0].progress()
    assert world.done == []
    assert world.ranks[0].gone(1) == [*sends, receive]


def test_a_parcel_that_was_sent_before_the_peer_went_still_arrives() -> None:
    world = World()
    world.send_parcel(0, 1, b"head", [torch.ones(3)])
    world.ranks[1].gone(0)
    receive = world.recv_parcel(1, 0, box := Box())
    assert receive in world.done
    assert (box.head, len(box.payload)) == (b"head", 12)


# -- what others have written -----------------------------------------------------------------------------------------


@cases("with_head", [False, True])
def test_data_beyond_the_end_of_a_parcel(with_head: bool) -> None:
    world = World()
    guarded = torch.zeros(2000, dtype=torch.uint8)
    world.recv_parcel(1, 0, lambda *_: [guarded[:300]])
    world.send_parcel(0, 1, b"head" if with_head else b"", [torch.ones(300, dtype=torch.uint8)])
    world.step(1)
    world.step(0)  # sends all of it
    assert kinds(world) == [OFFER, DATA, DATA]
    at = world.layout.ring_start(0, 1) + 2 * LINE + LINE + 256
    left = struct.unpack_from("=I", world.raw, at)[0]
    struct.pack_into("=I", world.raw, at, left + 1)
    world.step(1)
    (error,) = world.errors
    assert isinstance(error, BackendError)
    assert f"sends {left + 1} bytes of message 0, which are not due" in str(error)
    assert not guarded[300:].any()


def test_data_of_nothing() -> None:
    world = World()
    world.recv_parcel(1, 0, Box())
    world.write((0, OFFER, MessageSpace.OBJECTS.key(0), 100, 7, 0))
    world.write((0, DATA, 0, 0, 7, 0), LINE)
    world.step(1)
    (error,) = world.errors
    assert "sends 0 bytes of message 7, which are not due" in str(error)


def test_an_ident_that_is_in_use() -> None:
    world = World()
    for tag in (1, 2):
        world.recv_parcel(1, 0, Box(), tag)
        world.write((0, OFFER, MessageSpace.OBJECTS.key(tag), 100, 7, 0), LINE * (tag - 1))
    world.step(1)
    (error,) = world.errors
    assert isinstance(error, BackendError)
    assert "rank 0 has offered message 7 twice" in str(error)


def test_the_faster_way_is_taken_once_both_are_known_and_the_other_is_tried_now_and_then() -> None:
    ways = Ways()
    assert not ways.is_reading_faster()
    ways.note(False, 2.0, 10)
    assert ways.is_reading_faster(), "not known yet"
    ways.note(True, 1.0, 10)
    chosen = [ways.is_reading_faster() for _ in range(2 * TRIAL)]
    assert chosen.count(False) == 2
    for _ in range(20):
        ways.note(True, 100.0, 10)  # a mean that follows, and not at once
        slower = [ways.is_reading_faster() for _ in range(2)]
    assert slower == [False, False]
    ways = Ways()
    ways.note(False, 2.0, 1)
    ways.note(True, 1.0, 1)
    ways.note(True, 3600.0, 1)
    assert ways.is_reading_faster(), "one interruption counts for little"
