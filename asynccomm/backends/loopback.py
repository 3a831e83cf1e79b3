"""All ranks in one process and one event loop: for tests of programs, and of all layers above the backends.

The ranks share a :class:`Hub`, one per comm, which they find through their common ``MemoryStore``::

    store = MemoryStore()
    comms = await asyncio.gather(*(new_comm("loopback", name="t", store=store, rank=r, size=3) for r in range(3)))

An operation runs when its last rank arrives, inside that rank's call. A test can make a hub hold operations back,
release them, and fail.

All ranks submit the same batches of collectives, in the same order: a batch runs when all ranks have submitted it. A
single collective counts as a batch of one, whatever messages are submitted with it.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self, final
from weakref import WeakKeyDictionary

from torch import Tensor

from asynccomm.backends.base import Backend, BackendContext, BackendWindow, Submission
from asynccomm.backends.computing import contribution, fill, perform
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.differences import difference, issued, misfit
from asynccomm.backends.hazards import load
from asynccomm.backends.matching import MatchQueues
from asynccomm.backends.windows import LocalPart
from asynccomm.core.handles import Handle
from asynccomm.errors import AsyncCommError, BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import (
    AllToAll,
    Parcel,
    Parcels,
    PeerOp,
    PeerParcel,
    Recv,
    Send,
    WindowFence,
    WindowInfo,
    WindowOp,
    WindowWait,
)
from asynccomm.ops.validation import as_index
from asynccomm.store.base import PrefixStore, Store
from asynccomm.store.memory import MemoryStore

_hubs: WeakKeyDictionary[MemoryStore, dict[str, Hub]] = WeakKeyDictionary()


@final
class Hub(Handle):
    """The shared state of the ranks of one comm."""

    _instead = "all ranks of a loopback comm are in one process"

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.RLock()
        self._contexts: dict[int, BackendContext] = {}
        self._next = [0] * size  # number of collectives submitted so far, by rank
        # by the number of a batch's first collective: the batch of each rank
        self._arrived: defaultdict[int, dict[int, Sequence[Submission]]] = defaultdict(dict)
        self._messages: list[MatchQueues[Submission, Submission]] = [
            MatchQueues(size) for _ in range(size)
        ]  # by receiver
        self._held: deque[tuple[frozenset[int], Callable[[], None]]] | None = None  # with the ranks that take part
        self.failed: bool = False  #: whether the transport has failed: no operation takes effect any more
        #: parts by window and rank
        self.parts: defaultdict[int, dict[int, LocalPart]] = defaultdict(dict)

    def join(self, context: BackendContext) -> None:
        self._contexts[context.group.rank] = context

    def leave(self, rank: int) -> None:
        """Remove ``rank``, which could not connect."""
        self._contexts.pop(rank, None)

    def hold(self) -> None:
        """Hold back all operations that become complete from now on."""
        with self._lock:
            if self._held is None:
                self._held = deque()

    def release(self, count: int | None = None) -> None:
        """Run ``count`` of the held operations, oldest first; None: run all, and stop holding."""
        left = math.inf if count is None else as_index(count)
        if left is None or left < 0:
            raise ValueError(f"count must be an integer, and not negative, got {count!r}")
        with self._lock:
            while left and self._held:
                self._held.popleft()[1]()
                left -= 1
            if count is None:
                self._held = None

    def fail(self, detail: str) -> None:
        """Report a transport error to every rank.

        No operation takes effect any more; held operations do not, either. All of them fail with BackendError once the
        comms break: after a second, in which they wait for a rank that reports a cause, or at once without a control
        channel.
        """
        with self._lock:
            self.failed = True
            if self._held is not None:
                self._held.clear()
        self._report(BackendError(f"loopback: {detail}"))

    def submit(self, rank: int, batch: Sequence[Submission]) -> None:
        with self._lock:
            for submission in batch:
                op = submission.op
                if not isinstance(op, PeerOp):
                    continue
                if op.is_send:
                    assert op.peer is not None
                    self._send(rank, submission, op.peer, op.key)
                else:
                    found = self._messages[rank].post(submission, op.peer, op.key)
                    if found is not None:
                        self._meet(found[0], rank, found[1], submission)
            collectives = [submission for submission in batch if not submission.op.p2p]
            if collectives:
                self._gather(rank, collectives)

    def _gather(self, rank: int, batch: Sequence[Submission]) -> None:
        number = self._next[rank]
        self._next[rank] += len(batch)
        arrived = self._arrived[number]  # the same number on all ranks: all earlier batches were alike
        arrived[rank] = batch
        if len(arrived) < self._size:
            return
        del self._arrived[number]
        batches = [arrived[rank] for rank in range(self._size)]
        everybody = frozenset(arrived)
        mismatch = _mismatch(batches)
        if mismatch is not None:
            self._run_or_hold(everybody, lambda: self._report(mismatch))
            return
        for ranks in zip(*batches, strict=True):
            self._run_or_hold(everybody, partial(self._collective, ranks))

    def one_sided(self, rank: int, peer: int, run: Callable[[], None]) -> None:
        """Run an operation of ``rank`` on a window's part of ``peer``, or hold it back."""
        with self._lock:
            self._run_or_hold(frozenset((rank, peer)), run)

    def drop(self, rank: int) -> None:
        """Drop all submissions of ``rank``."""
        with self._lock:
            for arrived in self._arrived.values():
                arrived.pop(rank, None)
            self._messages[rank].clear()
            for messages in self._messages:
                messages.forget(rank)
            if self._held is not None:
                self._held = deque(entry for entry in self._held if rank not in entry[0])

    def _send(self, rank: int, send: Submission, peer: int, key: int) -> None:
        messages = self._messages[peer]
        recv = messages.claim(rank, key)
        if recv is None:
            messages.keep(send, rank, key)
        else:
            self._meet(rank, peer, send, recv)

    def _meet(self, source: int, destination: int, send: Submission, recv: Submission) -> None:
        ends = frozenset((source, destination))
        self._run_or_hold(ends, lambda: self._transfer(source, destination, send, recv))

    def _run_or_hold(self, ranks: frozenset[int], run: Callable[[], None]) -> None:
        if self.failed:
            return  # the comm settles the operations, by its error
        if self._held is None:
            run()
        else:
            self._held.append((ranks, run))

    def _transfer(self, source: int, destination: int, send: Submission, recv: Submission) -> None:
        recv.work.source = source
        if isinstance(recv.op, PeerParcel):
            delivery = Delivery(recv)
            self._deliver(delivery, recv, {source: send.parcels[0]})
            self._settle(delivery, recv)
        else:
            assert isinstance(send.op, Send)
            assert isinstance(recv.op, Recv)
            if not recv.op.takes(send.op):
                self._report(CollectiveMismatchError(send.work.seq, source, str(send.op), destination, str(recv.op)))
                return
            fill(recv.outputs, contribution(send.op, send.inputs))
            recv.work.settle()
        send.work.settle()

    def _collective(self, ranks: Sequence[Submission]) -> None:
        op = ranks[0].op
        if isinstance(op, Parcels):
            deliveries = [Delivery(submission) for submission in ranks]  # before any output is written
            for rank, delivery in enumerate(deliveries):
                self._deliver(delivery, ranks[rank], _parcels_for(rank, op, ranks))
            for delivery, submission in zip(deliveries, ranks, strict=True):  # all deliveries have read their parcels
                self._settle(delivery, submission)
            return
        _perform(ranks)
        for submission in ranks:
            submission.work.settle()

    def _deliver(self, delivery: Delivery, submission: Submission, parcels: dict[int, Parcel]) -> None:
        """Deliver ``parcels`` to a submission."""
        lengths = {source: parcel.nbytes for source, parcel in parcels.items()}
        for source, parcel in parcels.items():
            tensors = delivery.accept(source, parcel.head, lengths)
            if tensors is not None:
                fill(tensors, contribution(submission.op, parcel.tensors).clone())
        delivery.finish()

    def _settle(self, delivery: Delivery, submission: Submission) -> None:
        if isinstance(delivery.error, BrokenError):
            self._report(delivery.error)
        else:
            submission.work.settle(delivery.error)

    def _report(self, error: BrokenError) -> None:
        for context in list(self._contexts.values()):
            context.on_error(error)


