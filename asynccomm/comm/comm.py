"""The communicator: every collective as a plain method that sends now and returns a Work.

The methods on tensors and objects are in ``methods``, by theme; ``ops`` checks their arguments, ``session`` carries
them out. This module combines the themes and adds scopes, graphs, diagnosis, back-pressure, time limits and the ways to
end a comm.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple, Self, final

import torch

from asynccomm.comm.methods.collectives import Collectives
from asynccomm.comm.methods.experts import ExpertCollectives
from asynccomm.comm.methods.groups import Groups
from asynccomm.comm.methods.lists import CoalescedCollectives
from asynccomm.comm.methods.memory import SharedTensors
from asynccomm.comm.methods.objects import Objects
from asynccomm.comm.methods.observation import Observation
from asynccomm.comm.methods.p2p import P2P
from asynccomm.comm.methods.queues import Queues
from asynccomm.comm.methods.tensor_dicts import TensorDicts
from asynccomm.comm.methods.variable import VariableCollectives
from asynccomm.comm.methods.windows import Windows
from asynccomm.comm.monitored_barrier import MonitoredBarrier
from asynccomm.comm.scopes import CoalesceScope, Estimate
from asynccomm.control.diagnosis import Diagnosis
from asynccomm.core.preemption import preemption
from asynccomm.core.work import Work
from asynccomm.errors import describe_exception
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.options import check_bool, duration, seconds

ANSWER_SECONDS = 1.0


@final
class GraphCapture(NamedTuple):
    """The result of entering :meth:`Comm.graph_capture`."""

    stream: torch.cuda.Stream  #: the stream to capture, which is the current stream inside


@final
class Comm(
    Collectives,
    VariableCollectives,
    CoalescedCollectives,
    ExpertCollectives,
    P2P,
    Queues,
    Objects,
    TensorDicts,
    Groups,
    Observation,
    SharedTensors,
    Windows,
):
    """A group of ranks that exchange tensors; made by :func:`asynccomm.new_comm`.

    All ranks call the same collectives in the same order. Each method returns at once; ``await`` the Work for the
    output. Common to all:

    - ``timeout``: seconds (or a timedelta) from the call until the operation counts as failed and the comm as broken;
      None: the comm's time limit; ``math.inf``: no limit. ``hints``: strings for the backend; unknown hints are
      ignored.
    - ``tag``, of collectives: a str of 1 to 1024 bytes in UTF-8, shown in ``Work.op`` and in errors. With
      ``ordering="agreed"`` the tag pairs the ranks' calls. In program order the tag must be the same on all ranks, like
      the rest of the operation, so tasks that call in different orders get an error. (The ``tag`` of point-to-point
      methods is a number.)
    - A call raises, before anything is sent: TypeError and ValueError naming the argument, ClosedError, BrokenError.
      Awaiting raises all other errors: a BrokenError ends the comm, a PayloadError only that operation.
    - Autograd is not involved: a tensor that requires grad is read and written as plain data.
    - Tensors must not be changed, and outputs not be read, before the Work is done. The caller need not keep them.
      Giving a tensor other memory (``tensor.data = ...``) is fine; resizing its memory (``resize_``) is not, and can
      end the process.
    - Cancelling an await is safe: it abandons the wait, and the operation goes on.
    - Methods may be called from any thread without a running event loop, and on the comm's own loop.
    - Copying a comm, also within a model that holds it, gives the comm itself; pickling it is a TypeError.
    """

    def monitored_barrier(self, timeout: float | timedelta | None = None, wait_all_ranks: bool = False) -> Work[None]:
        """Wait until every rank has called it; else an error names the missing ranks, and the comm goes on.

        This barrier finds the rank that hangs. The ranks meet over the store, so the barrier works where a collective
        would not, on every device, and takes longer than :meth:`barrier`. It is not part of the sequence of
        collectives. Each rank's calls are counted: a rank that missed some calls fails at once, call by call, until it
        has caught up.

        Args:
            timeout: seconds or a timedelta from the call; None: the comm's time limit.
            wait_all_ranks: name all missing ranks, instead of the first.

        Raises: from awaiting: MonitoredBarrierError on all ranks, at most about a second after ``timeout``;
            StoreError.
        """
        check_bool("wait_all_ranks", wait_all_ranks)
        session = self._session
        return session.run_aside(MonitoredBarrier(wait_all_ranks), session.barriers.pass_through, timeout)

    def coalesce(self, *, max_bytes: int | None = None, max_ops: int | None = None) -> CoalesceScope:
        """Send the calls of this task in the scope as one batch, when the scope ends. ``with`` or ``async with``.

        ::

            async with comm.coalesce() as batch:
                for parameter in model.parameters():
                    comm.all_reduce(parameter.grad)
            await batch

        Each call gives its own Work, as outside a scope. All ranks open the scope around the same collectives; kinds,
        dtypes and reductions may be mixed. Operations that share memory take effect in the order of the calls, on all
        ranks alike: a batch ends before an operation that depends on it. ``reduce``, ``gather``, ``scatter``, uneven
        operations and objects keep their place in the order, but each is sent by itself: a rank cannot know the memory
        that the other ranks use for them. ``all_gather_v`` and the like count as even if given equal sizes.

        - Awaiting a Work of the scope inside it sends the operations held so far. Only the task that opened the scope,
          or a task that it waits for there (``asyncio.gather``), should do so: all ranks must send at the same place.
        - The scope belongs to the task that opens it; in a thread without a task, to the thread. Calls of other tasks
          and threads, also of those started inside the scope, are sent at once.
        - A scope within another scope of the same comm is part of the outer scope, and the outer limits hold.
        - If the body raises, the operations still held are not sent, and their Works fail with ``NotSentError``. The
          other ranks send theirs, unless their bodies raise, too.
        - Deadlines count from the call.

        Args:
            max_bytes, max_ops: limits of the collectives in a batch, counted as the program calls them: a full batch is
                sent at once, and the next batch begins. None: no limit.
        """
        return CoalesceScope([self._session.deferred], max_bytes, max_ops, self._fast)

    def time_estimator(self) -> Estimate:
        """Estimate the time that the operations called in the scope would take, without running them.

        ``async with``, or ``with`` on a thread without an event loop, while the comm's loop runs in another thread.

        ::

            async with comm.time_estimator() as estimate:
                comm.all_reduce(gradient)
            print(estimate.seconds)

        All ranks open the scope around the same collectives of tensors, since the backend may have to connect for the
        estimate. The Works fail with ``NotSentError``; no tensor is read or written.

        Raises: NotImplementedError for backends other than NCCL, which can simulate; and on leaving, for operations
            that NCCL cannot estimate since it builds them from messages (gather, scatter, all_to_all).
        """
        self._session.deferred.check_estimates()
        return Estimate(self._session.deferred)

    @contextmanager
    def graph_capture(self, stream: torch.cuda.Stream | None = None) -> Iterator[GraphCapture]:
        """A stream for capturing CUDA graphs that contain collectives of this comm; it waits for the current stream.

        ::

            with comm.graph_capture() as capture, torch.cuda.graph(graph, stream=capture.stream):
                comm.all_reduce(tensor).wait()
            graph.replay()

        Within a capture, operations on tensors are queued on the captured stream, in the order of the calls, and run
        whenever the graph is replayed; all ranks must capture the same operations, and replay the graph equally often.
        ``wait`` and ``wait_stream`` order streams as outside a capture; awaiting a captured Work raises
        ``RuntimeError``. Operations that need the host (objects, dicts, streams, barriers, uneven tensors of unknown
        sizes) raise ``RuntimeError`` at the call. The same collectives must have run before: NCCL cannot connect within
        a capture. Reset the graphs before closing the comm: NCCL waits for graphs that still exist.

        Args:
            stream: the stream to capture; None: a new stream.

        Raises: RuntimeError on a CPU.
        """
        if self.device.type != "cuda":
            raise RuntimeError(f"graph_capture() needs a GPU, but comm {self.name!r} is on {self.device}")
        here = torch.cuda.current_stream(self.device)
        captured = torch.cuda.Stream(self.device) if stream is None else stream  # type: ignore[no-untyped-call]
        captured.wait_stream(here)
        with torch.cuda.stream(captured):
            yield GraphCapture(captured)
        here.wait_stream(captured)

    async def diagnose(self, *, stacks: bool = False, timeout: float | timedelta = ANSWER_SECONDS) -> Diagnosis:
        """Ask all ranks for their last call and their pending operations, with places and ages. Print the result.

        The request uses the control channel, not the transport, and a separate thread of each rank answers it. So it
        works while operations hang, while other ranks' event loops are blocked, and on a broken comm. A rank that is
        stopped, or whose interpreter lock is held, does not answer; the result says how long it has been silent. Not
        collective: any rank may ask at any time. Cancelling is safe.

        Args:
            stacks: also report the stacks of each rank's main thread and tasks, and of the event loop's thread if that
                is another one, as for a blocking comm.
            timeout: seconds for the ranks to answer.

        Raises: ClosedError on a closed comm; RuntimeError if this rank has no control channel.
        """
        check_bool("stacks", stacks)
        limit = seconds("timeout", timeout, ANSWER_SECONDS)
        session = self._session
        self._submitter.check_loop()
        if session.ended:
            self._submitter.check_open()
        if session.reporter is None:
            raise RuntimeError(
                f"comm {self.name!r} has no control channel here (hint control='off', or a warning said why)"
            )
        return await session.reporter.diagnose(limit, stacks=stacks)

    async def ready(self) -> None:
        """Wait until less is in flight than ``options.max_ops`` and ``options.max_bytes``.

        The comm never refuses a call because too much is in flight; a producer that could run far ahead awaits
        ``ready()`` between its calls. Operations that are held back do not count: those held by a scope, and those that
        the ranks have not agreed on yet (else two ranks that call in different orders might wait for each other here).
        Cancelling is safe. Raises: ClosedError, BrokenError.
        """
        self._submitter.check_loop()
        waited = await self._session.in_flight.ready(self._submitter.check_open)
        if waited:
            self._submitter.watchers.waited(waited)

    async def preempted(self) -> bool:
        """Whether SIGTERM has arrived at any rank: the same answer on all ranks. A collective.

        Schedulers and container runtimes send SIGTERM some time before they kill a process. With one call per step, all
        ranks save and leave in the same step::

            if await comm.preempted():
                save(model)
                break

        From the first call on, SIGTERM does not cancel the main task of :func:`asynccomm.run`, but a second SIGTERM
        does. A program that runs its event loop otherwise, or handles SIGTERM itself, gets False. The cost is an
        all_reduce of 4 bytes; errors and cancellation are those of ``all_reduce``.
        """
        preemption.polled = True
        flag = torch.tensor([preemption.requested], dtype=torch.int32, device=self.device)
        await self.all_reduce(flag, ReduceOp.MAX)
        return bool(flag.item())

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Change the time limit of later operations without ``timeout=``, on this rank alone.

        Args:
            timeout: seconds or a timedelta; ``math.inf``: no limit. ``options.timeout`` shows the new limit, and comms
                that are split off later inherit it.

        Raises: TypeError, ValueError. From any thread.
        """
        self._session.set_timeout(duration("timeout", timeout))

    def extend_timeout(self, extra: float | timedelta) -> None:
        """Give later operations ``extra`` more seconds, until the first of them is done; on this rank alone.

        Meant for one operation that is known to take long: a first step that compiles, for example, or a step after a
        checkpoint. Operations with a ``timeout=`` of their own are not affected. Several calls add up.

        Raises: TypeError, ValueError. From any thread.
        """
        more = duration("extra", extra)
        with self._submitter.lock:
            self._session.in_flight.extend_timeout(more)

    def abort(self, reason: str = "abort() was called") -> None:
        """Stop everything at once, here and on the other ranks, without waiting for them. From any thread.

        Operations pending here fail with ``AbortedError(rank, reason)`` before ``abort`` returns; those on other ranks
        fail when the news arrives there. Aborting a closed or broken comm does nothing. ``aclose`` is still due.

        Raises: TypeError if ``reason`` is no str; nothing is stopped then.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a str, got {reason!r}")
        self._session.abort(reason)

    async def aclose(self) -> None:
        """Refuse further calls, wait for the operations in flight, and free everything. Idempotent.

        Not collective: each rank closes when it is done. Cancelling ``aclose`` aborts the comm. A forked child closes
        nothing: the comm is its parent's.
        """
        await self._session.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._session
        if exc is not None:
            session.abort(reason_of(exc))
            if session.error is not None:
                session.error.observed = True  # ``exc`` reaches the user; pending Works need not report it, too
        await session.aclose()

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is None or session.closed or session.backend is None:
            return
        session.discard()
        # last, as it is an error where the program says so
        warnings.warn(f"{self!r} was never closed: use `async with` or `await comm.aclose()`", ResourceWarning, 1, self)


def check_comm(comm: object) -> None:
    """Raise TypeError unless ``comm`` is a comm."""
    if not isinstance(comm, Comm):
        raise TypeError(f"comm must be a Comm, got {comm!r} ({type(comm).__name__})")


def reason_of(exc: BaseException) -> str:
    """The reason that the other ranks get: the error, or the errors of which a group consists."""
    return "; ".join(dict.fromkeys(map(describe_exception, _leaves(exc))))  # equal ones once


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for each in exc.exceptions:
            yield from _leaves(each)
    else:
        yield exc


def coalesce(*comms: Comm, max_bytes: int | None = None, max_ops: int | None = None) -> CoalesceScope:
    """:meth:`Comm.coalesce` for several comms at once. Each comm sends one batch, in the order of the comms' names.

    So ranks with several comms in common send in the same order, independent of the order of their calls.

    Args:
        max_bytes, max_ops: limits of one comm's batch.

    Raises: ValueError on leaving if operations of different comms share memory; none of their operations is sent then.
    """
    if not comms:
        raise ValueError("comms must be at least one Comm, got none")
    for i, comm in enumerate(comms):
        if not isinstance(comm, Comm):
            raise TypeError(f"comms[{i}] must be a Comm, got {comm!r}")
    if len({id(comm) for comm in comms}) < len(comms):
        raise ValueError(f"comms must be different ones, got {[comm.name for comm in comms]}")
    return CoalesceScope([comm._session.deferred for comm in comms], max_bytes, max_ops)
