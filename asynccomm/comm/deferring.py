"""The deferred calls of a comm: held in a queue for each task or thread that is in a scope, and sent together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, final

from asynccomm.backends.base import Backend, FastCalls, HeldCall, Submission
from asynccomm.batching.batches import batches_of, planned
from asynccomm.batching.plan import BatchLimiter, check_messages
from asynccomm.batching.queue import DeferredQueue, current_owner
from asynccomm.comm.held_calls import submission_of
from asynccomm.comm.submission import Submitter
from asynccomm.errors import describe_exception
from asynccomm.ops import Call


@final
class DeferredCalls:
    """Opens the queues into which ``submitter`` defers calls, and sends their operations, or gives them up."""

    def __init__(self, submitter: Submitter) -> None:
        self.submitter: Final = submitter

    def open_queue(
        self, meter: BatchLimiter, send: Callable[[DeferredQueue], object] | None = None, fast: FastCalls | None = None
    ) -> DeferredQueue:
        """Defer later operations of the caller; an open queue of the same caller serves both scopes.

        Args:
            send: sends the operations; None: ``flush``.
            fast: the backend's fast path, which may hold operations; None: it may not.
        """
        submitter = self.submitter
        submitter.check_loop()
        with submitter.lock:
            submitter.check_open()
            owner = current_owner()
            queue = submitter.queues.get(owner)
            if queue is None:
                queue = submitter.queues[owner] = DeferredQueue(owner, meter, self.flush if send is None else send)
                queue.fast = None if meter.limited else fast
                self._count_scope(queue, 1)
            else:
                queue.depth += 1
            return queue

    def close_queue(self, queue: DeferredQueue) -> None:
        """Leave one scope of ``queue``; the last one ends the deferring."""
        submitter = self.submitter
        with submitter.lock:
            queue.depth -= 1
            if not queue.depth and submitter.queues.pop(queue.owner, None) is not None:
                self._count_scope(queue, -1)

    def _count_scope(self, queue: DeferredQueue, number: int) -> None:
        if queue.fast is not None:
            self.submitter.counts.scopes += number
        else:
            self.submitter.counts.detours += number

    # -- held operations ----------------------------------------------------------------------------------------------

    def submissions(self, queue: DeferredQueue) -> list[Submission]:
        """The operations in ``queue``, which stay there."""
        with self.submitter.lock:
            self._report_held(queue.items)
            found = self.taken_over(queue.items)
            queue.items[:] = found
            return found

    def take(self, queue: DeferredQueue, since: int = 0) -> list[Submission | HeldCall]:
        """Take the items of ``queue``, from number ``since`` on, out of it."""
        with self.submitter.lock:
            items = queue.take(since)
            self._report_held(items)
            return items

    def taken_over(self, items: Sequence[Submission | HeldCall]) -> list[Submission]:
        """The submissions of held operations. Raises: ValueError if memory of a tensor was freed."""
        return [item if isinstance(item, Submission) else self._taken_over(item) for item in items]

    def _taken_over(self, held: HeldCall) -> Submission:
        submitter = self.submitter
        submission = submission_of(submitter.group, held, submitter.call_context())
        submitter.take_over(held.work, held.nbytes)
        return submission

    def _report_held(self, items: Sequence[Submission | HeldCall]) -> None:
        """Report calls that the fast path has held to the watchers, as it does not send them. Under the lock."""
        watchers = self.submitter.watchers
        for item in items if watchers.all else ():
            if not isinstance(item, Submission):
                watchers.called(Call(item.work.op, (), (), None), item.work)

    # -- sending ------------------------------------------------------------------------------------------------------

    def flush(self, queue: DeferredQueue) -> None:
        """Send the operations in ``queue``. From any thread.

        Raises: ValueError if they cannot be sent together; none is sent then.
        """
        submitter = self.submitter
        with submitter.lock:
            held = queue.take()
            if not held:
                return
            try:
                if queue.fast is None or not queue.fast.flush(held):
                    self._report_held(held)
                    self._send(self.taken_over([item for item in held if not item.work.done()]))  # else it has failed
                    return
            except BaseException as exc:
                submitter.drop(held, describe_exception(exc))
                raise
            submitter.in_flight.batches += len(held) > 1
            if submitter.watchers.all:
                submitter.watchers.sent([item.work for item in held])
            submitter.in_flight.wake()

    def _send(self, held: list[Submission]) -> None:
        if not held:
            return
        if (ordering := self.submitter.ordering) is not None:
            check_messages([planned(item) for item in held])
            held = ordering.issue_all(held)
        self.submitter.send_planned(held)

    def flush_all(self) -> None:
        """Send the operations of all scopes: the comm is closing. Operations that cannot be sent have failed."""
        submitter = self.submitter
        for queue in list(submitter.queues.values()):
            with contextlib.suppress(Exception):
                queue.send()
            submitter.drop(self.take(queue), "the comm was closed")  # the operations of a time_estimator()

    # -- estimates ----------------------------------------------------------------------------------------------------

    def check_estimates(self) -> None:
        """Raise NotImplementedError if the backend has no estimates."""
        submitter = self.submitter
        submitter.check_open()
        assert submitter.backend is not None
        if type(submitter.backend).estimate is Backend.estimate:
            submitter.backend.estimate(())

    def estimate(self, held: Sequence[Submission]) -> list[Future[float]]:
        """The seconds for each batch of ``held``. Raises: the errors of ``flush`` and ``Backend.estimate``."""
        submitter = self.submitter
        with submitter.lock:
            submitter.check_open()
            backend = submitter.backend
            assert backend is not None
            batches = batches_of(held, submitter.group.size, backend, submitter.mailbox)
            return [backend.estimate([fused.submission for fused in batch.fused_ops]) for batch in batches]
