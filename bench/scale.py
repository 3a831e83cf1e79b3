"""The protocols of many ranks on many hosts, simulated: requests, messages, connections and time by number of ranks.

    python bench/scale.py --ranks 10,100,1000,10000 --json out.json

Nothing is started and no message travels: all ranks are in this process, in virtual time (``simulation.py``). The
protocols are the package's own code. "requests" are those of a rank to the store, "messages" those that a rank receives
on the control channel; both are given for the average rank and for the busiest node. The time is virtual but for rows
with "CPU", whose time is the CPU time of rank 0, without garbage collections: these would visit all ranks. All ranks
close and leave only up to ``--leaving`` ranks: each rank then keeps the state of all, 1.2 GB for 3,000 ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, cast
from unittest import mock

import torch
from agreed import simulate
from report import Results, print_table
from simulation import Network, SimulatedStore, StoreServer, Tree, run, sharing

from asynccomm.backends.base import BackendContext, RankInfo
from asynccomm.backends.hierarchical import locality
from asynccomm.control.fingerprints import Fingerprint, FingerprintTable
from asynccomm.control.membership import participant as participant_side
from asynccomm.control.membership.coordinator import Coordinator
from asynccomm.control.membership.messages import Commit, Finalized, Prepare, Retry, check_proposal
from asynccomm.control.membership.participant import Participant
from asynccomm.control.messages import ALL, News, OrderMessage, ParticipantReport
from asynccomm.control.runs import ParticipantId, compact_ranks
from asynccomm.control.transport import schema
from asynccomm.control.transport.topology import RankAddress
from asynccomm.ops.validation import CommInfo
from asynccomm.rendezvous import addresses, handshake
from asynccomm.rendezvous.handshake import HandshakeResult

PATIENT: Final = 1e6  # seconds; deadlines count real time
CLOSING_SECONDS: Final = 0.2  # in which all ranks close their comm, or leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One protocol with one number of ranks."""

    protocol: str
    ranks: int
    hosts: int
    each: float  #: requests or messages of a rank, on average
    most: int  #: of the busiest node
    nbytes: float  #: that a rank sends and receives, on average; 0: not counted
    connections: int  #: of the node with the most
    ms: float


def rendezvous(network: Network) -> Row:
    """All ranks begin at once, meet at the store, and exchange their addresses."""
    server = StoreServer(network)
    pids = _process_numbers(network)

    async def join(rank: int) -> None:
        store, pid = SimulatedStore(server, rank), pids[rank]
        contact = RankAddress(rank, host_name.get(), pid, f"asynccomm/f68a2c1f81754d9c/{rank}/{pid}/1")
        joined = await handshake.handshake(store, "main", rank, network.ranks, "auto", PATIENT, contact=contact)
        assert len(joined.members) == network.ranks
        await addresses.exchange_addresses(store.prefix(joined.epoch), joined, None, rank, {}, PATIENT)

    host_name: ContextVar[str] = ContextVar("host_name")
    number: ContextVar[int] = ContextVar("number")

    async def own_way(joined: HandshakeResult, sockets: object, rank: int, hints: object) -> addresses._Way:
        host = network.host(rank)
        return addresses._Way(f"10.0.{host // 250}.{host % 250 + 1}", 32768 + rank % 28232)

    async def all_ranks() -> None:
        tasks = []
        for rank in range(network.ranks):
            host_name.set(f"node-{network.host(rank):04d}")
            number.set(pids[rank])
            tasks.append(asyncio.ensure_future(join(rank)))
        await asyncio.gather(*tasks)

    fakes: list[tuple[object, str, object]] = [
        (handshake, "host_name", host_name.get),
        (handshake, "network_id", host_name.get),
        (os, "getpid", number.get),
        (addresses, "_own_way", own_way),
        # all ranks read the same tables: only the first one decodes them, and none compares all entries
        (handshake, "_unpacked", functools.lru_cache(handshake._unpacked)),
        (handshake, "_checked", lambda members, mine: members),
        (handshake, "_joined", _of_the_same(handshake._joined)),
        (addresses, "_unpacked", functools.lru_cache(addresses._unpacked)),
        (addresses, "_with_ways", lambda joined, ways: joined),
    ]
    with contextlib.ExitStack() as patches:
        for module, name, fake in fakes:
            patches.enter_context(mock.patch.object(module, name, fake))
        _, seconds = run(all_ranks())
    requests, nbytes = server.requests, server.nbytes
    return _row("rendezvous, store", network, requests / network.ranks, requests, nbytes / network.ranks, 1, seconds)


