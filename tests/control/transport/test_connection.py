"""What connections carry, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys

import pytest

from asynccomm.control.transport import connection as connection_module
from asynccomm.control.transport.connection import Connection, Tokens, Welcome, connect, end_connections, listens
from asynccomm.control.transport.framing import HELLO_BYTES, Decoder, encode
from asynccomm.control.transport.listener import Listener
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.sockets import tcp_socket
from asynccomm.control.transport.topology import RankAddress
from tests.control.fake_listener import TOKENS, Door, Guest
from tests.control.unauthenticated import descriptors, nothing_unclosed, until
from tests.sampling import some


def test_the_secret_of_a_job_follows_from_its_tokens() -> None:
    one = Tokens("ask", "answer")
    assert one.secret == Tokens("ask", "answer").secret
    assert len({one.secret, Tokens("ask", "other").secret, Tokens("other", "answer").secret}) == 3
    assert len(one.secret) == 32


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
    heard: list[tuple[bool, JsonObject]] = []
    connection = await connect(
        door.contact, True, TOKENS, 7, lambda one, message: heard.append((one in known, message)), lambda _, how: None
    )
    known.append(connection)
    await until(lambda: len(heard) == 5, "the messages")
    assert heard == [(True, {"number": number}) for number in range(5)]
    assert guest.received == []
    connection.close()


async def test_who_listens_in_the_place_of_a_rank_is_not_believed(
    local_door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who has taken its name: the rank is gone, and nothing that is said there counts."""
    monkeypatch.setattr(os, "geteuid", lambda: 123_456)
    with pytest.raises(ConnectionRefusedError, match=r"a process of user \d+ listens there"):
        await Guest().connect(local_door.contact)
    assert not await listens(local_door.contact, True)
    monkeypatch.undo()
    assert await listens(local_door.contact, True)


@pytest.mark.parametrize("reply", [b"", b"garbage!!", encode({}), encode(Welcome("ask")), encode(Welcome("ask", "x"))])
async def test_an_impostor_that_listens(reply: bytes) -> None:
    heard: list[JsonObject | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder()
        decoder.feed(await reader.read(1000))
        heard.append(decoder.next())
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    contact = RankAddress(0, "here", 1, "", "127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(ConnectionError):
        await Guest().connect(contact, Tokens("ask", "the right answer"))
    assert heard == [{"kind": "Hello", "token": "ask", "who": 7}]
    server.close()


async def test_small_messages_between_hosts_are_not_delayed() -> None:
    tokens = Tokens("ask", "answer")
    accepted: list[Connection] = []
    listener = Listener(tokens, lambda who: "", lambda who, connection: accepted.append(connection), print)
    sock = tcp_socket("127.0.0.1")
    listener.listen(sock)
    contact = RankAddress(0, "here", 1, "", "127.0.0.1", sock.getsockname()[1])
    mine = await connect(contact, False, tokens, 1, print, print)
    for connection in (mine, *accepted):
        assert connection._transport is not None
        end = connection._transport.get_extra_info("socket")
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        connection.close()
    assert accepted
    listener.close()
    await until(lambda: not connection_module._open, "all connections closed")


async def test_nobody_listens() -> None:
    sock = tcp_socket("127.0.0.1")
    port = sock.getsockname()[1]
    sock.close()
    for contact in (
        RankAddress(0, "h", 1, f"asynccomm/none/{secrets.token_hex(8)}"),
        RankAddress(0, "h", 1, "", "127.0.0.1", port),
    ):
        with pytest.raises(ConnectionRefusedError):
            await Guest().connect(contact)
        assert not await listens(contact, True)


async def test_a_rank_without_an_address() -> None:
    with pytest.raises(OSError) as caught:
        await Guest().connect(RankAddress(0, "h", 1))
    assert caught.value.errno == errno.EHOSTUNREACH


async def test_by_tcp_where_the_local_name_cannot_be_reached(tcp_door: Door) -> None:
    """In another container on the same host, say."""
    contact = RankAddress(0, "here", 1, f"asynccomm/none/{secrets.token_hex(8)}", "127.0.0.1", tcp_door.contact.port)
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


async def test_nonsense_from_a_guest_ends_it(door: Door) -> None:
    guest = Guest()
    connection = await guest.connect(door.contact)
    transport = connection._transport
    assert transport is not None
    transport.write(b"\0\0\0\2{]")
    await until(lambda: door.ended and guest.ended, "both to hear of it")
    assert "its control connection carried an invalid message: no JSON" in door.ended[0]
    assert len(door.ended) == len(guest.ended) == 1


async def test_who_does_not_read_is_dropped(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "UNSENT_BYTES", 1 << 20)
    guest = Guest()
    connection = await guest.connect(door.contact)
    assert connection._transport is not None
    connection._transport.pause_reading()
    for _ in range(100):
        door.welcomed[0][1].send({"a": "x" * 100_000})
    await until(lambda: door.ended, "the end")
    assert door.ended == ["it does not read its messages"]
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
from asynccomm.control.transport.sockets import local_socket
from asynccomm.control.transport.connection import Tokens, connect
from asynccomm.control.transport.listener import Listener
from asynccomm.control.transport.topology import RankAddress
tokens = Tokens("ask", "answer")
async def main():
    listener = Listener(tokens, lambda who: "", lambda who, one: None, lambda one, message: None)
    listener.listen(local_socket(sys.argv[2]))
    await connect(RankAddress(0, "here", 1, sys.argv[1]), True, tokens, 7, lambda *a: None, lambda *a: None)
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
        assert await listens(RankAddress(7, "here", 1, name), True)
        process.kill()
        process.wait()
        await until(lambda: local_door.ended, "the end of the parent")
        os.kill(child, 0)  # still there
        assert not await listens(RankAddress(7, "here", 1, name), True)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_tokens() -> None:
    tokens = Tokens.random()
    assert tokens.may_ask(tokens.ask)
    assert tokens.may_answer(tokens.answer)
    assert not tokens.may_ask(tokens.answer)
    assert not tokens.may_answer(tokens.ask)
    for other in ("", tokens.ask[:-1], tokens.ask + "0", "\ud800"):
        assert not tokens.may_ask(other)


async def test_all_connections_end_with_the_loop_though_nobody_reads(local_door: Door) -> None:
    guest = Guest()
    connections = [await guest.connect(local_door.contact) for _ in range(3)]
    held = descriptors()
    for _, far in local_door.welcomed:
        assert far._transport is not None
        far._transport.pause_reading()
    for connection in connections:
        connection.send({"a": "x" * 1_000_000})
    connections[0].close()  # it stays, as long as there is something to be read
    await end_connections()
    assert descriptors() == held - 6
    assert not connection_module._open
    assert guest.ended == [], "who ends them knows"


async def test_connections_of_other_loops_stay(local_door: Door) -> None:
    guest = Guest()
    connection = await guest.connect(local_door.contact)
    await asyncio.to_thread(asyncio.run, end_connections())
    connection.send({"a": 1})
    await until(lambda: local_door.received, "the message")
    connection.close()


@pytest.mark.parametrize("turns", some(range(8), 3))
def test_a_loop_that_ends_while_one_connects(turns: int) -> None:
    async def live() -> None:
        door = await Door().open("local")
        task = asyncio.ensure_future(Guest().connect(door.contact))
        for _ in range(turns):
            await asyncio.sleep(0)
        door.listener.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await end_connections()

    with nothing_unclosed():
        asyncio.run(live())
        assert not connection_module._open