def _perform(ranks: Sequence[Submission]) -> None:
    for submission in ranks:
        load(submission)
    given = [contribution(s.op, s.inputs).clone() for s in ranks]
    perform([s.op for s in ranks], given, {rank: s.outputs for rank, s in enumerate(ranks)})


def _mismatch(batches: Sequence[Sequence[Submission]]) -> CollectiveMismatchError | None:
    """The first difference between the batches that the ranks submitted at one place, if any."""
    mine = batches[0]
    for rank, theirs in enumerate(batches):
        if len(mine) != len(theirs) or not all(a.op.fits(b.op) for a, b in zip(mine, theirs, strict=True)):
            return difference(0, issued(mine), rank, issued(theirs))
    for ranks in zip(*batches, strict=True):
        ops: list[Any] = [submission.op for submission in ranks]
        if isinstance(ops[0], AllToAll):
            found = misfit([op.sends for op in ops], [op.receives for op in ops])
            if found is not None:
                source, rank = found
                sides = source, str(ranks[source].op), rank, str(ranks[rank].op)
                return CollectiveMismatchError(ranks[0].work.seq, *sides)
    return None


def _parcels_for(rank: int, op: Parcels, ranks: Sequence[Submission]) -> dict[int, Parcel]:
    givers = [giver for giver in range(len(ranks)) if giver != rank and op.gives(giver) and op.takes(rank)]
    return {giver: ranks[giver].parcels[0 if op.shared else rank] for giver in givers}


