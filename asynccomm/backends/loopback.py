"""All ranks in one process and one event loop: for tests of programs, and of everything above the backends.

The ranks meet in a :class:`Hub`, one per comm, which is found through the ``MemoryStore`` they share::

    store = MemoryStore()
    comms = await asyncio.gather(*(new_comm("loopback", name="t", store=store, rank=r, size=3) for r in range(3)))

An operation runs when its last rank arrives, in that call. For tests a hub can be told to hold operations back,
to release them, and to fail.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Self, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Backend, BackendContext, Submission
from asynccomm.backends.matching import Matching
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    Send,
)
from asynccomm.reduce_op import ReduceOp
from asynccomm.store.base import PrefixStore, Store
from asynccomm.store.memory import MemoryStore

__all__ = ["Hub", "LoopbackBackend"]

_hubs: WeakKeyDictionary[MemoryStore, dict[str, Hub]] = WeakKeyDictionary()


@final
class Hub:
    """Where the ranks of one comm meet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.RLock()
        self._contexts: dict[int, BackendContext] = {}
        self._next = [0] * size  # collectives submitted so far, by rank
        self._arrived: defaultdict[int, dict[int, Submission]] = defaultdict(dict)
        self._messages: list[Matching[Submission, Submission]] = [Matching(size) for _ in range(size)]  # by receiver
        self._held: deque[tuple[frozenset[int], Callable[[], None]]] | None = None  # with the ranks that take part

    def join(self, context: BackendContext) -> None:
        self._contexts[context.group.rank] = context

    def hold(self) -> None:
        """Keep back what becomes complete from now on."""
        with self._lock:
            if self._held is None:
                self._held = deque()

    def release(self, count: int | None = None) -> None:
        """Run ``count`` of the operations that were held, oldest first; None: all, and hold no longer."""
        with self._lock:
            held = self._held if self._held is not None else deque()
            for _ in range(len(held) if count is None else min(count, len(held))):
                held.popleft()[1]()
            if count is None:
                self._held = None

    def fail(self, detail: str) -> None:
        """Report a transport error to every rank."""
        self._report(BackendError(f"loopback: {detail}"))

    def submit(self, rank: int, submission: Submission) -> None:
        with self._lock:
            if isinstance(submission.op, Send):
                self._send(rank, submission, submission.op)
            elif isinstance(submission.op, Recv):
                found = self._messages[rank].post(submission, submission.op.peer, submission.op.tag)
                if found is not None:
                    self._meet(found[0], rank, found[1], submission)
            else:
                number = self._next[rank]
                self._next[rank] += 1
                arrived = self._arrived[number]
                arrived[rank] = submission
                if len(arrived) == self._size:
                    del self._arrived[number]
                    everybody = frozenset(range(self._size))
                    self._run_or_hold(
                        everybody, lambda: self._collective(number, [arrived[r] for r in sorted(everybody)])
                    )

    def drop(self, rank: int) -> None:
        """Let go of everything that ``rank`` has submitted."""
        with self._lock:
            for arrived in self._arrived.values():
                arrived.pop(rank, None)
            self._messages[rank].clear()
            for messages in self._messages:
                messages.forget(rank)
            if self._held is not None:
                self._held = deque(entry for entry in self._held if rank not in entry[0])

    def _send(self, rank: int, send: Submission, op: Send) -> None:
        messages = self._messages[op.peer]
        recv = messages.claim(rank, op.tag)
        if recv is None:
            messages.keep(send, rank, op.tag)
        else:
            self._meet(rank, op.peer, send, recv)

    def _meet(self, source: int, destination: int, send: Submission, recv: Submission) -> None:
        ends = frozenset((source, destination))
        self._run_or_hold(ends, lambda: self._transfer(source, destination, send, recv))

    def _run_or_hold(self, ranks: frozenset[int], run: Callable[[], None]) -> None:
        if self._held is None:
            run()
        else:
            self._held.append((ranks, run))

    def _transfer(self, source: int, destination: int, send: Submission, recv: Submission) -> None:
        assert isinstance(send.op, Send)
        assert isinstance(recv.op, Recv)
        if not recv.op.takes(send.op):
            self._report(CollectiveMismatchError(send.work.seq, source, str(send.op), destination, str(recv.op)))
            return
        _put(recv.outputs[0], send.inputs[0])
        recv.work.source = source
        send.work.settle()
        recv.work.settle()

    def _collective(self, number: int, ranks: Sequence[Submission]) -> None:
        for other, submission in enumerate(ranks):
            if not ranks[0].op.fits(submission.op):
                self._report(CollectiveMismatchError(number, 0, str(ranks[0].op), other, str(submission.op)))
                return
        _perform(ranks)
        for submission in ranks:
            submission.work.settle()

    def _report(self, error: BrokenError) -> None:
        for context in list(self._contexts.values()):
            context.on_error(error)


