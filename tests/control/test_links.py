"""Who is let in, who is not, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynccomm.control import links
from asynccomm.control.frames import HELLO_BYTES, Decoder, Message, encode
from asynccomm.control.links import Connection, Listener, Tokens, connect, listens, local_socket, tcp_socket
from asynccomm.control.roster import Contact

from .strangers import descriptors, until

TOKENS = Tokens("ask", "answer")


class Door:
    """A listener, and what happened at it."""

    def __init__(self) -> None:
        self.problem = ""
        self.welcomed: list[tuple[Any, Connection]] = []
        self.received: list[Message] = []
        self.ended: list[str] = []
        self.looks: list[Message] = []
        self.first: list[Message] = []  # what is sent with the welcome
        self.listener = Listener(TOKENS, lambda who: self.problem, self._welcome, self._look)
        self.contact = Contact(0, "here", os.getpid())

    def _welcome(self, who: Any, connection: Connection) -> None:
        connection.received = lambda _, message: self.received.append(message)
        connection.ended = lambda _, how: self.ended.append(how)
        self.welcomed.append((who, connection))
        for message in self.first:
            connection.send(message)

    def _look(self, connection: Connection, message: Message) -> None:
        self.looks.append(message)
        connection.send({"seen": True})
        connection.close()

    async def open(self, family: str) -> Door:
        if family == "local":
            name = f"asynccomm/test/{os.getpid()}/{secrets.token_hex(8)}"
            sock = local_socket(name)
            assert sock is not None
            self.contact = Contact(0, "here", os.getpid(), name)
        else:
            sock = tcp_socket("127.0.0.1")
            self.contact = Contact(0, "here", os.getpid(), "", "127.0.0.1", sock.getsockname()[1])
        await self.listener.listen(sock)
        return self


class Guest:
    """One that connects."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        self.ended: list[str] = []

    async def connect(self, contact: Contact, tokens: Tokens = TOKENS, who: Any = 7) -> Connection:
        return await connect(
            contact,
            True,
            tokens,
            who,
            lambda _, message: self.received.append(message),
            lambda _, how: self.ended.append(how),
        )


@asynccontextmanager
async def opened(family: str) -> AsyncIterator[Door]:
    """A door that leaves nothing behind."""
    held = descriptors()
    one = await Door().open(family)
    yield one
    one.listener.close()
    for _, connection in one.welcomed:
        connection.close()
    await until(lambda: descriptors() == held, "all descriptors closed")
    assert not links._open
    assert not links._listening


@pytest.fixture(params=["local", "tcp"])
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    async with opened(request.param) as one:
        yield one


@pytest.fixture
async def local_door() -> AsyncIterator[Door]:
    async with opened("local") as one:
        yield one


@pytest.fixture
async def tcp_door() -> AsyncIterator[Door]:
    async with opened("tcp") as one:
        yield one


async def stranger(door: Door) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if door.contact.local:
        return await asyncio.open_unix_connection(f"\0{door.contact.local}")
    return await asyncio.open_connection("127.0.0.1", door.contact.port)


async def refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """It ends, and nothing was said."""
    data = b""
    with contextlib.suppress(ConnectionError):
        data = await reader.read()
    assert data == b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_who_knows_the_token_is_let_in_and_heard(door: Door) -> None:
    guest = Guest()
    connection = await guest.connect(door.contact)
    assert [who for who, _ in door.welcomed] == [7]
    connection.send({"a": "x" * (HELLO_BYTES + 1)})
    door.welcomed[0][1].send({"b": "y" * (HELLO_BYTES + 1)})
    await until(lambda: door.received and guest.received, "both heard")
    assert door.received == [{"a": "x" * (HELLO_BYTES + 1)}]
    assert guest.received == [{"b": "y" * (HELLO_BYTES + 1)}]
    connection.close()
    await until(lambda: door.ended, "the end")
    assert door.ended == ["its control connection ended"]
    assert guest.ended == [], "who has closed is not told"


async def test_what_is_sent_with_the_welcome_is_not_lost(door: Door) -> None:
    """It is there before who has connected knows what to do with it."""
    door.first = [{"number": number} for number in range(5)]
    guest = Guest()
    known: list[Connection] = []
    heard: list[tuple[bool, Message]] = []
    connection = await connect(
        door.contact, True, TOKENS, 7, lambda one, message: heard.append((one in known, message)), lambda _, how: None
    )
    known.append(connection)
    await until(lambda: len(heard) == 5, "the messages")
    assert heard == [(True, {"number": number}) for number in range(5)]
    assert guest.received == []
    connection.close()


async def test_who_is_refused_hears_why(door: Door) -> None:
    door.problem = "you have been given up"
    with pytest.raises(PermissionError, match="you have been given up"):
        await Guest().connect(door.contact)
    assert door.welcomed == []


