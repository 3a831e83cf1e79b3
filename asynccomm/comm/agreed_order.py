"""The calls of a comm with agreed ordering: announced to all ranks, and sent in the order that all have agreed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from asynccomm.backends.base import Backend, Submission
from asynccomm.batching.fusion import can_fuse
from asynccomm.batching.hazards import PendingHazards
from asynccomm.batching.ordering.transport import SELF, OrderingSession
from asynccomm.core.deadlines import Deadlines
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.state import ReentrantLock
from asynccomm.errors import BrokenError
from asynccomm.ops import GroupedOp
from asynccomm.ops.signature import signature_of
from asynccomm.ops.validation import CommInfo


@final
class AgreedOrder:
    """Announces calls, and sends the batches that the ranks have agreed on. Its methods run under the comm's lock.

    Args:
        backend: carries the announcements.
        lock: the comm's lock.
        deadlines: of the comm's operations.
        send: called on the loop, under the lock, with the submissions of one batch that are not settled.
        on_failure: called with an error that breaks the comm.
    """

    def __init__(
        self,
        group: CommInfo,
        mailbox: Mailbox,
        backend: Backend,
        lock: ReentrantLock,
        deadlines: Deadlines,
        send: Callable[[Sequence[Submission]], object],
        on_failure: Callable[[BrokenError], object],
    ) -> None:
        self._size = group.size
        self._lock = lock
        self._deadlines = deadlines
        self._send = send
        self._undecided = PendingHazards()
        self._session = OrderingSession(group, mailbox, backend, lock, self._agreed, on_failure)

    def issue(self, items: Sequence[Submission]) -> None:
        """Announce ``items``, of one call, for an agreed place in the order."""
        ops = [item.op for item in items]
        nbytes = sum([op.nbytes for op in ops])
        conflicts = self._undecided.enter(items)
        if conflicts or not all(can_fuse(self._size, item) for item in items):
            nbytes = SELF  # a separate batch on all ranks: their tensors may not conflict
        text = str(ops[0] if len(ops) == 1 else GroupedOp(tuple(ops)))
        self._session.issue(ops[0].label, signature_of(ops), text, nbytes, items)
        self._deadlines.add(items[0].work)

    def issue_all(self, held: Sequence[Submission]) -> list[Submission]:
        """Announce the collectives of ``held``, the calls of a scope; returns the other items, which are messages."""
        messages = []
        wholes: dict[object, list[Submission]] = {}
        for item in held:
            if item.op.p2p:
                messages.append(item)
            else:
                item.work.driver = None
                wholes.setdefault(item if item.whole is None else item.whole, []).append(item)
        for items in wholes.values():
            self.issue(items)
        return messages

    def _agreed(self, batch: Sequence[Sequence[Submission]]) -> None:
        """Send an agreed batch, all calls at once. On the loop, without the lock."""
        with self._lock:
            items = [item for call in batch for item in call]
            self._undecided.leave(items)
            self._send([item for item in items if not item.work.done()])  # done: the comm has broken

    def outstanding(self, tag: str) -> int:
        """The number of operations under ``tag`` that were issued and not agreed on yet. From any thread."""
        return self._session.outstanding(tag)

    def end(self) -> None:
        """Agree on nothing more: the comm has broken. From any thread."""
        self._session.end()

    async def aclose(self) -> None:
        """Say goodbye to the other ranks. Cancelling is safe."""
        await self._session.aclose()
