"""Bootstrap of a shared segment: the ranks exchange descriptors over a local socket.

1. Rank 0 listens at an abstract address (which leaves no file behind), and announces the address, if it has not done
   so when the ranks met (``BackendOffer``).
2. Each other rank connects. Both sides check the other side's user, and a token from the announcement. The rank sends
   its descriptors to rank 0: its two doorbells, one end of a pipe that reads EOF when the rank is lost, and perhaps the
   memory of its tensors (``arena.py``).
3. Rank 0 sends the segment to all ranks with all other ranks' descriptors. Each rank maps the segment, and reports the
   result to rank 0.
4. Rank 0 sends the verdict: all ranks have mapped the segment, or the problem of the lowest rank that has one.

A rank that cannot connect has only the store. It writes its problem there, and rank 0, which watches the store, asks
all connected ranks for their results in the store. All ranks read all results, and so reach the same decision.

Only an attempt shows whether ranks can share memory: host names and environment variables do not reveal containers,
namespaces and users.

The connections stay open until the verdict, so a connection that ends earlier means a lost rank.
Callbacks that never block serve the connections, and coroutines await only their results: the bootstrap can therefore
be cancelled at any point.

Any process on the host can connect to rank 0, which admits connections as :mod:`asynccomm.control.transport.admission`
describes. A rank sends its hello as soon as it has connected.

No data from another process is trusted to be well formed, neither in the store nor on a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol, final

from asynccomm.backends.base import SOON_SECONDS, BackendContext, UnsuitableError
from asynccomm.backends.shm.fd_socket import FdBag
from asynccomm.backends.shm.handshake import Address, Entrance, Handed, PeerSide, RootSide, parse_address
from asynccomm.backends.shm.segment import Segment, create
from asynccomm.control.transport.schema import dumps
from asynccomm.core.hosts import pretends
from asynccomm.errors import BackendError, PeerLostError
from asynccomm.store.base import Store

OK: Final = "ok"


class SegmentLayout(Protocol):
    """The layout of a segment."""

    @property
    def total(self) -> int:
        """Bytes of the segment."""


@final
@dataclass(frozen=True, slots=True)
class PeerMapping:
    """The segment and the descriptors that a rank shares with its peers."""

    segment: Segment
    bells: list[tuple[int, int]]  #: eventfds by rank; the caller of ``bootstrap_segment`` owns those of this rank
    liveness_fds: list[int]  #: by rank, the end of a pipe that reads EOF when the rank is lost; -1 for this rank
    liveness_fd: int  #: the writing end of this rank's own pipe
    arenas: list[int]  #: by rank, the memory of its tensors, for reading; empty if none was handed over
    descriptors: FdBag = field(repr=False)  #: the descriptors that ``close`` closes

    def close(self) -> None:
        """Close all descriptors but this rank's own bells; peers then see EOF on its pipe. Idempotent."""
        self.descriptors.close()


def unsupported() -> str:
    """The reason why no rank on this system can share memory; empty if ranks can."""
    return "" if sys.platform == "linux" else f"needs Linux, and this is {sys.platform}"


async def report_unsupported(context: BackendContext, reason: str) -> NoReturn:
    """Take part in the bootstrap only to report that this rank cannot share memory.

    Raises: UnsuitableError, as ``bootstrap_segment`` does on the other ranks.
    """
    problem = f"rank {context.group.rank} cannot share memory: {reason}"
    if context.group.rank == 0:
        if context.offer is None:
            await context.announce(dumps(Address(problem)))
        elif context.offer.resource is not None:
            context.offer.resource.close()  # else the other ranks would wait there for an answer
    await _consult(context, problem, asyncio.get_running_loop().create_future())


