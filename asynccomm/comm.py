"""The communicator: every collective as a plain method that sends now and returns a Work.

A call checks its arguments, takes a number, and hands the operation to the backend, all under one lock: so calls may
come from any thread, and the order of numbers is the order on the wire. What follows happens elsewhere: the backend
settles the Work, ``deadlines`` notices if it does not, ``bulletin`` tells the other ranks.

A comm is open, then closed or broken, for good. Broken means: what was pending has failed with one error, the peers
have been told why, and later calls raise that error again. What breaks a comm: an operation past its deadline, a
transport error, ``abort()`` here or on another rank, leaving ``async with`` by an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self, SupportsIndex, final

import torch
from torch import Tensor

from asynccomm import ops
from asynccomm.backends.base import Backend, BackendContext, Submission
from asynccomm.bulletin import Bulletin
from asynccomm.deadlines import Deadlines
from asynccomm.errors import (
    AbortedError,
    AsyncCommError,
    BackendError,
    BrokenError,
    ClosedError,
    CollectiveTimeoutError,
)
from asynccomm.mailbox import Mailbox
from asynccomm.ops import Call, Group
from asynccomm.options import CommOptions, seconds
from asynccomm.reduce_op import ReduceOp
from asynccomm.store.base import Store
from asynccomm.work import Work

__all__ = ["Comm", "CommStatistics"]

TELL_SECONDS = 2.0  # for the store to take the news of an abort; the peers learn from the transport otherwise
ROLL_CALL_SECONDS = 0.5  # for peers to say what they have issued, once an operation is past its deadline

_log = logging.getLogger("asynccomm")
_alive: weakref.WeakSet[Comm] = weakref.WeakSet()  # only to disown them in a forked child


class CommStatistics(NamedTuple):
    """A snapshot of one comm's traffic."""

    submitted: int  #: operations called so far
    in_flight: int  #: operations not settled yet
    bytes_in_flight: int  #: bytes of the larger side (inputs or outputs) of those


