"""Descriptions of what moves parcels."""

from __future__ import annotations

import itertools

from asynccomm.ops import MessageSpace, Parcels, RecvParcel, SendParcel
from asynccomm.ops.validation import MAX_TAG


def test_who_gives_and_who_takes() -> None:
    everybody, gather, scatter = Parcels("a"), Parcels("a", taker=1), Parcels("a", giver=2)
    assert [everybody.gives(r) for r in range(3)] == [everybody.takes(r) for r in range(3)] == [True] * 3
    assert [gather.gives(r) for r in range(3)] == [True] * 3
    assert [gather.takes(r) for r in range(3)] == [False, True, False]
    assert [scatter.gives(r) for r in range(3)] == [False, False, True]
    assert [scatter.takes(r) for r in range(3)] == [True] * 3


def test_rank_0_is_a_root_too() -> None:
    assert Parcels("a", giver=0).gives(0)
    assert not Parcels("a", giver=0).gives(1)
    assert str(Parcels("a", giver=0)) == str(Parcels("a", taker=0)) == "a(root=0)"


def test_keys_of_channels_never_meet() -> None:
    tags = [0, 1, 12345, MAX_TAG]
    keys = [channel.key(tag) for channel, tag in itertools.product(MessageSpace, tags)]
    assert len(set(keys)) == len(MessageSpace) * len(tags)
    assert all(0 <= key < 2**30 for key in keys)
    assert MessageSpace.TENSORS.key(7) == 7
    assert MessageSpace.of_key(MessageSpace.STREAMS.key(9)) == (MessageSpace.STREAMS, 9)


def test_only_the_receives_of_streams_are_open_ended() -> None:
    for channel in MessageSpace:
        assert not SendParcel("put", 0, 0, channel).open_ended
        assert RecvParcel("get", 0, 0, channel).open_ended is (channel is MessageSpace.STREAMS)