async def bootstrap_segment(
    context: BackendContext,
    settings: Mapping[str, int],
    layout: SegmentLayout,
    bells: tuple[int, int],
    arena: int | None = None,
) -> PeerMapping:
    """Bootstrap a segment that all ranks share. Collective, without a timeout; cancellation closes all descriptors.

    Args:
        settings: hints that must have the same values on all ranks.
        layout: the layout of the segment, which follows from the settings.
        bells: eventfds that wake this rank's event loop and its progress thread.
        arena: a descriptor of the memory of this rank's tensors; all ranks give one, or none does.

    Raises:
        UnsuitableError: on all ranks, if some of them cannot share memory or their settings differ.
        PeerLostError: if a rank is lost during the bootstrap.
    """
    if reason := unsupported():
        await report_unsupported(context, reason)
    rank, size = context.group.rank, context.group.size
    with contextlib.ExitStack() as unless_shared:
        ours = FdBag()
        unless_shared.callback(ours.close)
        try:
            there, liveness_fd = (ours.add(fd) for fd in os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
            mine = (*bells, there) if arena is None else (*bells, there, arena)
            side = _root_side(context, settings, ours, mine) if rank == 0 else PeerSide(size, ours, mine)
        except OSError as exc:
            await report_unsupported(context, str(exc.strerror))
        with contextlib.closing(side):
            if isinstance(side, RootSide):
                segment, handed = await _accept_peers(context, layout, side)
            else:
                segment, handed = await _connect_to_root(context, settings, layout, side)
        ours.close_one(there)  # the peers have duplicates, and a rank does not watch itself
        unless_shared.pop_all()
    handed[rank] = (*bells, -1) if arena is None else (*bells, -1, arena)
    return PeerMapping(
        segment=segment,
        bells=[(handed[r][0], handed[r][1]) for r in range(size)],
        liveness_fds=[handed[r][2] for r in range(size)],
        liveness_fd=liveness_fd,
        arenas=[] if arena is None else [handed[r][3] for r in range(size)],
        descriptors=ours,
    )


def _root_side(context: BackendContext, settings: Mapping[str, int], ours: FdBag, mine: Handed) -> RootSide:
    """Rank 0's side, with the entrance that was offered, or another one. Raises: OSError."""
    size = context.group.size
    entrance = None if context.offer is None else context.offer.resource
    if not isinstance(entrance, Entrance):
        entrance = Entrance(settings, size) if size > 1 else None
    return RootSide(context.group, entrance, ours, mine)


async def _accept_peers(
    context: BackendContext, layout: SegmentLayout, host: RootSide
) -> tuple[Segment, dict[int, Handed]]:
    """Rank 0's side; returns the segment and all ranks' descriptors."""
    announcing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if host.entrance is not None and context.offer is None:
        announcing = asyncio.ensure_future(context.announce(dumps(host.entrance.address)))
    watching = asyncio.ensure_future(_problem_in_store(context.store))
    fd, problem = -1, ""
    try:
        fd = host.ours.add(create(layout.total))
        host.segment = Segment(fd, layout.total)
    except BackendError as exc:
        problem = f"rank 0 cannot share memory: {exc}"
    try:
        await _first_of(host.came, host.gone, watching, announcing)
        if host.problem or not host.came.done():
            host.ask_for_results()
            await _consult(context, host.problem, host.gone)
    finally:
        announcing.cancel()
        watching.cancel()
    host.stop_listening()
    if not problem:
        await host.distribute_fds(fd)
        host.ours.close_one(fd)
        problem = await host.mapping_problem()
    await host.send_verdict(problem)
    if problem or host.segment is None:
        raise UnsuitableError(f"comm {context.group.name!r}: {problem}")
    return host.segment, host.handed


async def _problem_in_store(store: Store) -> None:
    """Wait until a rank has written to the store that it has a problem."""
    await asyncio.sleep(SOON_SECONDS)
    await store.wait(["problem"], math.inf)


async def _first_of(
    came: asyncio.Future[None],
    gone: asyncio.Future[PeerLostError],
    watching: asyncio.Future[None],
    announcing: asyncio.Future[None],
) -> None:
    """Wait until all ranks came, or one has a problem. Raises: PeerLostError; the error of the announcement."""
    waited: set[asyncio.Future[Any]] = {came, gone, watching, announcing}
    while True:
        done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if came in done:
            return
        if gone in done:
            raise gone.result()
        for each in done:
            each.result()
        if watching in done:
            return


async def _connect_to_root(
    context: BackendContext, settings: Mapping[str, int], layout: SegmentLayout, peer: PeerSide
) -> tuple[Segment, dict[int, Handed]]:
    """Any other rank's side; returns the segment and all other ranks' descriptors."""
    rank, hosts = context.group.rank, [member.host for member in context.members]
    address = parse_address(await context.announced())
    problem = address.problem or _difference(settings, address.settings, rank)
    if not problem and hosts[rank] != hosts[0] and pretends():
        problem = f"rank {rank} pretends to be on host {hosts[rank]!r}, and rank 0 on host {hosts[0]!r}"
    if not problem:
        try:
            await peer.connect(rank, address)
        except OSError as exc:
            problem = (
                f"rank {rank} on host {hosts[rank]!r} cannot reach rank 0 on host {hosts[0]!r} by a local socket: "
                f"{exc.strerror or exc}"
            )
    if problem or await peer.is_asked():
        await _consult(context, problem, peer.gone)
    try:
        fd, handed = await peer.receive_fds([r for r in range(context.group.size) if r != rank])
        peer.segment = Segment(fd, layout.total)
        peer.ours.close_one(fd)
        verdict = await peer.verdict("")
    except BackendError as exc:
        verdict = await peer.verdict(f"rank {rank} cannot share memory: {exc}")
    if verdict or peer.segment is None:
        raise UnsuitableError(f"comm {context.group.name!r}: {verdict}")
    return peer.segment, handed


def _difference(mine: Mapping[str, int], host: Mapping[str, object], rank: int) -> str:
    for key in sorted({*mine, *host}):
        if mine.get(key) != host.get(key):
            return f"hint {key!r} differs: rank 0 has {host.get(key)}, rank {rank} has {mine.get(key)}"
    return ""


async def _consult(context: BackendContext, problem: str, gone: asyncio.Future[PeerLostError]) -> NoReturn:
    """Write this rank's problem to the store (none: empty), and read the results of all ranks.

    Raises: UnsuitableError, the same on all ranks, with the problem of the lowest rank that has one.
    """
    await context.store.set(f"reach/{context.group.rank}", problem or OK)
    if problem:
        await context.store.set("problem", b"1")
    results = await _read_results(context.store, [f"reach/{rank}" for rank in range(context.group.size)], gone)
    found = next((said for said in results if said != OK), "a rank has a problem, and does not say which")
    raise UnsuitableError(f"comm {context.group.name!r}: {found}")


async def _read_results(store: Store, keys: Sequence[str], gone: asyncio.Future[PeerLostError]) -> list[str]:
    """The results at ``keys``. Raises: PeerLostError if a rank is lost before it has written one."""
    asking = asyncio.ensure_future(store.multi_get(keys, math.inf))
    either: set[asyncio.Future[Any]] = {asking, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        # an orderly rank closes its connection only after it has read all results, so then all are in the store
        if not asking.done() and not await store.check(keys):
            raise gone.result()
        return [said.decode(errors="replace") for said in await asking]
    finally:
        asking.cancel()