@final
class LoopbackWindow(BackendWindow):
    """One rank's access to a window; ``parts`` are those of all ranks."""

    def __init__(self, hub: Hub, rank: int, parts: dict[int, LocalPart]) -> None:
        self._hub = hub
        self._rank = rank
        self._parts = parts

    def memory(self, rank: int) -> Tensor:
        return self._parts[rank].memory

    def load(self, slot: int) -> int:
        return self._parts[self._rank].load(slot)

    def submit(self, batch: Sequence[Submission]) -> None:
        for submission in batch:
            op = submission.op
            assert isinstance(op, WindowOp), op
            if isinstance(op, WindowWait):
                if not self._hub.failed:
                    self._parts[self._rank].wait(submission)
            else:
                peer = self._rank if op.peer is None else op.peer
                self._hub.one_sided(self._rank, peer, partial(self._run, op, submission))

    def _run(self, op: WindowOp, submission: Submission) -> None:
        if not isinstance(op, WindowFence):  # earlier operations are over
            assert op.peer is not None
            self._parts[op.peer].apply(submission)
        submission.work.settle()

    def end_waits(self, error: AsyncCommError) -> None:
        self._parts[self._rank].waits.end(error)

    def abort(self) -> None:
        self._parts[self._rank].waits.end()

    def close(self) -> None:
        self.abort()


@final
class LoopbackBackend(Backend):
    """One rank of a loopback comm; all its ranks share ``hub``."""

    name = "loopback"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    compares = True

    def __init__(self, hub: Hub, context: BackendContext) -> None:
        self.hub = hub
        self._context = context
        self._rank = context.group.rank
        self._windows: list[LoopbackWindow] = []

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        root: Store = context.store
        prefix = []
        while isinstance(root, PrefixStore):
            prefix.append(root.name)
            root = root.underlying
        if not isinstance(root, MemoryStore):
            raise ValueError(
                f"backend 'loopback' needs store=MemoryStore(), shared by all its ranks, got {type(root).__name__}"
            )
        hubs = _hubs.setdefault(root, {})
        hub = hubs.setdefault("/".join(prefix), Hub(context.group.size))
        hub.join(context)
        try:
            await context.all_connected()
        except BaseException:
            hub.leave(context.group.rank)
            raise
        return cls(hub, context)

    def submit(self, batch: Sequence[Submission]) -> None:
        self.hub.submit(self._rank, batch)

    async def window(self, window: WindowInfo) -> BackendWindow:
        parts = self.hub.parts[window.number]
        parts[self._rank] = LocalPart(window, self._rank)
        await replace(self._context, store=self._context.store.prefix(f"window {window.number}")).all_connected()
        made = LoopbackWindow(self.hub, self._rank, parts)
        self._windows.append(made)
        return made

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.hub.drop(self._rank)
        for window in self._windows:
            window.abort()