def _process_numbers(network: Network) -> list[int]:
    """Numbers of processes that a launcher on each host starts one after the other, beside other processes."""
    order = random.Random(0)
    numbers: list[int] = []
    for rank in range(network.ranks):
        begins = rank % network.per_host == 0
        numbers.append(order.randrange(1000, 4_000_000) if begins else numbers[-1] + order.choice([1, 1, 1, 2, 3, 9]))
    return numbers


def _of_the_same(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which is called once for each list that is its second argument."""
    results: dict[int, tuple[object, Any]] = {}

    def call(first: object, items: object, *others: object) -> Any:
        if id(items) not in results:
            results[id(items)] = items, function(first, items, *others)
        return results[id(items)][1]

    return call


def split(network: Network) -> Row:
    """All ranks split off a comm of all: they find their hosts, and count themselves, at the store."""
    server = StoreServer(network)
    hosts: set[tuple[tuple[int, ...], ...]] = set()

    async def join(rank: int) -> None:
        member = RankInfo(rank, f"node-{network.host(rank):04d}", rank)
        group = CommInfo("split", rank, network.ranks, torch.device("cpu"))
        context = cast(BackendContext, _Context(group, SimulatedStore(server, rank), {rank: member}))
        candidates = await locality.candidates(context)
        hosts.add(await locality.agreed(context, candidates, ""))
        await BackendContext.all_connected(context)

    async def all_ranks() -> None:
        await asyncio.gather(*[join(rank) for rank in range(network.ranks)])

    # all ranks read the same tables: only the first one decodes them
    read, place_of = functools.lru_cache(locality._read), functools.cache(locality.place_of)
    with mock.patch.object(locality, "_read", read), mock.patch.object(locality, "place_of", place_of):
        _, seconds = run(all_ranks())
    assert [len(found) for found in hosts] == [network.hosts]
    requests, nbytes = server.requests, server.nbytes
    return _row("split, store", network, requests / network.ranks, requests, nbytes / network.ranks, 1, seconds)


@dataclass(frozen=True, slots=True)
class _Context:
    """The parts of a :class:`BackendContext` that finding the hosts uses."""

    group: CommInfo
    store: SimulatedStore
    members: Mapping[int, RankInfo]


def _row(
    protocol: str, network: Network, each: float, most: int, nbytes: float, connections: int, seconds: float
) -> Row:
    return Row(
        protocol=protocol,
        ranks=network.ranks,
        hosts=network.hosts,
        each=each,
        most=most,
        nbytes=nbytes,
        connections=connections,
        ms=seconds * 1e3,
    )


def _tree_row(protocol: str, tree: Tree, us: float) -> Row:
    connections = max(len(router.links) for router in tree.routers)
    each = sum(tree.handled) / tree.network.ranks
    return _row(protocol, tree.network, each, max(tree.handled), 0, connections, us * 1e-6)


def control(network: Network) -> list[Row]:
    """The control channel connects; then a rank, a host's leader and the root are lost, one after the other."""
    tree = Tree(network)
    tree.attach_all()
    rows = [_tree_row("control channel connects", tree, tree.run())]
    last = network.ranks - 1
    for name, rank in (
        ("a rank is lost", last),
        ("a leader is lost", last - last % network.per_host),
        ("the root is lost", 0),
    ):
        if rank in tree.dead:
            continue
        tree.handled = [0] * network.ranks
        tree.kill(rank)
        us = tree.run()
        living = [router for router in tree.routers if router.rank not in tree.dead]
        assert all(rank in router.gone for router in living)
        rows.append(_tree_row(name, tree, us))
    return rows


def closing(network: Network) -> list[Row]:
    """All ranks close a comm, then leave the job, each at some time within ``CLOSING_SECONDS``."""
    with sharing(), _no_collections():
        return _closing(network)


def _closing(network: Network) -> list[Row]:
    tree = Tree(network)
    tree.attach_all()
    tree.run()
    order = random.Random(0)
    rows = []

    def close(rank: int) -> None:
        tree.routers[rank].send(ALL, News("main", {"kind": "closed"}), patient=True)

    for name, step in (("all close a comm", close), ("all leave the job", tree.leave)):
        tree.handled, tree.nbytes = [0] * network.ranks, 0
        begin = tree.now
        for rank in range(network.ranks):
            tree.at(begin + order.uniform(0, CLOSING_SECONDS * 1e6), functools.partial(step, rank))
        tree.run()
        row = _tree_row(name, tree, tree.last - begin)
        rows.append(dataclasses.replace(row, nbytes=tree.nbytes / network.ranks))
    assert len(tree.dead) == network.ranks
    assert not tree.suspicions, "taken for lost"
    return rows


def fingerprints(network: Network) -> Row:
    """The root compares one collective of all ranks."""
    table = FingerprintTable(network.ranks)
    fingerprint: Fingerprint = (0, 12345, 67890, 0)
    with _no_collections():
        begin = time.thread_time()
        for rank in range(network.ranks):
            assert table.take(rank, [fingerprint]) is None
        seconds = time.thread_time() - begin
    return _row("fingerprints, CPU", network, 1, network.ranks - 1, 0, 0, seconds)


def ordering(network: Network) -> Row:
    """One round of agreed ordering with ten operations of each rank."""
    with _no_collections():
        round_ = simulate(network.ranks, 10, 2)
    nbytes = round_.announcement_bytes + round_.decision_bytes
    return _row("agreed ordering, CPU", network, 1, network.ranks - 1, nbytes, 0, round_.council_us * 1e-6)


def shrink(network: Network) -> Row:
    """All ranks but one agree on the survivors. The time includes reading reports and writing orders."""
    ranks = range(network.ranks)
    known = frozenset(ranks)
    coordinator = Coordinator(0, ranks, gone={network.ranks - 1: "was lost"})
    living: dict[ParticipantId, Participant] = {rank: Participant(rank, known) for rank in ranks[:-1]}
    seconds, messages, nbytes = 0.0, 0, 0

    def report(rank: ParticipantId) -> None:
        nonlocal seconds, messages, nbytes
        text = schema.dumps(ParticipantReport("main", compact_ranks(ranks), living[rank].report()))
        begin = time.thread_time()
        coordinator.on_report(rank, schema.loads(ParticipantReport, text).report, 0.0)
        seconds += time.thread_time() - begin
        messages, nbytes = messages + 1, nbytes + len(text)

    def orders() -> list[tuple[ParticipantId, str]]:
        nonlocal seconds
        begin = time.thread_time()
        letters = [(rank, schema.dumps(OrderMessage("main", order))) for rank, order in coordinator.advance(0.0)]
        seconds += time.thread_time() - begin
        return letters

    once = functools.lru_cache(maxsize=4)(check_proposal)  # of the same list, by all ranks but rank 0
    with _no_collections(), mock.patch.object(participant_side, "check_proposal", once):
        for rank, participant in living.items():
            participant.ask(ranks[:-1])
            report(rank)
        finished = 0
        while letters := orders():
            for rank, text in letters:
                order = living[rank].on_order(schema.loads(OrderMessage, text).order)
                assert not isinstance(order, Retry)
                if isinstance(order, Prepare):
                    living[rank].prepared(order.decision.key)
                    report(rank)
                elif isinstance(order, Commit):
                    report(rank)
                finished += isinstance(order, Finalized)
                messages, nbytes = messages + 1, nbytes + len(text)
    assert finished == network.ranks - 1
    return _row("shrink, CPU", network, messages / network.ranks, messages, nbytes / network.ranks, 0, seconds)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def print_rows(rows: Sequence[Row]) -> None:
    print_table(
        ["protocol", "ranks", "hosts", "each", "busiest", "bytes each", "connections", "ms"],
        [
            (
                row.protocol,
                row.ranks,
                row.hosts,
                f"{row.each:.1f}",
                row.most,
                f"{row.nbytes:.0f}" if row.nbytes else "",
                row.connections or "",
                f"{row.ms:.3g}",
            )
            for row in rows
        ],
        "protocols of many ranks, simulated",
    )


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[10, 100, 1000], help="numbers of ranks")
    parser.add_argument("--per-host", type=int, default=8, help="ranks of a host")
    parser.add_argument("--local-us", type=float, default=10, help="latency inside a host")
    parser.add_argument("--remote-us", type=float, default=50, help="latency between hosts")
    parser.add_argument("--message-us", type=float, default=5, help="time of a node for a message")
    parser.add_argument("--gbit", type=float, default=10, help="bandwidth of a node per second")
    parser.add_argument("--leaving", type=int, default=3000, help="ranks up to which all close and leave")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    if min(*args.ranks, args.per_host) < 1 or min(args.ranks) < 3:
        parser.error("arguments --ranks, --per-host: at least 3 ranks, and 1 on a host")
    with Results[Row](print_rows, args.json) as rows:
        for ranks in args.ranks:
            network = Network(
                ranks=ranks,
                per_host=args.per_host,
                local_us=args.local_us,
                remote_us=args.remote_us,
                message_us=args.message_us,
                gbit=args.gbit,
            )
            rows.add(rendezvous(network), split(network), *control(network))
            if ranks <= args.leaving:
                rows.add(*closing(network))
            single: list[Callable[[Network], Row]] = [fingerprints, ordering, shrink]
            rows.add(*[protocol(network) for protocol in single])


if __name__ == "__main__":
    main()
