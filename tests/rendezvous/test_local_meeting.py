import asyncio
import errno
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from asynccomm.errors import RendezvousError
from asynccomm.rendezvous import local_meeting as module
from asynccomm.rendezvous.local_meeting import PortAnnouncer, find_port, meeting_name
from asynccomm.rendezvous.spec import RendezvousSpec, connect_store
from tests.waiting import until


@pytest.fixture
def name() -> str:
    return meeting_name(f"test-{secrets.token_hex(4)}")


@pytest.fixture
def announcer(name: str) -> Iterator[PortAnnouncer]:
    made = PortAnnouncer(name, 1234)
    yield made
    made.close()
    made.close()


async def test_the_port_is_found_by_many_and_again(name: str, announcer: PortAnnouncer) -> None:
    assert await asyncio.gather(*(find_port(name, 20) for _ in range(50))) == [1234] * 50


def test_the_port_is_found_on_uvloop(name: str, announcer: PortAnnouncer) -> None:
    assert uvloop.run(find_port(name, 20)) == 1234
    assert uvloop.run(find_port(name, 0.0)) == 1234


async def test_a_rank_0_that_does_not_answer_is_waited_for_in_time(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(f"\0{name}")
        stopped.listen()
        with pytest.raises(RendezvousError, match=r"rank 0 did not come to this host within 0\.05 s"):
            await find_port(name, 0.05)


async def test_a_process_without_descriptors_says_so(
    name: str, announcer: PortAnnouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(address: str) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module, "local_connection", fail)
    with pytest.raises(RendezvousError, match=r"cannot ask rank 0 for its store.*Too many open files"):
        await find_port(name, 20)


async def test_a_rank_that_comes_early_waits(name: str) -> None:
    waiting = asyncio.create_task(find_port(name, 20))
    await asyncio.sleep(0)
    announcer = PortAnnouncer(name, 77)
    assert await waiting == 77
    announcer.close()


async def test_without_rank_0(name: str) -> None:
    with pytest.raises(RendezvousError, match=f"rank 0 did not come to this host within 0.05 s .at the socket @{name}"):
        await find_port(name, 0.05)


def test_a_name_is_taken_once_and_free_again(name: str, announcer: PortAnnouncer) -> None:
    with pytest.raises(OSError, match="in use"):
        PortAnnouncer(name, 1)
    announcer.close()
    PortAnnouncer(name, 1).close()


async def test_a_process_of_another_user_is_not_believed(
    name: str, announcer: PortAnnouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "peer_user", lambda sock: os.geteuid() + 1)
    with pytest.raises(RendezvousError):
        await find_port(name, 0.1)


async def test_a_port_that_is_no_number_is_not_believed(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(f"\0{name}")
        foreign.listen()

        def answer() -> None:
            with foreign.accept()[0] as connection:
                connection.sendall(b"port 12")

        answering = asyncio.create_task(asyncio.to_thread(answer))
        assert await module._ask(name) == 0
        await answering


async def test_a_forked_child_does_not_keep_the_name(name: str, announcer: PortAnnouncer) -> None:
    ready, end = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end[1])
        os.write(ready[1], b"x")
        os.read(end[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    announcer.close()
    PortAnnouncer(name, 1).close()
    for fd in (*ready, *end):
        os.close(fd)
    os.waitpid(pid, 0)


async def test_ranks_meet_at_a_store_that_ends_with_the_last_comm(name: str) -> None:
    places = [RendezvousSpec(rank, 2, "asynccomm/run/0", meeting=name, hosting=rank == 0) for rank in (0, 1)]
    for _ in range(2):
        meetings = await asyncio.gather(*(connect_store(place, 20) for place in places))
        again = await connect_store(places[0], 20)  # a second comm of rank 0
        await meetings[0].store.set("key", "value")
        assert await meetings[1].store.get("key") == b"value"
        assert await again.store.get("key") == b"value"
        for meeting in (*meetings, again):
            await meeting.aclose()
    await until(lambda: name not in Path("/proc/net/unix").read_text())


async def test_two_jobs_at_one_socket_are_an_error(name: str, announcer: PortAnnouncer) -> None:
    place = RendezvousSpec(0, 2, "asynccomm/run/0", meeting=name, hosting=True)
    with pytest.raises(RendezvousError, match=f"cannot announce the store at the socket @{name}: .*in use"):
        await connect_store(place, 20)
