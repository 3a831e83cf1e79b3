"""Extents of other ranks' arenas: test_arena.py reads through them, and test_lending.py gives them up."""

import pytest

from asynccomm.backends.shm import peer_memory
from asynccomm.backends.shm.arena import Arena
from asynccomm.backends.shm.peer_memory import PeerMemory
from asynccomm.errors import BackendError


def test_an_extent_is_mapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "MOST_EXTENTS", 2)
    arena = Arena()
    arena.hold()
    tensors = [arena.bytes(1 << 20) for _ in range(3)]
    places = [arena.find(tensor.data_ptr()) for tensor in tensors]
    peers = PeerMemory([arena._reader] * 2)
    found = [peers.address(1, place.start, place.nbytes) for place in places]
    assert len(set(found)) == 3
    assert peers.address(1, places[0].start, places[0].nbytes) == found[0]
    assert not peers.make_room(0), "each rank has its own limit"
    assert peers.make_room(1)
    assert not peers.make_room(1)


def test_a_rank_without_such_an_extent_is_named() -> None:
    arena = Arena()
    arena.hold()
    arena.bytes(1 << 20)
    for peers in (PeerMemory(), PeerMemory([arena._reader] * 2)):
        with pytest.raises(BackendError, match="rank 1 has no tensor at byte 1048576"):
            peers.address(1, 1 << 20, 4096)
    with pytest.raises(BackendError, match="cannot map a tensor of rank 1 of 100 bytes"):
        PeerMemory([arena._reader] * 2).address(1, 1, 100)
