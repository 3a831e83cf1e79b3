"""Fixtures of the tests of the bootstrap."""

import asyncio
import gc
import os
from collections.abc import Callable, Iterator

import pytest
import uvloop

from asynccomm.backends.shm import handshake

from .segment_world import World


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def world_of() -> Iterator[Callable[[int], World]]:
    """Worlds, of which no descriptor is left at the end."""
    uvloop.new_event_loop().close()  # the first one leaves some for the process
    before = descriptors()
    worlds: list[World] = []

    def make(size: int) -> World:
        worlds.append(World(size))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
    assert descriptors() == before


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a rank has connected to rank 0."""
    event = asyncio.Event()
    is_asked = handshake.PeerSide.is_asked

    async def noted(self: handshake.PeerSide) -> bool:
        event.set()
        return await is_asked(self)

    monkeypatch.setattr(handshake.PeerSide, "is_asked", noted)
    return event