async def test_a_wrong_token(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asynccomm"):
        with pytest.raises(ConnectionError):
            await Guest().connect(door.contact, Tokens("guess", "answer"))
        await until(lambda: caplog.records, "the log")
    assert "was refused: it does not know the token" in caplog.text
    assert door.welcomed == []


@pytest.mark.parametrize("token", [None, 5, ["ask"], "", "as", "ask ", "äsk", "\ud800"])
async def test_tokens_that_are_none(door: Door, token: Any) -> None:
    reader, writer = await stranger(door)
    writer.write(encode({"token": token, "who": 7}))
    await refused(reader, writer)
    assert door.welcomed == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", HELLO_BYTES + 1),
        struct.pack(">I", 2**32 - 1) + b"x" * 1000,
        struct.pack(">I", 3) + b"\xff\xff\xff",
        struct.pack(">I", 2) + b"[]",
        encode({"token": "ask", "who": "x" * HELLO_BYTES}),
        encode({}),
        os.urandom(500),
    ],
)
async def test_garbage_is_answered_by_nothing(door: Door, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    if len(data) == 500:
        data = b"\xff" + data  # never a short message
    with caplog.at_level(logging.WARNING, "asynccomm"):
        reader, writer = await stranger(door)
        writer.write(data)
        await refused(reader, writer)
        await until(lambda: caplog.records, "the log")
    assert door.welcomed == []
    assert "a stranger at the control socket was refused" in caplog.text


async def test_refusals_are_logged_once_and_counted(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asynccomm"):
        for number in range(5):
            reader, writer = await stranger(door)
            writer.write(b"garbage!" if number % 2 else encode({"token": "no"}))
            await refused(reader, writer)
        await until(lambda: door.listener._refused == 5, "all refused")
        assert len(caplog.records) == 1
        door.listener.close()
    assert [record.getMessage() for record in caplog.records[1:]] == ["5 strangers at the control socket were refused"]


async def test_who_changes_its_mind_is_not_counted(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    _, writer = await stranger(door)
    await until(lambda: door.listener._strangers, "it to come")
    writer.close()
    await until(lambda: not door.listener._strangers, "it to go")
    assert door.listener._refused == 0


async def test_who_does_not_say_hello_is_not_waited_for(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "HELLO_SECONDS", 0.05)
    reader, writer = await stranger(door)
    writer.write(encode({"token": "ask", "who": 7})[:-1])
    await refused(reader, writer)
    assert "it did not say hello" in caplog.text


async def test_who_has_said_hello_may_be_silent(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "HELLO_SECONDS", 0.01)
    guest = Guest()
    connection = await guest.connect(door.contact)
    assert not door.listener._strangers
    await asyncio.sleep(0.05)
    connection.send({"still": "here"})
    await until(lambda: door.received, "the message")
    connection.close()


async def test_a_flood_keeps_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STRANGERS", 8)
    held = descriptors()
    flood = [await stranger(door) for _ in range(30)]
    await until(lambda: len(door.listener._strangers) == 8, "the strangers")
    await until(lambda: door.listener._refused == 22, "the others to go")
    guest = Guest()
    connection = await guest.connect(door.contact)
    assert len(door.welcomed) == 1
    assert len(door.listener._strangers) == 7
    assert descriptors() <= held + 30 + 8 + 2
    connection.send({"a": 1})
    await until(lambda: door.received, "the message")
    connection.close()
    for _, writer in flood:
        writer.close()
    await until(lambda: not door.listener._strangers, "all strangers gone")


async def test_other_users_are_refused(
    local_door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await stranger(local_door)
    monkeypatch.setattr(os, "geteuid", lambda: 123_456)
    _, other = await stranger(local_door)
    await until(lambda: "it is user" in caplog.text, "the log")
    assert local_door.welcomed == []
    for one in (writer, other):
        one.close()
    del reader


async def test_who_listens_in_the_place_of_a_rank_is_not_believed(
    local_door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who has taken its name: the rank is gone, and nothing that is said there counts."""
    monkeypatch.setattr(os, "geteuid", lambda: 123_456)
    with pytest.raises(ConnectionRefusedError, match="who listens there is user"):
        await Guest().connect(local_door.contact)
    assert not await listens(local_door.contact, True)
    monkeypatch.undo()
    assert await listens(local_door.contact, True)


@pytest.mark.parametrize(
    "reply", [b"", b"garbage!!", encode({}), encode({"token": "ask"}), encode({"token": "ask", "refused": "x"})]
)
async def test_an_impostor_that_listens(reply: bytes) -> None:
    heard: list[Message | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder()
        decoder.feed(await reader.read(1000))
        heard.append(decoder.next())
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    contact = Contact(0, "here", 1, "", "127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(ConnectionError):
        await Guest().connect(contact, Tokens("ask", "the right answer"))
    assert heard == [{"token": "ask", "who": 7}]
    server.close()


async def test_nobody_listens() -> None:
    sock = tcp_socket("127.0.0.1")
    port = sock.getsockname()[1]
    sock.close()
    for contact in (
        Contact(0, "h", 1, f"asynccomm/none/{secrets.token_hex(8)}"),
        Contact(0, "h", 1, "", "127.0.0.1", port),
    ):
        with pytest.raises(ConnectionRefusedError):
            await Guest().connect(contact)
        assert not await listens(contact, True)


async def test_a_rank_without_an_address() -> None:
    with pytest.raises(OSError) as caught:
        await Guest().connect(Contact(0, "h", 1))
    assert caught.value.errno == errno.EHOSTUNREACH


async def test_by_tcp_where_the_local_name_cannot_be_reached(tcp_door: Door) -> None:
    """In another container on the same host, say."""
    contact = Contact(0, "here", 1, f"asynccomm/none/{secrets.token_hex(8)}", "127.0.0.1", tcp_door.contact.port)
    connection = await Guest().connect(contact)
    connection.close()


async def test_connecting_can_be_cancelled(door: Door) -> None:
    for turns in range(8):
        task = asyncio.ensure_future(Guest().connect(door.contact))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await task).close()
    connection = await Guest().connect(door.contact)
    connection.close()


async def test_who_only_looks(local_door: Door) -> None:
    reader, writer = await stranger(local_door)
    writer.write(encode({"look": True}))
    decoder = Decoder()
    decoder.feed(await reader.read())
    assert decoder.next() == {"seen": True}
    assert local_door.looks == [{"look": True}]
    writer.close()


async def test_nobody_looks_in_from_another_host(tcp_door: Door) -> None:
    reader, writer = await stranger(tcp_door)
    writer.write(encode({"look": True}))
    await refused(reader, writer)
    assert tcp_door.looks == []


async def test_nonsense_from_a_guest_ends_it(door: Door) -> None:
    guest = Guest()
    connection = await guest.connect(door.contact)
    transport = connection._transport
    assert transport is not None
    transport.write(b"\0\0\0\2{]")
    await until(lambda: door.ended and guest.ended, "both to hear of it")
    assert "its control connection carried nonsense: no JSON" in door.ended[0]
    assert len(door.ended) == len(guest.ended) == 1


async def test_who_does_not_read_is_dropped(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "UNSENT_BYTES", 1 << 20)
    guest = Guest()
    connection = await guest.connect(door.contact)
    assert connection._transport is not None
    connection._transport.pause_reading()
    for _ in range(100):
        door.welcomed[0][1].send({"a": "x" * 100_000})
    await until(lambda: door.ended, "the end")
    assert door.ended == ["it does not read what is sent to it"]
    connection.close()


async def test_last_words_are_heard_though_writing_to_who_spoke_them_fails(local_door: Door) -> None:
    """Who says goodbye and goes must not be taken for lost because something was just being sent to it."""
    guest = Guest()
    connection = await guest.connect(local_door.contact)
    far = local_door.welcomed[0][1]
    far.send({"good": "bye"})
    assert far._transport is not None
    fd = far._transport.get_extra_info("socket").fileno()
    with socket.socket(fileno=os.dup(fd)) as same:
        same.shutdown(socket.SHUT_RDWR)  # the other side goes; nothing was read here yet
    connection.send({"to": "nobody"})
    await until(lambda: guest.ended, "the end")
    assert guest.received == [{"good": "bye"}]
    far.close()


FORKS = """
import asyncio, os, sys, time
from asynccomm.control.links import Listener, Tokens, connect, local_socket
from asynccomm.control.roster import Contact
tokens = Tokens("ask", "answer")
async def main():
    listener = Listener(tokens, lambda who: "", lambda who, one: None, lambda one, message: None)
    await listener.listen(local_socket(sys.argv[2]))
    await connect(Contact(0, "here", 1, sys.argv[1]), True, tokens, 7, lambda *a: None, lambda *a: None)
    if os.fork() == 0:
        print("forked", os.getpid(), flush=True)
        time.sleep(3600)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


async def test_a_forked_child_holds_nothing_open(local_door: Door) -> None:
    name = f"asynccomm/test/{os.getpid()}/{secrets.token_hex(8)}"
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS, local_door.contact.local, name], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = await asyncio.to_thread(process.stdout.readline)
    child = int(line.split()[1])
    try:
        assert [who for who, _ in local_door.welcomed] == [7]
        assert await listens(Contact(7, "here", 1, name), True)
        process.kill()
        process.wait()
        await until(lambda: local_door.ended, "the end of the parent")
        os.kill(child, 0)  # still there
        assert not await listens(Contact(7, "here", 1, name), True)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
