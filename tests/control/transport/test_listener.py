"""Who is let in, who is not, and what is left of them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from typing import Any

import pytest

from asynccomm.control.transport import admission, listener
from asynccomm.control.transport import connection as connection_module
from asynccomm.control.transport.connection import Hello, Look, Tokens
from asynccomm.control.transport.framing import HELLO_BYTES, Decoder, encode
from asynccomm.control.transport.listener import Listener, end_listening
from tests.control.fake_listener import Door, Guest, refused, stranger
from tests.control.unauthenticated import descriptors, nothing_unclosed, until
from tests.sampling import amount, some


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
    assert "refused a connection: with a wrong token" in caplog.text
    assert door.welcomed == []


@pytest.mark.parametrize("token", [None, 5, ["ask"], "", "as", "ask ", "äsk", "\ud800"])
async def test_tokens_that_are_none(door: Door, token: Any) -> None:
    reader, writer = await stranger(door)
    writer.write(encode({"kind": "Hello", "token": token, "who": 7}))
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
        encode(Hello("ask", "x" * HELLO_BYTES)),
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
    assert "the control channel refused a connection" in caplog.text


async def test_refusals_are_logged_once_and_counted(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asynccomm"):
        for number in range(5):
            reader, writer = await stranger(door)
            writer.write(b"garbage!" if number % 2 else encode(Hello("no", 7)))
            await refused(reader, writer)
        await until(lambda: door.listener.admission.refused.total() == 5, "all refused")
        assert len(caplog.records) == 1
        door.listener.close()
    (last,) = caplog.records[1:]
    assert last.getMessage().startswith("the control channel refused 5 connections: 3 with a wrong token, ")


async def test_who_changes_its_mind_is_not_counted(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    _, writer = await stranger(door)
    await until(lambda: door.listener.admission.waiting, "it to come")
    writer.close()
    await until(lambda: not door.listener.admission.waiting, "it to go")
    assert not door.listener.admission.refused


async def test_who_does_not_say_hello_is_not_waited_for(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admission, "HELLO_SECONDS", 0.05)
    reader, writer = await stranger(door)
    writer.write(encode(Hello("ask", 7))[:-1])
    await refused(reader, writer)
    assert "without a hello in time" in caplog.text


async def test_who_has_said_hello_may_be_silent(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HELLO_SECONDS", 0.01)
    guest = Guest()
    connection = await guest.connect(door.contact)
    assert not door.listener.admission.waiting
    await asyncio.sleep(0.05)
    connection.send({"still": "here"})
    await until(lambda: door.received, "the message")
    connection.close()


async def test_a_flood_keeps_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "UNAUTHENTICATED", 8)
    held = descriptors()
    flood = [await stranger(door) for _ in range(30)]
    await until(lambda: len(door.listener.admission.waiting) == 8, "the strangers")
    await until(lambda: door.listener.admission.refused.total() == 22, "the others to go")
    guest = Guest()
    connection = await guest.connect(door.contact)
    assert len(door.welcomed) == 1
    assert len(door.listener.admission.waiting) == 7
    assert descriptors() <= held + 30 + 8 + 2
    connection.send({"a": 1})
    await until(lambda: door.received, "the message")
    connection.close()
    for _, writer in flood:
        writer.close()
    await until(lambda: not door.listener.admission.waiting, "all strangers gone")


async def test_other_users_are_refused(
    local_door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await stranger(local_door)
    monkeypatch.setattr(os, "geteuid", lambda: 123_456)
    _, other = await stranger(local_door)
    await until(lambda: "of another user" in caplog.text, "the log")
    assert local_door.welcomed == []
    for one in (writer, other):
        one.close()
    del reader


async def test_who_only_looks(local_door: Door) -> None:
    reader, writer = await stranger(local_door)
    writer.write(encode(Look()))
    decoder = Decoder()
    decoder.feed(await reader.read())
    assert decoder.next() == {"seen": True}
    assert local_door.looks == [Look()]
    writer.close()


async def test_nobody_looks_in_from_another_host(tcp_door: Door) -> None:
    reader, writer = await stranger(tcp_door)
    writer.write(encode(Look()))
    await refused(reader, writer)
    assert tcp_door.looks == []


# -- closing ----------------------------------------------------------------------------------------------------------


def come(door: Door, number: int) -> list[socket.socket]:
    """Strangers that are connected, as far as the system is concerned."""
    found = []
    for _ in range(number):
        family = socket.AF_UNIX if door.contact.local else socket.AF_INET
        found.append(socket.socket(family, socket.SOCK_STREAM))
        found[-1].connect(f"\0{door.contact.local}" if door.contact.local else ("127.0.0.1", door.contact.port))
    return found


async def turn(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", some(range(6), 3))
@pytest.mark.parametrize("family", ["local", "tcp"])
async def test_who_comes_while_it_closes_is_closed(family: str, turns: int) -> None:
    with nothing_unclosed():
        door = await Door().open(family)
        strangers = come(door, amount(200, 120))
        await turn(turns)
        door.listener.close()
        for stranger in strangers:
            stranger.setblocking(True)
            assert await asyncio.to_thread(_says_nothing, stranger)
            stranger.close()
        await until(lambda: not connection_module._open, "the connections' end")
        await turn(2)
        assert door.listener._coming == {}
        assert door.listener.admission.waiting == {}


def _says_nothing(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("turns", some(range(6), 3))
def test_who_comes_while_the_loop_ends_is_closed(turns: int) -> None:
    """Whoever ends the loop cancels the tasks that are left; one that has not begun cannot clean up."""

    async def live() -> list[socket.socket]:
        door = await Door().open("local")
        strangers = come(door, amount(200, 120))
        await turn(turns)
        end_listening()
        assert door.listener._closed
        return strangers

    with nothing_unclosed():
        for stranger in asyncio.run(live()):
            stranger.close()
        assert not connection_module._open


async def test_who_was_taken_before_it_closed_is_not_let_in(local_door: Door) -> None:
    local_door.listener.close()
    ours, theirs = socket.socketpair()
    with ours:
        await local_door.listener._connect(theirs)
        assert ours.recv(1) == b""
    assert local_door.listener.admission.waiting == {}


async def test_closing_twice_says_it_once(local_door: Door, caplog: pytest.LogCaptureFixture) -> None:
    local_door.listener.admission.refused.update(["late", "late"])
    for _ in range(2):
        local_door.listener.close()
    assert len(caplog.records) == 1


async def test_only_listeners_of_the_same_loop_end_with_it(local_door: Door) -> None:
    async def end() -> None:
        end_listening()

    await asyncio.to_thread(asyncio.run, end())
    connection = await Guest().connect(local_door.contact)
    connection.close()


# -- want of descriptors ----------------------------------------------------------------------------------------------


class Scarce(socket.socket):
    """Cannot always take who has come."""

    problem: OSError | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        if Scarce.problem is not None:
            raise Scarce.problem
        return super().accept()


def without_descriptors(monkeypatch: pytest.MonkeyPatch) -> tuple[Listener, Scarce]:
    """A listener that cannot take anybody, and its socket."""
    monkeypatch.setattr(Scarce, "problem", OSError(errno.EMFILE, "too many"))
    sock = Scarce(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    one = Listener(Tokens.random(), lambda who: "", lambda who, connection: None, lambda *_: None)
    one.listen(sock)
    return one, sock


async def test_who_cannot_be_taken_now_is_taken_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "PAUSE_SECONDS", 0.01)
    one, sock = without_descriptors(monkeypatch)
    with socket.create_connection(sock.getsockname()[:2]):
        await until(lambda: len(caplog.records) > 1, "several tries")
        assert "the control channel could not accept a connection: [Errno 24] too many" in caplog.text
        assert not one.admission.waiting
        Scarce.problem = None
        await until(lambda: one.admission.waiting, "it to be taken")
    one.close()
    await until(lambda: not connection_module._open, "its end")


async def test_a_closed_listener_tries_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PAUSE_SECONDS", 0.0)
    one, sock = without_descriptors(monkeypatch)
    one._take(sock)
    one.close()
    await asyncio.sleep(0.01)
    assert sock.fileno() == -1
