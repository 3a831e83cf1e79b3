"""Ranks on several hosts: shared memory inside each host, gloo between the hosts.

The backend is made of others. In the host there are two comms of shared memory, on the way of an operation before and
after the network; between hosts, each position of the hosts has a gloo comm, a rail. ``locality`` finds the hosts,
``reductions``, ``movement`` and ``bundles`` make an operation's plan of steps on these, ``plain_reductions`` keeps
plans for the next call, and ``pipeline`` carries them out; ``lane_calls`` begins steps that need no submission.
Operations that share memory wait for each other (``gloo/hazard_tracker.py``).

Every collective has a step with all ranks of a host and a step with all leaders, and all steps carry a label made of
the call (``labels``): ranks that call different collectives meet in such a step, and its backend finds the difference.

Messages within a host use its first comm, those between hosts a gloo comm of all ranks (``messages``); windows use both
(``windows``). On one host, or with one rank on each, a single backend does everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Self, TypeVar, final

import torch
from torch import Tensor

from asynccomm.backends.base import (
    Backend,
    BackendContext,
    BackendWindow,
    DirectCalls,
    FastCalls,
    Submission,
    UnsuitableError,
    own_hints,
)
from asynccomm.backends.gloo.backend import GlooBackend
from asynccomm.backends.gloo.hazard_tracker import HazardTracker
from asynccomm.backends.hierarchical import bundles, locality, movement, reductions
from asynccomm.backends.hierarchical.direct_calls import DirectAllReduces
from asynccomm.backends.hierarchical.lane_calls import LaneCalls, RailCalls
from asynccomm.backends.hierarchical.messages import PlacedMessages
from asynccomm.backends.hierarchical.pipeline import Lane, OpPlan, Pipeline
from asynccomm.backends.hierarchical.placement import HostPlacement
from asynccomm.backends.hierarchical.plain_reductions import PlainAllReduces
from asynccomm.backends.hierarchical.translation import translated
from asynccomm.backends.hierarchical.windows import make_window
from asynccomm.backends.shm.arena import arena
from asynccomm.backends.shm.backend import ShmBackend
from asynccomm.core.tasks import shielded
from asynccomm.core.work import Work
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Parcels,
    PeerOp,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    WindowInfo,
)

B = TypeVar("B", bound=Backend)

_WAYS: Final[Mapping[type[Op], Callable[[HostPlacement, Submission], OpPlan]]] = {
    AllReduce: reductions.all_reduce,
    Reduce: reductions.reduce,
    ReduceScatter: reductions.reduce_scatter,
    ReduceScatterSingle: reductions.reduce_scatter,
    Broadcast: movement.broadcast,
    AllGather: movement.all_gather,
    AllGatherSingle: movement.all_gather,
    Gather: movement.gather,
    Scatter: movement.scatter,
    AllToAllSingle: movement.all_to_all_single,
    Barrier: movement.barrier,
    AllToAll: bundles.all_to_all,
    Parcels: bundles.parcels,
}


# The ranks of a host wait for the network most of the time, and threads that spin meanwhile take cores from the
# sockets: 16 MiB took 25 % longer (bench/hosts.py, 4 ranks on 2 cores).
_LANES: Final[Mapping[str, str]] = {"thread_spin_us": "20"}


@final
class HierarchicalBackend(Backend):
    """One rank of a comm on several hosts.

    Args:
        lanes: the backends on the way of a collective.
        messages: the backends for messages within the host, and between hosts.
    """

    name = "hierarchical"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    hints: ClassVar[Mapping[str, str]] = {**ShmBackend.hints, **GlooBackend.hints}
    compares = True

    def __init__(
        self,
        context: BackendContext,
        where: HostPlacement,
        lanes: Mapping[Lane, Backend],
        messages: tuple[ShmBackend | None, GlooBackend | None],
    ) -> None:
        self.placement: HostPlacement = where
        self._lanes = lanes
        self._inside, self._between = messages
        self._context = context
        self._on_error = context.on_error
        #: the backend that does everything, on one host or with one rank on each
        self._only: Backend | None = None
        if len(where.hosts) == 1:
            self._only = self._inside or self._between
        elif len(where.hosts) == where.size:
            self._only = self._between
        name = f"asynccomm-hierarchical-{context.group.name}"
        host = replace(context.group, rank=where.position, size=len(where.local))
        self._quick: dict[Lane, LaneCalls | RailCalls] = {}
        quick = self._quick
        for lane, backend in lanes.items() if self._only is None else ():
            if isinstance(backend, GlooBackend):
                quick[lane] = RailCalls(backend.collectives, where.host, len(where.rail()))
            elif isinstance(backend, ShmBackend):
                calls = LaneCalls.of(backend, host, context.mailbox)
                if calls is not None:
                    quick[lane] = calls
        self._pipeline = Pipeline(name, context.mailbox, lanes, quick, context.on_error)
        self._plain = PlainAllReduces(where)
        self._in_flight = HazardTracker(self._start, self._not_started)
        self._messages = PlacedMessages(where, *messages, self._pipeline, context.mailbox)

    @classmethod
    def check_hints(cls, hints: Mapping[str, str]) -> None:
        for backend in (ShmBackend, GlooBackend):
            backend.check_hints(own_hints(backend, hints))

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        rank = context.group.rank
        tried = await locality.candidates(context)
        mine = next(ranks for ranks in tried if rank in ranks)
        connected: list[Backend] = []

        async def join(backend: type[B], name: str, ranks: Sequence[int], hints: Mapping[str, str] = {}) -> B:
            made = await backend.connect(_among(context, backend, name, ranks, hints))
            connected.append(made)
            return made

        try:
            inside: list[ShmBackend] = []
            problem = ""
            all_here = len(mine) == context.group.size
            if all_here or len(mine) > 1:
                ways, ours = (("up",), {}) if all_here else (("up", "down"), _LANES)
                try:
                    inside = [await join(ShmBackend, f"{way} {mine[0]}", mine, ours) for way in ways]
                except UnsuitableError as exc:
                    inside, problem = [], str(exc)
            where = HostPlacement(rank, await locality.agreed(context, tried, problem))
            if context.alternatives and len(where.hosts) == where.size:
                raise UnsuitableError(f"comm {context.group.name!r}: no two ranks can map the same memory")
            lanes: dict[Lane, Backend] = dict(zip((Lane.UP, Lane.DOWN), inside, strict=False))
            between = None
            if len(where.hosts) < where.size and where.position < where.rails and len(where.hosts) > 1:
                lanes[Lane.ACROSS] = await join(GlooBackend, f"rail {where.position}", where.rail())
            if len(where.hosts) > 1 or not inside:
                between = await join(GlooBackend, "messages", range(where.size))
            return cls(context, where, lanes, (inside[0] if inside else None, between))
        except BaseException:
            for backend in connected:
                await shielded(backend.aclose())
            raise

    def submit(self, batch: Sequence[Submission]) -> None:
        if self._only is not None:
            self._only.submit(batch)
            return
        for submission in batch:
            if isinstance(submission.op, PeerOp):
                self._messages.submit(submission, submission.op)
                continue
            try:
                self._in_flight.submit(submission)
            except Exception as exc:  # no memory, or a bug
                self._not_started(submission, exc)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _start(self, submission: Submission, over: Callable[[], object]) -> None:
        way = self._plain.plan(submission) if isinstance(submission.op, AllReduce) else None
        if way is None:
            with torch.inference_mode(False):  # any thread may write the memory that a plan allocates
                way = _WAYS[type(submission.op)](self.placement, submission)
        self._pipeline.start(submission, way, over)

    def _not_started(self, submission: Submission, exc: Exception) -> None:
        error = BackendError(f"hierarchical could not start {submission.op}: {type(exc).__name__}: {exc}")
        error.__cause__ = exc
        self._on_error(error)

    # -- windows -------------------------------------------------------------------------------------------------------

    def shared_tensor(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return arena().strided(shape, stride, dtype)

    async def window(self, window: WindowInfo) -> BackendWindow:
        if self._only is not None:
            return await self._only.window(window)
        assert self._between is not None
        return await make_window(self._context, self.placement, window, self._inside, self._between)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def fast_path(self, calls: DirectCalls) -> FastCalls | None:
        if self._only is not None:
            return self._only.fast_path(calls)
        if Lane.UP not in self._quick:
            return None
        return DirectAllReduces(calls, self._plain, self._quick, self._in_flight, self._pipeline, self._broken)

    def _broken(self, exc: BaseException) -> None:
        error = BackendError(f"hierarchical failed: {type(exc).__name__}: {exc}")
        error.__cause__ = exc
        self._on_error(error)

    def before_await(self, work: Work[Any]) -> None:
        if self._only is not None:
            self._only.before_await(work)
        elif isinstance(work.op, PeerOp):
            self._messages.before_await(work)
        else:
            self._pipeline.before_await(work)

    def before_block(self, work: Work[Any]) -> None:
        if self._only is not None:
            self._only.before_block(work)
        elif isinstance(work.op, PeerOp):
            self._messages.before_block(work)
        else:
            self._pipeline.before_block(work)

    # -- ending --------------------------------------------------------------------------------------------------------

    @property
    def _all(self) -> list[Backend]:
        found = [*self._lanes.values(), *[each for each in (self._inside, self._between) if each is not None]]
        return list(dict.fromkeys(found))

    def withdraw_tensors(self) -> None:
        for backend in self._all:
            backend.withdraw_tensors()

    def drain_before_failure(self) -> None:
        for backend in self._all:
            backend.drain_before_failure()

    async def aclose(self) -> None:
        self._in_flight.end()
        self._pipeline.end()
        await asyncio.gather(*[backend.aclose() for backend in self._all])

    def abort(self) -> None:
        self._in_flight.end()
        self._pipeline.end()
        for backend in self._all:
            backend.abort()

    def close_at_exit(self) -> None:
        self._in_flight.end()
        self._pipeline.end()
        for backend in self._all:
            backend.close_at_exit()


def _among(
    context: BackendContext, backend: type[Backend], name: str, ranks: Sequence[int], hints: Mapping[str, str] = {}
) -> BackendContext:
    """The context of ``backend`` among ``ranks`` of the comm, which this rank belongs to; ``hints``: its defaults."""
    group, on_error = context.group, context.on_error

    def failed(error: BrokenError) -> object:
        return on_error(translated(error, ranks))

    return replace(
        context,
        group=replace(group, rank=list(ranks).index(group.rank), size=len(ranks)),
        members=[context.members[rank] for rank in ranks],
        store=context.store.prefix(name),
        on_error=failed,
        hints={**hints, **own_hints(backend, context.hints)},
        announcements=None,
        alternatives=False,
    )
