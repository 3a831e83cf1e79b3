"""Who listens where: a job on one machine listens on loopback only, if it listens at all."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from asynccomm import Comm, StoreClient, new_comm
from asynccomm.backends.shm import handshake
from asynccomm.rendezvous.spec import connect_store as meet_at
from asynccomm.rendezvous.spec import resolve_spec
from asynccomm.store.server import listen, serve


class Listener(NamedTuple):
    address: str
    port: int


def sockets_of(pid: int) -> set[str]:
    """Numbers that the kernel has for the sockets of a process."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def listeners_of(pid: int) -> list[Listener]:
    """Where a process takes connections from the network."""
    mine = sockets_of(pid)
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            host, port = fields[1].split(":")
            if fields[3] == "0A" and fields[9] in mine:
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                found.append(Listener(str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    for name in ("udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            assert line.split()[9] not in mine, "nobody here has a use for UDP"
    return found


def names_of(pid: int) -> list[str]:
    """The names of local sockets on which a process takes connections."""
    mine = sockets_of(pid)
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    accepting = 0x10000
    return [line[7] for line in lines if len(line) > 7 and line[6] in mine and int(line[3], 16) & accepting]


def test_the_test_sees_listeners() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as other:
        expected = [Listener("127.0.0.1", one.getsockname()[1]), Listener("0.0.0.0", other.getsockname()[1])]
        assert set(expected) <= set(listeners_of(os.getpid()))
    if socket.has_dualstack_ipv6():
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
            assert Listener("::1", six.getsockname()[1]) in listeners_of(os.getpid())


@pytest.mark.ranks(2, backend="shm")
async def test_shared_memory_listens_nowhere(comm: Comm) -> None:
    assert comm.backend == "shm"
    before = listeners_of(os.getpid())
    async with new_comm("shm", name="listeners", timeout=30) as other:
        await other.barrier()
        assert not set(listeners_of(os.getpid())) - set(before)  # those of earlier comms may go meanwhile
        assert not [name for name in names_of(os.getpid()) if "asynccomm-" in name], "it was for the meeting only"
        await other.barrier()
    await comm.barrier()


@pytest.mark.ranks(2, backend="gloo")
async def test_gloo_listens_on_loopback(comm: Comm) -> None:
    before = listeners_of(os.getpid())
    async with new_comm("gloo", name="listeners", timeout=30) as other:
        await other.barrier()
        new = set(listeners_of(os.getpid())) - set(before)
        assert {listener.address for listener in new} == {"127.0.0.1"}
        assert len(new) == 3, "one for each of its groups, and one for messages"
        await other.barrier()
    await comm.barrier()


def test_the_meeting_has_a_name_that_nobody_can_guess() -> None:
    """A local socket, which no network reaches, and which leaves no file."""

    async def main() -> None:
        import torch

        from asynccomm.backends.shm.fd_socket import FdBag
        from asynccomm.ops.validation import CommInfo

        group = CommInfo("test", 0, 2, torch.device("cpu"))
        before = listeners_of(os.getpid())
        doors = [handshake.Entrance(handshake.Address.random({}), 2) for _ in range(2)]
        hosts = [handshake.RootSide(group, door, FdBag(), (-1, -1, -1)) for door in doors]
        names = {name for name in names_of(os.getpid()) if name.startswith("@asynccomm-")}
        assert names == {f"@{door.address.name}" for door in doors}
        assert all(len(name) == len("@asynccomm-") + 32 for name in names)
        assert listeners_of(os.getpid()) == before
        for host in hosts:
            host.close()
        assert not [name for name in names_of(os.getpid()) if name.startswith("@asynccomm-")]

    asyncio.run(main())


JOB = """
    import asyncio, os, sys
    import torch
    import asynccomm
    sys.path.insert(0, {tests!r})
    from test_listeners import listeners_of

    async def main():
        async with asynccomm.new_comm({backend!r}, timeout=60) as comm:
            await comm.all_reduce(torch.ones(4))
            mine = listeners_of(os.getpid())
            siblings = open(f"/proc/{{os.getppid()}}/task/{{os.getppid()}}/children").read().split()
            port = int(os.environ["MASTER_PORT"])
            store = [pid for pid in siblings if port in [l.port for l in listeners_of(int(pid))]]
            assert len(store) == 1
            text = f"{{sorted({{l.address for l in mine}})}} {{listeners_of(os.getppid())}} "
            text += str([l.address for l in listeners_of(int(store[0]))])
            print(f"seen {{len(mine)}} {{text}}", flush=True)
            await comm.barrier()

    asyncio.run(main())
"""


@pytest.mark.parametrize(("backend", "listeners"), [("shm", 0), ("gloo", 3)])
def test_a_launched_job_listens_on_loopback(tmp_path: Path, backend: str, listeners: int) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB).format(tests=str(Path(__file__).parent), backend=backend))
    done = subprocess.run(
        [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", "2", "--no-prefix", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    addresses = ["127.0.0.1"] if listeners else []
    assert done.stdout.splitlines() == [f"seen {listeners} {addresses} [] ['127.0.0.1']"] * 2


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_rank_that_hosts_the_store_on_loopback_listens_there_only(host: str) -> None:
    before = listeners_of(os.getpid())
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    meeting_there = await meet_at(resolve_spec(f"tcp://{host}:{port}?rank=0&world_size=1", None, None, {}), 20)
    new = set(listeners_of(os.getpid())) - set(before)
    assert {listener.address for listener in new} <= {"127.0.0.1", "::1"}
    assert {listener.port for listener in new} == {port}
    await meeting_there.aclose()


# -- strangers at the store -------------------------------------------------------------------------------------------


async def test_half_open_connections_do_not_keep_ranks_from_the_store() -> None:
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    strangers = [socket.create_connection(("127.0.0.1", hosted.port)) for _ in range(500)]
    for i, sock in enumerate(strangers):
        sock.send([b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), b"\0\0\0\0\0"][i % 5])
    client = await StoreClient.connect("127.0.0.1", hosted.port, timeout=20)
    await client.set("key", b"value")
    assert await client.get("key") == b"value"
    waiting = asyncio.ensure_future(client.wait(["later"]))
    await asyncio.sleep(0)
    for sock in strangers:
        sock.close()
    await client.set("later", b"")
    async with asyncio.timeout(20):
        await waiting
    await client.aclose()
    hosted.release()
