"""Events of a comm without an event loop."""

from __future__ import annotations

import threading

import torch

from asynccomm import blocking
from asynccomm.blocking.events import BlockingEvents
from asynccomm.observe.events import Event


def test_a_thread_reads_the_events_until_the_comm_closes() -> None:
    found: list[Event] = []
    with blocking.new_comm("loopback", alone=True, name="watched") as comm:
        events = comm.events(size=100)
        reader = threading.Thread(target=lambda: found.extend(events))
        reader.start()
        comm.all_reduce(torch.ones(1)).wait()
        loop = comm.loop
    reader.join(20)
    assert [event.kind for event in found] == ["call", "send", "completion"]
    assert list(events) == []
    assert loop.is_closed()
    assert events.dropped == 0


def test_closing_ends_the_stream_after_the_events_so_far() -> None:
    with blocking.new_comm("loopback", alone=True, name="ended") as comm:
        events = comm.events()
        comm.barrier().wait()
        events.close()
        comm.barrier().wait()
        assert len(list(events)) == 3
        with comm.events() as others:
            assert isinstance(others, BlockingEvents)
            comm.barrier().wait()
        assert list(others) == []
