"""Two hosts without a name service: network namespaces, in which the host's own name means loopback, or nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.hosts import hosts
from tests.sampling import some

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


@pytest.mark.parametrize("meaning", some([None, "127.0.1.1", "127.0.0.1"], 1))
def test_hosts_whose_names_mean_nothing_to_others(tmp_path: Path, meaning: str | None) -> None:
    with hosts(2, tmp_path) as made:
        ranks = []
        for rank, host in enumerate(made):
            if meaning:
                own = tmp_path / host.name
                own.write_text(f"127.0.0.1 localhost\n{meaning} {host.name}\n")
                host.run("mount", "--bind", str(own), "/etc/hosts")
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": made[0].address, "MASTER_PORT": "29541"}
            ranks.append(host.start("-c", PROGRAM, environment=variables))
        try:
            end = time.monotonic() + 90
            for running, host in zip(ranks, made, strict=True):
                out, _ = running.communicate(timeout=max(1.0, end - time.monotonic()))
                assert running.returncode == 0, f"{host.name}: {out.decode()}"
                *_, line = out.splitlines()  # torch may warn before it
                backend, total, names, listening = json.loads(line)
                assert (backend, total, names) == ("gloo", 3.0, [host.name for host in made])
                assert host.address in listening
                assert not [address for address in listening if address.startswith("127.")]
        finally:
            for running in ranks:
                running.kill()
                running.communicate()
