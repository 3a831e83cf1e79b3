"""Rings and queues for the tests of queues."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from asynccomm import MessageQueue, attach_queue
from asynccomm.backends.shm.segment import Segment, create
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.queues.layout import DATA, SLEEPING, TAIL, map_ring, slot_word
from asynccomm.queues.meeting import QueueHost
from asynccomm.queues.options import QueueOptions
from asynccomm.queues.ring import PythonReader, PythonWriter

_core = load("asynccomm.queues._ring")
ENDS: list[tuple[Any, Any]] = [(PythonWriter, PythonReader)]
if not isinstance(_core, CoreUnavailable):
    ENDS += [(_core.Writer, _core.Reader), (_core.Writer, PythonReader), (PythonWriter, _core.Reader)]


def new_segment(ring: int) -> Segment:
    fd = create(DATA + ring)
    try:
        return map_ring(fd, ring)
    finally:
        os.close(fd)


def ends(kinds: tuple[Any, Any], ring: int, readers: int = 1, drops: bool = False) -> tuple[Segment, Any, list[Any]]:
    """A segment, the writer of its ring, and the readers."""
    segment = new_segment(ring)
    writer = kinds[0](segment.raw, segment.data.data_ptr(), ring, drops)
    writer.set_slots(tuple(range(readers)))
    for slot in range(readers):
        segment.words[slot_word(slot) + TAIL] = segment.words[slot_word(slot) + SLEEPING] = 0
    made = [kinds[1](segment.raw, segment.data.data_ptr(), ring, slot, drops) for slot in range(readers)]
    return segment, writer, made


@asynccontextmanager
async def hosted(writes: bool = True, **options: Any) -> AsyncIterator[tuple[QueueHost, MessageQueue]]:
    """A queue without a comm, to which others attach."""
    host = QueueHost(writes, QueueOptions(**options), -1, "", ())
    async with host.queue(await host.open()) as queue:
        yield host, queue


def from_afar(handle: str) -> str:
    """``handle``, as it looks on another host."""
    data = msgspec.json.decode(handle)
    return msgspec.json.encode({**data, "host": "elsewhere"}).decode()


async def readers_of(queue: MessageQueue, count: int, **options: Any) -> list[MessageQueue]:
    return [await attach_queue(queue.handle, **options) for _ in range(count)]