def _perform(ranks: Sequence[Submission]) -> None:
    size = len(ranks)
    op = ranks[0].op
    match op:
        case AllReduce() | Reduce():
            rows = torch.stack([arithmetic.widen(s.inputs[0], _reduction(s)) for s in ranks])
            total = arithmetic.combine(rows, op.reduction, bools=op.dtype == torch.bool)
            for s in ranks:
                for output in s.outputs:
                    arithmetic.narrow(total.clone(), output, op.reduction, size)
        case ReduceScatter() | ReduceScatterSingle():
            rows = torch.stack([torch.cat([arithmetic.widen(t, _reduction(s)) for t in s.inputs]) for s in ranks])
            total = arithmetic.combine(rows, op.reduction, bools=op.dtype == torch.bool)
            for s, chunk in zip(ranks, total.view(size, -1), strict=True):
                arithmetic.narrow(chunk.clone(), s.outputs[0], op.reduction, size)
        case Broadcast():
            source = ranks[op.root].inputs[0]
            for s in ranks:
                for output in s.outputs:
                    _put(output, source)
        case AllGather() | Gather():
            inputs = [arithmetic.resolved(s.inputs[0]).clone() for s in ranks]
            for s in ranks:
                for output, source in zip(s.outputs, inputs, strict=False):
                    _put(output, source)
        case AllGatherSingle():
            everything = torch.cat([arithmetic.resolved(s.inputs[0]) for s in ranks])
            for s in ranks:
                _put(s.outputs[0], everything)
        case Scatter():
            chunks = [arithmetic.resolved(t).clone() for t in ranks[op.root].inputs]
            for s, chunk in zip(ranks, chunks, strict=True):
                _put(s.outputs[0], chunk)
        case AllToAllSingle():
            sources = torch.stack([arithmetic.resolved(s.inputs[0]) for s in ranks]).view(size, size, -1)
            for r, s in enumerate(ranks):
                _put(s.outputs[0], sources[:, r])
        case Barrier():
            pass
        case _:
            raise AssertionError(f"no such collective: {op}")


def _reduction(submission: Submission) -> ReduceOp:
    op = submission.op
    assert isinstance(op, (AllReduce, Reduce, ReduceScatter, ReduceScatterSingle))
    return op.reduction  # each rank's own: factors differ


def _put(output: Tensor, source: Tensor) -> None:
    arithmetic.write(output, source.detach().reshape(output.shape))


@final
class LoopbackBackend(Backend):
    """One rank of a loopback comm; ``hub`` is what it shares with the others."""

    name = "loopback"
    devices = frozenset({"cpu"})

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self._rank = rank

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
        return cls(hub, context.group.rank)

    def submit(self, batch: Sequence[Submission]) -> None:
        for submission in batch:
            self.hub.submit(self._rank, submission)

    async def aclose(self) -> None:
        self.hub.drop(self._rank)

    def abort(self) -> None:
        self.hub.drop(self._rank)
