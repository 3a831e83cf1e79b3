"""Lines that carry descriptors."""

import asyncio
import errno
import gc
import os
import socket
from collections.abc import Callable, Iterator

import pytest
import uvloop

from asynccomm.backends.shm import fd_socket
from asynccomm.backends.shm.fd_socket import Datagram, FdBag, FdSocket
from tests.waiting import until


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    uvloop.new_event_loop().close()  # the first one leaves some for the process
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_messages_stay_whole_and_end(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        ours, theirs = pair()
        got: list[Datagram] = []
        left, right = FdSocket(ours, got.append), FdSocket(theirs, lambda message: None)
        null = os.open(os.devnull, os.O_RDONLY)
        await right.send(b"one")
        await right.send(b"two", [null] * fd_socket.MESSAGE_DESCRIPTORS)
        right.send_now(b"three", [null])
        await until(lambda: len(got) == 3)
        assert [(message.data, len(message.fds), message.whole) for message in got] == [
            (b"one", 0, True),
            (b"two", fd_socket.MESSAGE_DESCRIPTORS, True),
            (b"three", 1, True),
        ]
        received = [fd for message in got for fd in message.fds]
        assert not any(os.get_inheritable(fd) for fd in received)
        assert os.path.samestat(os.fstat(received[0]), os.fstat(null))
        for fd in (null, *received):
            os.close(fd)
        right.close()
        right.close()
        await until(lambda: len(got) == 4)
        assert got[3] == Datagram(b"", [], True)
        await asyncio.sleep(0.01)
        assert len(got) == 4, "an end comes once"
        with pytest.raises(OSError):
            await left.send(b"four")
        left.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def test_too_much_is_not_whole() -> None:
    ours, theirs = pair()
    got: list[Datagram] = []
    left = FdSocket(ours, got.append)
    theirs.send(b"x" * (fd_socket.MESSAGE_BYTES + 1))
    await until(lambda: len(got) == 1)
    assert not got[0].whole
    left.close()
    theirs.close()


async def test_sending_waits_for_room() -> None:
    ours, theirs = pair()
    left = FdSocket(ours, lambda message: None)
    sent = 0

    async def send() -> None:
        nonlocal sent
        for _ in range(2000):
            await left.send(b"x" * 1000)
            sent += 1

    sending = asyncio.ensure_future(send())
    await asyncio.sleep(0.05)
    assert not sending.done()
    theirs.setblocking(False)
    read = 0
    async with asyncio.timeout(20):
        while read < 2000:
            try:
                read += len(theirs.recv(2000)) == 1000
            except BlockingIOError:
                await asyncio.sleep(0.001)
    await sending
    left.close()
    theirs.close()


async def test_too_many_descriptors_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    left = FdSocket(ours, lambda message: None)
    send_now, refusals = FdSocket.send_now, [errno.ETOOMANYREFS, errno.ETOOMANYREFS]

    def refuse(self: FdSocket, data: bytes, fds: list[int]) -> None:
        if refusals:
            raise OSError(refusals.pop(), "Too many references")
        send_now(self, data, fds)

    monkeypatch.setattr(FdSocket, "send_now", refuse)
    await left.send(b"at last")
    assert theirs.recv(100) == b"at last"
    refusals.append(errno.EPERM)
    with pytest.raises(PermissionError):
        await left.send(b"never")
    left.close()
    theirs.close()


def test_descriptors_close_once() -> None:
    owned = FdBag()
    fds = [owned.add(os.open(os.devnull, os.O_RDONLY)) for _ in range(3)]
    owned.close_one(fds[1])
    owned.close_one(fds[1])
    again = os.open(os.devnull, os.O_RDONLY)
    assert again == fds[1]
    owned.close()
    owned.close()
    os.fstat(again)  # not closed by mistake
    os.close(again)
