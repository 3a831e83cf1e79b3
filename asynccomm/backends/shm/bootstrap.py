"""Bootstrap of a shared segment: the ranks exchange descriptors over a local socket.

1. Rank 0 listens at an abstract address (which leaves no file behind), and announces the address. Ranks that know a
   secret derive the address from it, and connect without the announcement, which rank 0 makes only if ranks are late.
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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol, final

from asynccomm.backends.base import SOON_SECONDS, BackendContext, UnsuitableError
from asynccomm.backends.shm.fd_socket import FdBag
from asynccomm.backends.shm.handshake import Address, Entrance, Handed, PeerSide, RootSide, parse_address
from asynccomm.backends.shm.segment import Segment, create
from asynccomm.control.transport.schema import dumps
from asynccomm.core.hosts import pretends
from asynccomm.errors import BackendError, PeerLostError
from asynccomm.store.base import Store, path_of

OK: Final = "ok"
AT_ONCE_SECONDS: Final = 5e-4  # of attempts to connect to rank 0 without a pause: mostly it is about to listen
FIRST_PAUSE: Final = 0.001  # seconds between later attempts; doubles


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
        await context.announce(dumps(Address(problem)))
    await _consult(context, problem, asyncio.get_running_loop().create_future())


async def bootstrap_segment(
    context: BackendContext,
    settings: Mapping[str, int],
    layout: SegmentLayout,
    bells: tuple[int, int],
    arena: int | None = None,
    on_mapped: Callable[[PeerMapping], object] | None = None,
) -> PeerMapping:
    """Bootstrap a segment that all ranks share. Collective, without a timeout; cancellation closes all descriptors.

    Args:
        settings: hints that must have the same values on all ranks.
        layout: the layout of the segment, which follows from the settings.
        bells: eventfds that wake this rank's event loop and its progress thread.
        arena: a descriptor of the memory of this rank's tensors; all ranks give one, or none does.
        on_mapped: called when this rank has mapped the segment, while other ranks may be about to; an error there is
            the loss of this rank for the others.

    Raises:
        UnsuitableError: on all ranks, if some of them cannot share memory or their settings differ.
        BackendError: on rank 0, if the system has dropped descriptors that rank 0 received.
        PeerLostError: if a rank is lost during the bootstrap.
    """
    if reason := unsupported():
        await report_unsupported(context, reason)
    rank, size = context.group.rank, context.group.size
    with contextlib.ExitStack() as unless_shared:
        ours = FdBag()
        unless_shared.callback(ours.close)
        derived = Address.derived(settings, path_of(context.store), context.secret) if context.secret else None
        try:
            there, liveness_fd = (ours.add(fd) for fd in os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
            mine = (*bells, there) if arena is None else (*bells, there, arena)
            if rank:
                side: RootSide | PeerSide = PeerSide(size, ours, mine)
            else:
                entrance = Entrance(derived or Address.random(settings), size) if size > 1 else None
                side = RootSide(context.group, entrance, ours, mine)
        except OSError as exc:
            await report_unsupported(context, str(exc.strerror))
        made: list[PeerMapping] = []
        unless_shared.callback(made.clear)  # the frames of an error would keep the mapping
        with contextlib.closing(side):
            if isinstance(side, RootSide):
                handed = await _accept_peers(context, layout, side, derived is not None)
            else:
                handed = await _connect_to_root(context, settings, layout, side, derived)
            assert side.segment is not None
            ours.close_one(there)  # the peers have duplicates, and a rank does not watch itself
            handed[rank] = (*bells, -1) if arena is None else (*bells, -1, arena)
            made.append(_mapping_of(side.segment, [handed[r] for r in range(size)], liveness_fd, ours))
            if on_mapped is not None:
                on_mapped(made[0])
            if problem := await side.verdict():
                raise UnsuitableError(f"comm {context.group.name!r}: {problem}")
        unless_shared.pop_all()
    return made[0]


def _mapping_of(segment: Segment, handed: Sequence[Handed], liveness_fd: int, ours: FdBag) -> PeerMapping:
    """The mapping of a rank, from the descriptors of all ranks in order."""
    return PeerMapping(
        segment=segment,
        bells=[(loop, worker) for loop, worker, *_ in handed],
        liveness_fds=[each[2] for each in handed],
        liveness_fd=liveness_fd,
        arenas=[each[3] for each in handed if len(each) > 3],
        descriptors=ours,
    )


async def _accept_peers(
    context: BackendContext, layout: SegmentLayout, host: RootSide, derived: bool
) -> dict[int, Handed]:
    """Rank 0's side, up to its mapping; returns all ranks' descriptors.

    Args:
        derived: whether the other ranks derive the address.
    """
    fd, problem = -1, ""
    try:
        fd = host.ours.add(create(layout.total))
        host.segment = Segment(fd, layout.total)
    except BackendError as exc:
        problem = f"rank 0 cannot share memory: {exc}"
    if host.entrance is not None:
        address = host.entrance.address
        tasks: list[asyncio.Task[None]] = []

        def watch() -> None:
            tasks.append(asyncio.create_task(_watch_store(context, dumps(address))))
            tasks[0].add_done_callback(host.on_watched)

        soon = derived and all(_is_near(context, rank) for rank in range(context.group.size))
        timer = asyncio.get_running_loop().call_later(SOON_SECONDS if soon else 0.0, watch)
        try:
            await host.came
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
        if host.problem or not host.complete:
            host.ask_for_results()
            await _consult(context, host.problem, host.gone)
    host.stop_listening()
    if problem or host.segment is None:
        raise UnsuitableError(f"comm {context.group.name!r}: {await host.verdict(problem)}")
    await host.distribute_fds(fd)
    host.ours.close_one(fd)
    return host.handed


async def _watch_store(context: BackendContext, address: str) -> None:
    """Announce the address of rank 0, and wait until a rank has written to the store that it has a problem."""
    await context.announce(address)
    if context.announcements is None:
        await asyncio.sleep(SOON_SECONDS)
    await context.store.wait(["problem"], math.inf)


async def _connect_to_root(
    context: BackendContext,
    settings: Mapping[str, int],
    layout: SegmentLayout,
    peer: PeerSide,
    derived: Address | None,
) -> dict[int, Handed]:
    """Any other rank's side, up to its report; returns all other ranks' descriptors."""
    rank, hosts = context.group.rank, [member.host for member in context.members]
    problem = ""
    if hosts[rank] != hosts[0] and pretends():
        problem = f"rank {rank} pretends to be on host {hosts[rank]!r}, and rank 0 on host {hosts[0]!r}"
    elif derived is None or not _is_near(context, rank) or not await _reach(context, peer, derived):
        problem = await _reach_announced(context, peer, settings)
    if problem or await peer.is_asked():
        await _consult(context, problem, peer.gone)
    try:
        fd, handed = await peer.receive_fds([r for r in range(context.group.size) if r != rank])
        peer.segment = Segment(fd, layout.total)
        peer.ours.close_one(fd)
    except BackendError as exc:
        problem = f"rank {rank} cannot share memory: {exc}"
    await peer.report(problem)
    if problem or peer.segment is None:
        raise UnsuitableError(f"comm {context.group.name!r}: {await peer.verdict(problem)}")
    return handed


def _is_near(context: BackendContext, rank: int) -> bool:
    """Whether a rank has the network of rank 0, and with it the names of local sockets."""
    return context.members[rank].network == context.members[0].network


async def _reach(context: BackendContext, peer: PeerSide, address: Address) -> bool:
    """Connect to rank 0 at an address that it derives, too, as soon as it is there.

    Returns: False: rank 0 has announced another address, or a problem.
    """
    announced: asyncio.Future[bytes] | None = None
    pause, until = FIRST_PAUSE, time.monotonic() + AT_ONCE_SECONDS
    try:
        while True:
            try:
                await peer.connect(context.group.rank, address)
            except OSError as exc:
                if not isinstance(exc, ConnectionRefusedError):
                    break
            else:
                return True
            if time.monotonic() < until:
                os.sched_yield()  # rank 0 may need this core
                await asyncio.sleep(0)
                continue
            if announced is None:
                announced = asyncio.ensure_future(context.announced())
            await asyncio.wait([announced], timeout=pause)
            if announced.done():
                break
            pause = min(2 * pause, SOON_SECONDS)
        return False
    finally:
        if announced is not None:
            announced.cancel()


async def _reach_announced(context: BackendContext, peer: PeerSide, settings: Mapping[str, int]) -> str:
    """Connect to the address that rank 0 announces. Returns the reason if that cannot be; else an empty string."""
    rank, hosts = context.group.rank, [member.host for member in context.members]
    address = parse_address(await context.announced())
    problem = address.problem or _difference(settings, address.settings, rank)
    if not problem:
        try:
            await peer.connect(rank, address)
        except OSError as exc:
            problem = (
                f"rank {rank} on host {hosts[rank]!r} cannot reach rank 0 on host {hosts[0]!r} by a local socket: "
                f"{exc.strerror or exc}"
            )
    return problem


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
