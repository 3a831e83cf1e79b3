"""Collectives between hosts: the backend ``hierarchical`` against gloo, whose ranks are all alike.

    gloo          torch.distributed's blocking call
    flat          a comm of the backend gloo
    hierarchical  shared memory inside each host, and gloo between them

    python bench/hosts.py --per-host 2 --json out.json
    python bench/hosts.py --shape "netem delay 1ms rate 1gbit"

The two hosts are namespaces of this machine, joined by a virtual network (tests/hosts.py); that takes root. Each round
measures all three once, in alternating order. Times are rank 0's, medians over rounds. The bytes are those that both
hosts have sent over the network, with all headers and acknowledgements, for one operation.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from report import Results, print_table
from rounds import ROUNDS, in_turns, timed
from torch import distributed as dist

from asynccomm.benchmarks.operations import OPS, SIZES, MeasuredOp, floats
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the hosts of the tests

from tests.hosts import hosts, missing  # noqa: E402

INTERFACE: Final = "eth0"  # of a host
CONTENDERS: Final = ("gloo", "flat", "hierarchical")
PORT: Final = 29577  # on a host of the bench, where no other program listens; torch's store has the next
COUNTED: Final = 64 << 20  # bytes of operations to count on the cable, at least three operations


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsRow:
    """One operation between hosts."""

    op: str
    bytes: int
    hosts: int
    ranks: int
    shape: str
    by_turns: bool  #: whether the ranks are placed in turns, and not host by host
    gloo_us: float
    flat_us: float
    hierarchical_us: float
    gloo_sent: float  #: bytes on the cable
    flat_sent: float
    hierarchical_sent: float
    ratio: float = field(init=False)  #: how many times as fast as gloo the hierarchical comm is
    flat_ratio: float = field(init=False)  #: the same over the flat comm
    sent_ratio: float = field(init=False)  #: its bytes on the cable over gloo's

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.gloo_us / self.hierarchical_us)
        object.__setattr__(self, "flat_ratio", self.flat_us / self.hierarchical_us)
        object.__setattr__(self, "sent_ratio", self.hierarchical_sent / self.gloo_sent)


def sent_bytes() -> int:
    """Bytes that this process's host has sent over the network so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():  # unlike /sys, this follows the namespace
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise RuntimeError(f"this host has no interface {INTERFACE}")


async def repeated(comm: Comm | None, op: MeasuredOp, tensors: tuple[Any, Any], count: int) -> None:
    """Without a comm, by torch.distributed."""
    output, source = tensors
    for _ in range(count):
        if comm is None:
            op.torch(output, source, False)
        else:
            await op.ours(comm, output, source)


