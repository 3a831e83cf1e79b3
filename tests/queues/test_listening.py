"""The sockets at which ends attach: strangers, floods of hellos, and silence."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any

import msgspec
import pytest

from asynccomm import BackendError, attach_queue
from asynccomm.control.transport import admission
from asynccomm.queues import listening
from asynccomm.queues.options import QueueHandle
from tests.queues.rings import from_afar, hosted
from tests.waiting import until


def changed(handle: str, **fields: Any) -> str:
    return msgspec.structs.replace(QueueHandle.parse(handle), **fields).text()


async def refused(sock: socket.socket) -> bool:
    """Whether the other side closes the connection without a word."""
    sock.setblocking(False)
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 100), 20) == b""
    except ConnectionResetError:
        return True


async def test_a_stranger_without_the_token_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asynccomm")
    async with hosted(address="127.0.0.1") as (host, queue):
        for handle in (queue.handle, from_afar(queue.handle)):
            with pytest.raises(
                BackendError, match=r"cannot attach to the queue of process .*: it closed the connection"
            ):
                await attach_queue(changed(handle, ask="f" * 32))
        for hello in (b"garbage", b"{}", b"\xff" * 2000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(f"\0{QueueHandle.parse(queue.handle).local}")
                sock.send(hello)
                assert await refused(sock)
            with socket.create_connection(("127.0.0.1", QueueHandle.parse(queue.handle).port)) as sock:
                sock.sendall(len(hello).to_bytes(4, "big") + hello)
                assert await refused(sock)
        assert not host.end.targets
    assert "a queue refused a connection: with a wrong token" in caplog.text


async def test_a_listener_without_the_token_is_refused() -> None:
    async with hosted(address="127.0.0.1") as (_, queue):
        for handle in (queue.handle, from_afar(queue.handle)):
            with pytest.raises(BackendError, match="its token is wrong"):
                await attach_queue(changed(handle, answer="f" * 32))


async def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosted() as (host, queue):
        monkeypatch.setattr(listening, "peer_user", lambda sock: os.geteuid() + 1)
        with pytest.raises(BackendError, match="the queue belongs to user"):
            await attach_queue(queue.handle)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(f"\0{QueueHandle.parse(queue.handle).local}")
        assert await refused(sock)
        sock.close()
        assert not host.end.targets


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HELLO_SECONDS", 0.01)
    async with hosted(address="127.0.0.1") as (_, queue):
        handle = QueueHandle.parse(queue.handle)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(f"\0{handle.local}")
            assert await refused(sock)
        with socket.create_connection(("127.0.0.1", handle.port)) as sock:
            assert await refused(sock)


async def test_a_connection_that_has_just_come_when_the_queue_closes_is_no_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with hosted(address="127.0.0.1") as (host, queue):
        handle = QueueHandle.parse(queue.handle)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as local,
            socket.create_connection(("127.0.0.1", handle.port)) as remote,
        ):
            local.connect(f"\0{handle.local}")
            await until(lambda: host.listener._local.waiting and host.listener._remote.waiting)
            host.listener.close()
            assert await refused(local)
            assert await refused(remote)
    assert not caplog.records


async def test_a_reply_that_comes_as_the_attachment_is_cancelled_is_dropped() -> None:
    loop, errors = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    async with hosted() as (_, queue):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind("")
            server.listen()
            name = server.getsockname()[1:].decode()
            attaching = asyncio.ensure_future(attach_queue(changed(queue.handle, local=name)))
            await asyncio.sleep(0)
            with server.accept()[0] as sock:
                sock.recv(4096)
                descriptors = len(os.listdir("/proc/self/fd"))
                socket.send_fds(sock, [b"reply"], [sock.fileno()])
                loop.call_soon(attaching.cancel)  # runs before the reply is read, in the same iteration of the loop
                with pytest.raises(asyncio.CancelledError):
                    await attaching
                assert len(os.listdir("/proc/self/fd")) == descriptors - 1  # without the socket that attached
    assert not errors


async def test_a_closed_queue_is_not_reached() -> None:
    async with hosted() as (host, queue):
        handle = queue.handle
    host.listener.close()
    await until(lambda: True)
    with pytest.raises(BackendError, match="cannot attach to the queue"):
        await attach_queue(handle)
