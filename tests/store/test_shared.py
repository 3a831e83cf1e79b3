"""Clients that the comms of a loop share."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from asynccomm.errors import RendezvousError
from asynccomm.store.server import StoreServer, listen, serve
from asynccomm.store.shared import SharedClient


@pytest.fixture
async def hosted() -> AsyncIterator[StoreServer]:
    server = serve("127.0.0.1", listen("127.0.0.1", 0))
    yield server
    server.release()


async def test_users_share_a_client_until_the_last_gives_it_up(hosted: StoreServer) -> None:
    first = await SharedClient.connect("127.0.0.1", hosted.port, 20)
    second = await SharedClient.connect("127.0.0.1", hosted.port, 20)
    assert second.client is first.client
    await first.release()
    await second.client.ping()
    third = await SharedClient.connect("127.0.0.1", hosted.port, 20)
    assert third.client is second.client
    await second.release()
    await third.release()
    assert not third.client.usable
    fourth = await SharedClient.connect("127.0.0.1", hosted.port, 20)
    assert fourth.client is not third.client
    await fourth.client.ping()
    await fourth.release()


async def test_another_timeout_or_server_is_another_client(hosted: StoreServer) -> None:
    first = await SharedClient.connect("127.0.0.1", hosted.port, 20)
    others = [
        await SharedClient.connect("127.0.0.1", hosted.port, 21),
        await SharedClient.connect("127.0.0.1", hosted.port, 20, hosted),
    ]
    assert len({each.client for each in (first, *others)}) == 3
    for each in (first, *others):
        await each.release()


async def test_a_lost_client_is_not_handed_out_again() -> None:
    server = serve("127.0.0.1", listen("127.0.0.1", 0))
    first = await SharedClient.connect("127.0.0.1", server.port, 20)
    server.release()
    async with asyncio.timeout(20):
        while first.client.usable:
            await asyncio.sleep(0.001)
    with pytest.raises(RendezvousError):
        await SharedClient.connect("127.0.0.1", server.port, 0.05)
    server = serve("127.0.0.1", listen("127.0.0.1", server.port))
    second = await SharedClient.connect("127.0.0.1", server.port, 20)
    await second.client.ping()
    await first.release()
    third = await SharedClient.connect("127.0.0.1", server.port, 20)
    assert third.client is second.client, "the end of the lost one is not the end of its successor"
    await second.release()
    await third.release()
    server.release()


async def test_those_who_connect_at_once_may_each_have_one(hosted: StoreServer) -> None:
    all_of_them = await asyncio.gather(*(SharedClient.connect("127.0.0.1", hosted.port, 20) for _ in range(3)))
    for each in all_of_them:
        await each.client.ping()
        await each.release()
    assert not any(each.client.usable for each in all_of_them)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what the loops leave behind
def test_loops_do_not_share_and_are_not_kept(hosted: StoreServer) -> None:
    async def ping() -> weakref.ref[asyncio.AbstractEventLoop]:
        shared = await SharedClient.connect("127.0.0.1", hosted.port, 20)
        await shared.client.ping()  # it is not given up
        return weakref.ref(asyncio.get_running_loop())

    loops = [asyncio.run(ping()) for _ in range(2)]
    gc.collect()
    assert [loop() for loop in loops] == [None, None]
