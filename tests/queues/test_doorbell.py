"""Doorbells wake, and tell an orderly end from a loss."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from asynccomm.queues.doorbell import Doorbell
from tests.waiting import until


def pair(events: list[object]) -> tuple[Doorbell, Doorbell]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    quiet: list[object] = []
    return Doorbell(a, lambda: quiet.append("wake"), quiet.append), Doorbell(
        b, lambda: events.append("wake"), events.append
    )


async def test_a_ring_wakes_the_other_side() -> None:
    events: list[object] = []
    one, other = pair(events)
    one.ring()
    await until(lambda: events == ["wake"])
    one.leave()
    await until(lambda: events[-1] is True)
    assert other.fileno == -1


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_leave_before_the_last_ring_is_read_is_no_loss(run: Callable[..., object]) -> None:
    """The kernel then tells of a reset ahead of the last bytes."""

    async def main() -> None:
        events: list[object] = []
        one, other = pair(events)
        other.ring()
        one.leave()
        await until(lambda: len(events) == 2)
        assert events == ["wake", True]

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_end_before_the_last_ring_is_read_is_a_loss(run: Callable[..., object]) -> None:
    async def main() -> None:
        events: list[object] = []
        one, other = pair(events)
        other.ring()
        one.close()
        await until(lambda: events == [False])
        other.close()

    run(main())


async def test_an_end_without_a_leave_is_a_loss() -> None:
    events: list[object] = []
    one, other = pair(events)
    one.close()
    one.close()
    await until(lambda: events == [False])
    other.ring()  # to no avail, and without an error
    other.leave()


async def test_rings_that_are_not_read_do_not_block() -> None:
    one, other = pair([])
    for _ in range(10_000):
        one.ring()
    one.close()
    other.close()