async def sent(of_all: Comm, comm: Comm | None, op: MeasuredOp, tensors: tuple[Any, Any], nbytes: int) -> float:
    """Bytes that the hosts send for one operation; the same on all ranks."""
    count = max(3, min(50, COUNTED // max(nbytes, 1)))
    counts = os.environ["LOCAL_RANK"] == "0"
    await of_all.barrier()
    before = sent_bytes()
    await repeated(comm, op, tensors, count)
    await of_all.barrier()
    mine = torch.tensor([float(sent_bytes() - before) if counts else 0.0], dtype=torch.float64)
    await of_all.all_reduce(mine)
    return mine.item() / count


async def measure(
    first: Comm, comms: Mapping[str, Comm | None], name: str, nbytes: int, options: argparse.Namespace
) -> HostsRow:
    op = OPS[name]
    tensors = op.tensors(floats(nbytes), first.rank, first.size)
    bodies = {which: timed(partial(repeated, comm, op, tensors)) for which, comm in comms.items()}
    us = await in_turns(first, bodies, options.rounds)
    wire = {which: await sent(first, comm, op, tensors, nbytes) for which, comm in comms.items()}
    return HostsRow(
        op=name,
        bytes=nbytes,
        hosts=2,
        ranks=first.size,
        shape=options.shape,
        by_turns=options.by_turns,
        gloo_us=us["gloo"],
        flat_us=us["flat"],
        hierarchical_us=us["hierarchical"],
        gloo_sent=wire["gloo"],
        flat_sent=wire["flat"],
        hierarchical_sent=wire["hierarchical"],
    )


def show(rows: list[HostsRow]) -> None:
    print_table(
        [
            "op",
            "bytes",
            "gloo us",
            "flat us",
            "hierarchical us",
            "over gloo",
            "over flat",
            "gloo",
            "flat",
            "sent",
        ],
        [
            (
                row.op,
                row.bytes,
                f"{row.gloo_us:.1f}",
                f"{row.flat_us:.1f}",
                f"{row.hierarchical_us:.1f}",
                f"{row.ratio:.2f}x",
                f"{row.flat_ratio:.2f}x",
                f"{row.gloo_sent:.0f}",
                f"{row.flat_sent:.0f}",
                f"{row.hierarchical_sent:.0f}",
            )
            for row in rows
        ],
        f"{rows[0].ranks} ranks on {rows[0].hosts} hosts, {rows[0].shape or 'not shaped'}, {os.cpu_count()} cores",
        left={"op"},
    )


async def bench(options: argparse.Namespace) -> None:
    """On every rank; rank 0 reports."""
    async with (
        new_comm("gloo", name="flat") as flat,
        new_comm("hierarchical", name="hierarchical") as hierarchical,
    ):
        place = f"tcp://{os.environ['MASTER_ADDR']}:{PORT + 1}"
        dist.init_process_group("gloo", init_method=place, rank=flat.rank, world_size=flat.size)
        comms = dict(zip(CONTENDERS, (None, flat, hierarchical), strict=True))
        rows: Results[HostsRow] = Results(show, options.json)
        with rows:
            for name in options.ops:
                for nbytes in options.sizes:
                    rows.add(await measure(flat, comms, name, nbytes, options))
        dist.destroy_process_group()


def start(options: argparse.Namespace) -> int:
    """Start the ranks, host by host; returns the worst of their exit statuses."""
    size = 2 * options.per_host
    with tempfile.TemporaryDirectory() as folder, hosts(2, Path(folder)) as made:
        if options.shape:
            for host in made:
                host.shape(*options.shape.split())
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": made[0].address, "MASTER_PORT": str(PORT)}
        shared["GLOO_SOCKET_IFNAME"] = INTERFACE  # torch's own gloo needs it
        ranks = []
        for rank in range(size):
            number, local = divmod(rank, options.per_host)
            if options.by_turns:
                local, number = divmod(rank, 2)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local)}
            ranks.append(made[number].start(*sys.argv, environment=shared | own, output=None, directory=Path.cwd()))
        try:
            for process in ranks:
                if process.wait():
                    break
        finally:
            for process in ranks:
                if process.poll() is None and any(other.poll() for other in ranks):
                    process.terminate()
        return max(abs(int(process.wait())) for process in ranks)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-host", type=int, default=2, help="ranks on each of the two hosts")
    parser.add_argument("--by-turns", action="store_true", help="place the ranks in turns, and not host by host")
    parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")], default=SIZES, help="in bytes")
    parser.add_argument("--ops", type=lambda text: text.split(","), default=["all_reduce"], help=f"of {','.join(OPS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shape", default="", help="a queueing discipline of tc for the cable")
    parser.add_argument("--json", help="file to write the rows to")
    options = parser.parse_args(arguments)
    for name in options.ops:
        if name not in OPS:
            parser.error(f"argument --ops: {name!r} is not one of {', '.join(OPS)}")
    if options.per_host < 1 or options.rounds < 1:
        parser.error("arguments --per-host, --rounds: must be positive")
    if "RANK" not in os.environ and (reason := missing()):
        parser.error(f"no hosts can be made on {socket.gethostname()}: {reason}")
    return options


def main() -> None:
    options = parse()
    if "RANK" in os.environ:
        run(bench(options))
    else:
        try:
            sys.exit(start(options))
        except subprocess.CalledProcessError as exc:
            sys.exit(f"hosts.py: no such hosts can be made here: {exc}: {exc.stderr}")


if __name__ == "__main__":
    main()