@final
class Comm:
    """A group of ranks that exchange tensors; made by :func:`asynccomm.new_comm`.

    All ranks call the same collectives in the same order. Each method returns at once; ``await`` the Work for the
    output. Common to all:

    - ``timeout``: seconds (or a timedelta) from the call until the operation counts as failed and the comm as broken;
      None: the comm's. ``hints``: strings for the backend; what it does not know is ignored.
    - Raises at the call, before anything is sent: TypeError and ValueError naming the argument, ClosedError,
      BrokenError. The rest is raised by awaiting.
    - Tensors must not be changed, and outputs not be read, before the Work is done. They need not be kept.
    - Cancelling an await is safe: it abandons the wait, the operation goes on.
    - May be called from any thread, but on a thread with a running event loop only from the comm's own.
    """

    def __init__(
        self,
        group: Group,
        backend_name: str,
        options: CommOptions,
        mailbox: Mailbox,
        store: Store,
        resources: AsyncExitStack,
    ) -> None:
        """Not for users: see ``asynccomm.new_comm``. ``connect`` follows."""
        self._group = group
        self._options = options
        self._backend_name = backend_name
        self._mailbox = mailbox
        self._resources = resources
        self._backend: Backend | None = None
        self._lock = threading.RLock()  # a backend may settle inside submit()
        self._error: AsyncCommError | None = None  # why there are no more calls
        self._pending: dict[Work[Any], int] = {}  # bytes by operation
        self._bytes = 0
        self._collectives = 0
        self._p2p = 0
        self._changed: list[asyncio.Future[None]] = []  # who waits for something to settle
        self._ending: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Future[None] | None = None
        # the loop holds these for long; they must not keep a forgotten comm alive
        self._deadlines = Deadlines(mailbox, _weakly(self._expired))
        self._bulletin = Bulletin(store, group.rank, _weakly(self._heard))
        _alive.add(self)

    async def connect(self, backend: type[Backend], context: BackendContext) -> None:
        """Connect the backend and begin to take calls; a failure closes the comm. For ``new_comm``."""
        try:
            async with asyncio.timeout(context.timeout):
                self._backend = await backend.connect(context)
        except BaseException as exc:
            # the others are still connecting: what they wait for will not come
            self._fail(AbortedError(self.rank, f"could not connect: {type(exc).__name__}: {exc}"), tell=True)
            await self.aclose()
            if isinstance(exc, TimeoutError) and not isinstance(exc, AsyncCommError):
                raise BackendError(
                    f"{self._backend_name} did not connect rank {self.rank} of comm {self.name!r} "
                    f"within {self._options.timeout:g} s"
                ) from exc
            raise
        self._resources.push_async_callback(self._backend.aclose)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's place in the comm, from 0."""
        return self._group.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._group.size

    @property
    def name(self) -> str:
        """The comm's name, the same on all ranks."""
        return self._group.name

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self._group.device

    @property
    def backend(self) -> str:
        """Name of the backend in use (never ``"auto"``)."""
        return self._backend_name

    @property
    def options(self) -> CommOptions:
        """What it was made with."""
        return self._options

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that its Works are awaited on."""
        return self._mailbox.loop

    def unsafe_get_backend(self) -> Backend:
        """The backend itself: an escape hatch, without promises of compatibility."""
        assert self._backend is not None
        return self._backend

    def statistics(self) -> CommStatistics:
        """How much is going on."""
        with self._lock:
            return CommStatistics(self._collectives + self._p2p, len(self._pending), self._bytes)

    def __repr__(self) -> str:
        state = "open" if self._error is None else "closed" if isinstance(self._error, ClosedError) else "broken"
        return (
            f"<Comm {self.name!r} rank {self.rank} of {self.size}, {self._backend_name} on {self.device}, {state}, "
            f"{len(self._pending)} in flight>"
        )

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor,
        op: object = ReduceOp.SUM,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Combine all ranks' ``tensor`` elementwise, in place, on all ranks; bitwise the same everywhere.

        Args:
            tensor: any shape; the same number of elements and dtype on all ranks.
            op: a ReduceOp (torch's own are understood by name).

        Returns: Work of ``tensor``.
        """
        return self._submit(ops.AllReduce.of(self._group, tensor, op), timeout, hints)

    def broadcast(
        self,
        tensor: Tensor,
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Copy ``tensor`` of rank ``root`` into everybody's, in place.

        Returns: Work of ``tensor``.
        """
        return self._submit(ops.Broadcast.of(self._group, tensor, root), timeout, hints)

    def reduce(
        self,
        tensor: Tensor,
        root: SupportsIndex,
        op: object = ReduceOp.SUM,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor | None]:
        """Combine all ranks' ``tensor`` in place on rank ``root``; the others' tensors stay as they are.

        Returns: Work of ``tensor`` on the root, of None elsewhere.
        """
        return self._submit(ops.Reduce.of(self._group, tensor, root, op), timeout, hints)

    def all_gather(
        self,
        tensor_list: Sequence[Tensor] | None,
        tensor: Tensor,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[list[Tensor]]:
        """Collect every rank's ``tensor`` on all ranks, one output each.

        Args:
            tensor_list: ``size`` tensors of as many elements as ``tensor``; None: new ones of its shape.
            tensor: the same number of elements and dtype on all ranks.

        Returns: Work of ``tensor_list``, in rank order.
        """
        return self._submit(ops.AllGather.of(self._group, tensor_list, tensor), timeout, hints)

    def all_gather_single(
        self,
        output: Tensor | None,
        input: Tensor,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Collect every rank's ``input`` on all ranks, in one output.

        Args:
            output: ``size`` times the elements of ``input``, concatenated ``(size * n, ...)`` or stacked
                ``(size, n, ...)``; None: a new one, concatenated.
            input: the same number of elements and dtype on all ranks.

        Returns: Work of ``output``.
        """
        return self._submit(ops.AllGatherSingle.of(self._group, output, input), timeout, hints)

    def reduce_scatter(
        self,
        output: Tensor | None,
        input_list: Sequence[Tensor],
        op: object = ReduceOp.SUM,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Combine the ranks' ``input_list[r]`` for each r, and leave the result of ``input_list[rank]`` here.

        Args:
            output: any shape; None: a new one shaped like ``input_list[rank]``.
            input_list: ``size`` tensors of as many elements as ``output``; not changed.

        Returns: Work of ``output``.
        """
        return self._submit(ops.ReduceScatter.of(self._group, output, input_list, op), timeout, hints)

    def reduce_scatter_single(
        self,
        output: Tensor | None,
        input: Tensor,
        op: object = ReduceOp.SUM,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Combine the ranks' ``input``, and leave chunk ``rank`` of the result here.

        Args:
            output: ``1 / size`` of the elements of ``input``; None: a new one, dim 0 divided by ``size``.
            input: not changed.

        Returns: Work of ``output``.
        """
        return self._submit(ops.ReduceScatterSingle.of(self._group, output, input, op), timeout, hints)

    def scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor] | None,
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Give each rank r the root's ``input_list[r]``.

        Args:
            output: where it goes.
            input_list: on the root ``size`` tensors of as many elements as ``output``; elsewhere None or empty.

        Returns: Work of ``output``.
        """
        return self._submit(ops.Scatter.of(self._group, output, input_list, root), timeout, hints)

    def gather(
        self,
        output_list: Sequence[Tensor] | None,
        input: Tensor,
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[list[Tensor] | None]:
        """Collect every rank's ``input`` on the root.

        Args:
            output_list: on the root ``size`` tensors of as many elements as ``input``, or None for new ones; elsewhere
                None or empty.

        Returns: Work of ``output_list`` on the root, of None elsewhere.
        """
        return self._submit(ops.Gather.of(self._group, output_list, input, root), timeout, hints)

    def all_to_all_single(
        self,
        output: Tensor | None,
        input: Tensor,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Send chunk r of ``input`` to each rank r; chunk s of ``output`` comes from rank s.

        Args:
            output: as many elements as ``input``; None: a new one of its shape. May be ``input`` itself.
            input: a number of elements that ``size`` divides, the same on all ranks.

        Returns: Work of ``output``.
        """
        return self._submit(ops.AllToAllSingle.of(self._group, output, input), timeout, hints)

    def barrier(
        self, *, timeout: float | timedelta | None = None, hints: Mapping[str, str] | None = None
    ) -> Work[None]:
        """Done when every rank has called it. Moves no tensor."""
        return self._submit(ops.Barrier.of(self._group), timeout, hints)

    # -- point to point -----------------------------------------------------------------------------------------------

    def send(
        self,
        tensor: Tensor,
        dst: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Send ``tensor`` to rank ``dst``, which receives it under the same ``tag``; done when it may be changed again.

        Messages are ordered per pair and tag, and stand outside the sequence of collectives. Sending to oneself works:
        it needs a receive, too.

        Returns: Work of ``tensor``.
        """
        return self._submit(ops.Send.of(self._group, tensor, dst, tag), timeout, hints)

    def recv(
        self,
        tensor: Tensor,
        src: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Receive into ``tensor`` what rank ``src`` sends under ``tag``: as many elements, of the same dtype.

        Returns: Work of ``tensor``.
        """
        return self._submit(ops.Recv.of(self._group, tensor, src, tag), timeout, hints)

    # -- flow ---------------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until less is in flight than ``options.max_ops`` and ``options.max_bytes``.

        Calls are never refused for being too many; await this between them in a producer that could run far ahead.
        Cancelling is safe. Raises: ClosedError, BrokenError.
        """
        self._check_loop()
        while True:
            self._check_open()
            if len(self._pending) < self._options.max_ops and self._bytes < self._options.max_bytes:
                return
            await self._something_settled()

    async def _something_settled(self) -> None:
        waiter: asyncio.Future[None] = self._mailbox.loop.create_future()
        self._changed.append(waiter)
        if self._pending:  # looked at after leaving word: see Work
            await waiter

    def _check_loop(self) -> None:
        running = asyncio._get_running_loop()
        if running is not None and running is not self._mailbox.loop:
            raise RuntimeError(
                f"comm {self.name!r} belongs to another event loop than the running one; a comm is used on the loop it "
                f"was made on, and from threads that run none"
            )

    def _check_open(self) -> None:
        error = self._error
        if error is not None:
            again = type(error)(*error.args)  # a fresh one: the first is what the pending Works raise
            raise again from error

    def _submit(
        self, call: Call, timeout: float | timedelta | None, hints: Mapping[str, str] | None
    ) -> Work[Any]:
        limit = seconds("timeout", timeout, self._options.timeout)
        if hints is not None and not isinstance(hints, Mapping):
            raise TypeError(f"hints must be a mapping of strings to strings, got {hints!r}")
        self._check_loop()
        op = call.op
        with self._lock:
            self._check_open()
            backend = self._backend
            assert backend is not None
            seq = self._p2p if op.p2p else self._collectives
            work: Work[Any] = Work(
                op, seq, self._mailbox, value=call.result, timeout=limit, on_settled=self._settled
            )
            nbytes = max(sum(t.nbytes for t in call.inputs), sum(t.nbytes for t in call.outputs))
            self._pending[work] = nbytes
            self._bytes += nbytes
            try:
                backend.submit((Submission(call, work),))
            except BaseException:
                if self._pending.pop(work, None) is not None:
                    self._bytes -= nbytes
                raise
            if op.p2p:
                self._p2p += 1
            else:
                self._collectives += 1
        if not work.done():
            self._deadlines.add(work)
        return work

    def _settled(self, work: Work[Any]) -> None:
        with self._lock:
            self._bytes -= self._pending.pop(work, 0)
        if self._changed:
            self._mailbox.post(self._wake)

    def _wake(self) -> None:
        changed, self._changed = self._changed, []
        for waiter in changed:
            if not waiter.done():
                waiter.set_result(None)

    # -- ending -------------------------------------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """Stop everything at once, here and on the other ranks; waits for nobody. From any thread.

        What is pending here fails with ``AbortedError(rank, reason)`` before this returns, on the other ranks as soon
        as they hear of it. Aborting a comm that is closed or broken already does nothing. ``aclose`` is still due.
        """
        self._fail(AbortedError(self.rank, reason), tell=True)

    async def aclose(self) -> None:
        """Take no more calls, wait for what is in flight, and free everything. Idempotent.

        Not collective: each rank closes when it is done. Cancelling it aborts the comm.
        """
        self._check_loop()
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self._mailbox.loop.create_future()
        closed = ClosedError(f"comm {self.name!r} is closed")
        with self._lock:
            self._error = self._error or closed
        try:
            while self._pending:
                await self._something_settled()
        except BaseException as exc:
            self._fail(AbortedError(self.rank, f"closing was interrupted by {type(exc).__name__}"), tell=True)
            raise
        finally:
            await self._finish_ending()
            self._error = closed
            self._closing.set_result(None)

    async def _finish_ending(self) -> None:
        while self._ending:
            await asyncio.wait(set(self._ending))
        self._deadlines.close()
        await self._bulletin.aclose()
        await self._resources.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self.abort(f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__)
            if self._error is not None:
                self._error.observed = True  # ``exc`` is on its way to the user; pending Works need not report as well
        await self.aclose()

    def _fail(self, error: BrokenError, *, tell: bool) -> bool:
        """Become broken by ``error``, unless it has ended otherwise; from any thread."""
        with self._lock:
            draining = isinstance(self._error, ClosedError) and self._pending
            if self._error is not None and not draining:
                return False
            self._error = error
            pending = list(self._pending)
        for work in pending:
            work.settle(error)
        if self._mailbox.loop.is_closed():
            self._abort_backend()
        else:
            self._mailbox.post(lambda: self._begin(self._end(error, tell=tell)))
        return True

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._mailbox.loop.create_task(coroutine)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, error: BrokenError, *, tell: bool) -> None:
        """Tell the peers why before the transport goes, so that they hear of the cause and not of a lost connection."""
        try:
            if tell:
                reason = error.reason if isinstance(error, AbortedError) else f"{type(error).__name__}: {error}"
                with contextlib.suppress(TimeoutError, AsyncCommError):
                    async with asyncio.timeout(TELL_SECONDS):
                        await self._bulletin.post(kind="abort", reason=reason)
        finally:
            self._abort_backend()
        if self._options.abort_process_on_timeout_or_error and not isinstance(error, AbortedError):
            _log.critical("ending the process: %s", error)
            os.abort()

    def _abort_backend(self) -> None:
        if self._backend is not None:
            self._backend.abort()

    # -- what others tell us ------------------------------------------------------------------------------------------

    def transport_failed(self, error: BrokenError) -> None:
        """Hear of a transport error; from any thread. For the backend."""
        self._mailbox.post(lambda: self._begin(self._explain(error)))

    async def _explain(self, error: BrokenError) -> None:
        """Find out whether the transport failed because a rank gave up, and break with what is behind it."""
        if isinstance(error, BackendError):
            with contextlib.suppress(TimeoutError, AsyncCommError):
                async with asyncio.timeout(TELL_SECONDS):
                    for item in await self._bulletin.look():
                        self._heard(item)
        self._fail(error, tell=True)

    def _heard(self, item: dict[str, Any]) -> None:
        if item["kind"] == "abort":
            self._fail(AbortedError(item["rank"], item["reason"]), tell=False)
        elif item["kind"] == "roll call":
            self._begin(self._answer(item["number"]))

    async def _answer(self, number: int) -> None:
        with contextlib.suppress(AsyncCommError):
            await self._bulletin.reply(number, collectives=self._collectives)

    def _expired(self, work: Work[Any]) -> None:
        self._begin(self._expire(work))

    async def _expire(self, work: Work[Any]) -> None:
        missing: list[int] = []
        if work.op.p2p:
            missing = [work.op.peer]  # type: ignore[attr-defined]
        elif self.size > 1:
            others = [rank for rank in range(self.size) if rank != self.rank]
            with contextlib.suppress(AsyncCommError):
                number = await self._bulletin.post(kind="roll call")
                said = await self._bulletin.replies(number, others, ROLL_CALL_SECONDS)
                missing = [r for r in others if r not in said or said[r]["collectives"] <= work.seq]
        if work.done():
            return  # it came in during the roll call
        elapsed = time.monotonic() - work.started
        self._fail(
            CollectiveTimeoutError(
                work.op, work.seq, self.name, self.rank, elapsed, work.timeout, tuple(missing)
            ),
            tell=True,
        )

    def __del__(self) -> None:
        if getattr(self, "_closing", None) is not None or getattr(self, "_backend", None) is None:
            return
        warnings.warn(f"{self!r} was never closed: use `async with` or `await comm.aclose()`", ResourceWarning, 1, self)
        self._abort_backend()
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._mailbox.loop.call_soon_threadsafe(self._bulletin.cancel)

    def _disown(self) -> None:
        self._error = ClosedError(f"comm {self.name!r} was made before this process was forked; make a new one")
        self._backend = None


def _weakly(method: Callable[[Any], object]) -> Callable[[Any], None]:
    """``method``, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        target = reference()
        if target is not None:
            target(argument)

    return call


def _disown_all() -> None:
    for comm in list(_alive):
        comm._disown()


os.register_at_fork(after_in_child=_disown_all)
