"""Hosting torch's server."""

from __future__ import annotations

import asyncio
import socket

import pytest
from torch import distributed as dist

from asynccomm.errors import RendezvousError
from asynccomm.store.client import StoreClient
from asynccomm.store.server import listen, serve


async def test_a_hosted_store_serves_torch_and_us() -> None:
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    theirs = dist.TCPStore("127.0.0.1", hosted.port, is_master=False, wait_for_workers=False)
    client = await StoreClient.connect(hosted.host, hosted.port, timeout=20)
    await client.set("k", b"v")
    assert await asyncio.to_thread(theirs.get, "k") == b"v"
    await client.aclose()
    hosted.release()


async def test_clients_may_connect_before_the_server_takes_over() -> None:
    sock = listen("127.0.0.1", 0)
    connecting = asyncio.create_task(StoreClient.connect("127.0.0.1", sock.getsockname()[1], timeout=20))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not connecting.done()
    hosted = await asyncio.to_thread(serve, "127.0.0.1", sock)
    client = await connecting
    assert await client.add("n", 1) == 1
    await client.aclose()
    hosted.release()


async def test_the_server_ends_with_its_last_user() -> None:
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    assert hosted.acquire()
    hosted.release()
    client = await StoreClient.connect("127.0.0.1", hosted.port, timeout=20)
    await client.aclose()
    hosted.release()
    assert not hosted.acquire()
    with pytest.raises(RendezvousError, match="refused"):
        await StoreClient.connect("127.0.0.1", hosted.port, connect_timeout=1.0)


def test_the_same_port_serves_again_at_once() -> None:
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    port = hosted.port
    hosted.release()
    again = serve("127.0.0.1", listen("127.0.0.1", port))
    assert again.port == port
    again.release()


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use"):
            listen("127.0.0.1", port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"cannot resolve 'no\.such\.host\.invalid'.*:1234"):
        listen("no.such.host.invalid", 1234)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
def test_where_it_listens(host: str) -> None:
    with listen(host, 0) as sock:
        port = sock.getsockname()[1]
        target = "::1" if sock.getsockname()[0] == "::1" else "127.0.0.1"
        with socket.create_connection((target, port), timeout=5):
            pass


@pytest.mark.timeout(20)
def test_a_wrong_name_does_not_keep_the_server_from_starting() -> None:
    hosted = serve("no.such.host.invalid", listen("", 0))
    assert hosted.host == "no.such.host.invalid"
    hosted.release()


def test_a_server_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("no more threads\nC++ trace")

    with listen("127.0.0.1", 0) as sock:
        monkeypatch.setattr(dist, "TCPStore", broken)
        monkeypatch.setattr(sock.__class__, "detach", lambda self: self.fileno())
        with pytest.raises(RendezvousError, match=r"cannot host the store at head:\d+: no more threads$"):
            serve("head", sock)
