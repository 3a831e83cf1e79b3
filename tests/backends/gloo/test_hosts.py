"""Two hosts without a name service: network namespaces, in which the host's own name means loopback, or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sampling import some

ADDRESSES = ["10.213.77.1", "10.213.77.2"]
NAMES = ["alpha", "beta"]

PROGRAM = """
import asyncio, json, socket, sys, torch
from pathlib import Path
from asynccomm import new_comm

async def main():
    async with new_comm("auto", device="cpu", timeout=30) as comm:
        tensor = torch.full((1000,), comm.rank + 1.0)
        await comm.all_reduce(tensor)
        lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        listening = [bytes.fromhex(line[1][:8])[::-1] for line in lines if line[3] == "0A"]
        found = sorted({socket.inet_ntoa(address) for address in listening})
        hosts = sorted({member.host for member in comm._session.identity.members})
        await comm.barrier()
    print(json.dumps([comm.backend, tensor[0].item(), hosts, found]))

asyncio.run(main())
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two, with a cable between them."""
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    names = [f"ac{os.getpid()}{letter}" for letter in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
                ip("-n", name, "link", "set", "lo", "up")
            subprocess.run(["unshare", "--uts", "--mount", "true"], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as exc:
            pytest.skip(f"no network namespaces can be made here: {getattr(exc, 'stderr', None) or exc}")
        yield names


def start(namespace: str, rank: int, hosts_file: Path) -> subprocess.Popen[str]:
    """A rank on a host of its own, which is called by a name that others do not know."""
    as_host = f'hostname {NAMES[rank]} && mount --bind {hosts_file} /etc/hosts && exec "$@"'
    command = ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", "sh", "-c", as_host, "sh"]
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29541"}
    return subprocess.Popen(
        [*command, sys.executable, "-c", PROGRAM],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("meaning", some([None, "127.0.1.1", "127.0.0.1"], 1))
def test_hosts_whose_names_mean_nothing_to_others(namespaces: list[str], tmp_path: Path, meaning: str | None) -> None:
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, namespace in enumerate(namespaces):
            hosts_file = tmp_path / NAMES[rank]
            named = f"{meaning} {NAMES[rank]}\n" if meaning else ""
            hosts_file.write_text(f"127.0.0.1 localhost\n{named}")
            ranks.append(stack.enter_context(start(namespace, rank, hosts_file)))
            stack.callback(ranks[-1].kill)
        end = time.monotonic() + 90
        for rank, running in enumerate(ranks):
            out, err = running.communicate(timeout=max(1.0, end - time.monotonic()))
            assert running.returncode == 0, f"rank {rank}: {err}"
            backend, total, hosts, listening = json.loads(out)
            assert (backend, total, hosts) == ("gloo", 3.0, NAMES)
            assert ADDRESSES[rank] in listening
            assert not [address for address in listening if address.startswith("127.")]
