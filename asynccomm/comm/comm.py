"""The communicator: every collective as a plain method that sends now and returns a Work.

The methods are in ``methods``, by theme; ``ops`` checks their arguments, ``session`` does what they say. Here they come
together, with how a comm ends.
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
from asynccomm.comm.methods.groups import Groups
from asynccomm.comm.methods.lists import CoalescedCollectives
from asynccomm.comm.methods.objects import Objects
from asynccomm.comm.methods.p2p import P2P
from asynccomm.comm.methods.state_dict import StateDicts
from asynccomm.comm.methods.streams import Streams
from asynccomm.comm.methods.tensor_dicts import TensorDicts
from asynccomm.comm.methods.variable import VariableCollectives
from asynccomm.comm.monitored_barrier import MonitoredBarrier
from asynccomm.comm.scopes import Batch, Estimate
from asynccomm.control.diagnosis import Diagnosis
from asynccomm.core.work import Work
from asynccomm.options import duration, seconds

ANSWER_SECONDS = 1.0


@final
class GraphCapture(NamedTuple):
    """What :meth:`Comm.graph_capture` gives."""

    stream: torch.cuda.Stream  #: the current stream within: to be captured


@final
class Comm(
    Collectives,
    VariableCollectives,
    CoalescedCollectives,
    P2P,
    Objects,
    TensorDicts,
    StateDicts,
    Streams,
    Groups,
):
    """A group of ranks that exchange tensors; made by :func:`asynccomm.new_comm`.

    All ranks call the same collectives in the same order. Each method returns at once; ``await`` the Work for the
    output. Common to all:

    - ``timeout``: seconds (or a timedelta) from the call until the operation counts as failed and the comm as broken;
      None: the comm's; ``math.inf``: never. ``hints``: strings for the backend; what it does not know is ignored.
    - ``tag``, of collectives: a str of 1 to 1024 bytes in UTF-8, shown in ``Work.op`` and in errors. With
      ``ordering="agreed"`` it pairs the ranks' calls. In program order it must be the same on all ranks, as the rest of
      the operation: so tasks that mix up their turns are told. (The ``tag`` of point-to-point methods is a number.)
    - Raises at the call, before anything is sent: TypeError and ValueError naming the argument, ClosedError,
      BrokenError. The rest is raised by awaiting: a BrokenError ends the comm, a PayloadError only that operation.
    - Autograd is not involved: a tensor that requires grad is read and written as plain data.
    - Tensors must not be changed, and outputs not be read, before the Work is done. They need not be kept. Giving a
      tensor other memory (``tensor.data = ...``) is fine; resizing the memory it has (``resize_``) is not, and can end
      the process.
    - Cancelling an await is safe: it abandons the wait, the operation goes on.
    - May be called from any thread, but on a thread with a running event loop only from the comm's own.
    - Copying it, also within a model that holds it, gives the comm itself; pickling it is a TypeError.
    """

    def monitored_barrier(self, timeout: float | timedelta | None = None, wait_all_ranks: bool = False) -> Work[None]:
        """Done when every rank has called it; says who is missing otherwise, and the comm goes on.

        For finding out which rank hangs. It runs over the store, so it works where a collective would not, on every
        device, and takes longer than :meth:`barrier`. It stands outside of the sequence of collectives. Each rank's
        calls are counted: a rank that missed some fails at once, call by call, until it has caught up.

        Args:
            timeout: seconds or a timedelta from the call; None: the comm's.
            wait_all_ranks: name all ranks that are missing, instead of the first.

        Raises: from awaiting: MonitoredBarrierError on all ranks, at most about a second after ``timeout``;
            StoreError.
        """
        if not isinstance(wait_all_ranks, bool):
            raise TypeError(f"wait_all_ranks must be a bool, got {wait_all_ranks!r}")
        session = self._session
        return session.submit_aside(MonitoredBarrier(wait_all_ranks), session.barriers.pass_through, timeout)

    def coalesce(self, *, max_bytes: int | None = None, max_ops: int | None = None) -> Batch:
        """Have what this task calls in the scope leave as one batch, at its end. ``with`` or ``async with``.

        ::

            async with comm.coalesce() as batch:
                for parameter in model.parameters():
                    comm.all_reduce(parameter.grad)
            await batch

        Each call gives its own Work, as ever. All ranks open the scope around the same collectives; kinds, dtypes and
        reductions may be mixed. Operations that share memory take effect in their order, and do so on all ranks alike:
        a batch ends before one that depends on it. ``reduce``, ``gather``, ``scatter``, uneven operations and objects
        go in their place, but each by itself: there ranks cannot know of the others' memory.

        - Awaiting one of the Works in the scope sends what is held so far. Only the task that opened the scope, or one
          that it waits for there (``asyncio.gather``), should do so: all ranks must send at the same place.
        - It belongs to the task that opens it, in a thread without a task to the thread. What other tasks and threads
          call, those that were started inside included, is sent as ever.
        - A scope within one of the same comm is part of that, whose limits hold.
        - If the body raises, what is still held is not sent, and its Works fail with ``NotSentError``. What it called
          is sent on the other ranks all the same, unless they raise, too.
        - Deadlines count from the call.

        Args:
            max_bytes, max_ops: of collectives in a batch, counted as the program calls them: a batch leaves as soon as
                it is full, and the next one begins. None: no limit.
        """
        return Batch([self._session], max_bytes, max_ops)

    def time_estimator(self) -> Estimate:
        """Estimate how long the operations that are called in the scope would take; nothing of them is done.

        ::

            async with comm.time_estimator() as estimate:
                comm.all_reduce(gradient)
            print(estimate.seconds)

        All ranks do so for the same collectives of tensors, since the backend may have to connect for it. Their Works
        fail with ``NotSentError``; tensors are left alone.

        Raises: NotImplementedError for backends other than NCCL, which can simulate; and on leaving, for what NCCL has
            no estimate of (what it makes of messages: gather, scatter, all_to_all).
        """
        self._session.check_estimates()
        return Estimate(self._session)

    @contextmanager
    def graph_capture(self, stream: torch.cuda.Stream | None = None) -> Iterator[GraphCapture]:
        """A stream to capture CUDA graphs on that contain collectives of this comm; it follows the current one.

        ::

            with comm.graph_capture() as capture, torch.cuda.graph(graph, stream=capture.stream):
                comm.all_reduce(tensor).wait()
            graph.replay()

        Within a capture, operations on tensors are queued on the stream that is captured, in the order of the calls,
        and run whenever the graph is replayed; all ranks must capture the same ones, and replay the graph as often.
        ``wait`` and ``wait_stream`` order streams as ever; awaiting such a Work raises ``RuntimeError``. What needs
        the host (objects, dicts, streams, barriers, uneven tensors of sizes unknown) raises ``RuntimeError`` at the
        call. The collectives must have been used before: NCCL cannot connect within a capture. Reset the graphs before
        the comm is closed, which NCCL otherwise waits for.

        Args:
            stream: to use, instead of a new one.

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
        """Ask all ranks what they have called last and wait for, where, and for how long. Print what it returns.

        It goes over the control channel, not the transport, and a thread of its own answers: so it works while
        operations hang, while other ranks' event loops are blocked, and on a comm that is broken. A rank that is
        stopped, or whose interpreter lock is held, does not answer, and it is said for how long it was silent. Not
        collective: any rank may ask at any time. Cancelling is safe.

        Args:
            stacks: also the stacks of each rank's main thread and tasks.
            timeout: seconds for the ranks to answer.

        Raises: ClosedError on a closed comm; RuntimeError if this rank has no control channel.
        """
        limit = seconds("timeout", timeout, ANSWER_SECONDS)
        session = self._session
        session.check_loop()
        if session.ended:
            session.check_open()
        if session.reporter is None:
            raise RuntimeError(
                f"comm {self.name!r} has no control channel here (hint control='off', or a warning said why)"
            )
        return await session.reporter.diagnose(limit, stacks=stacks)

    async def ready(self) -> None:
        """Wait until less is in flight than ``options.max_ops`` and ``options.max_bytes``.

        Calls are never refused for being too many; await this between them in a producer that could run far ahead.
        What is held back does not count: what a scope holds, and what the ranks have not agreed on yet (or two of them
        that call in different orders might wait for each other here).
        Cancelling is safe. Raises: ClosedError, BrokenError.
        """
        await self._session.ready()

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Change the time limit of operations that are called from now on without ``timeout=``, on this rank alone.

        Args:
            timeout: seconds or a timedelta; ``math.inf``: no limit. ``options.timeout`` shows it, and comms that are
                split off from now on inherit it.

        Raises: TypeError, ValueError. From any thread.
        """
        self._session.set_timeout(duration("timeout", timeout))

    def extend_timeout(self, extra: float | timedelta) -> None:
        """Give what is called from now on ``extra`` seconds more, until the first of it is done; on this rank alone.

        For one operation that is known to take long: a first step that compiles, say, or one after a checkpoint.
        Operations with a ``timeout=`` of their own are not touched. Calls add up.

        Raises: TypeError, ValueError. From any thread.
        """
        self._session.extend_timeout(duration("extra", extra))

    def abort(self, reason: str = "abort() was called") -> None:
        """Stop everything at once, here and on the other ranks; waits for nobody. From any thread.

        What is pending here fails with ``AbortedError(rank, reason)`` before this returns, on the other ranks as soon
        as they hear of it. Aborting a comm that is closed or broken already does nothing. ``aclose`` is still due.

        Raises: TypeError if ``reason`` is no str; nothing is stopped then.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a str, got {reason!r}")
        self._session.abort(reason)

    async def aclose(self) -> None:
        """Take no more calls, wait for what is in flight, and free everything. Idempotent.

        Not collective: each rank closes when it is done. Cancelling it aborts the comm.
        """
        await self._session.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._session
        if exc is not None:
            session.abort(f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__)
            if session.error is not None:
                session.error.observed = True  # ``exc`` is on its way to the user; pending Works need not report too
        await session.aclose()

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is None or session.closed or session.backend is None:
            return
        warnings.warn(f"{self!r} was never closed: use `async with` or `await comm.aclose()`", ResourceWarning, 1, self)
        session.forget()


def coalesce(*comms: Comm, max_bytes: int | None = None, max_ops: int | None = None) -> Batch:
    """:meth:`Comm.coalesce` for several comms at once. Each sends one batch, in the order of the comms' names.

    So ranks that have several comms in common send in the same order, whatever the order in which they call.

    Args:
        max_bytes, max_ops: of one comm's batch.

    Raises: ValueError on leaving if operations of different comms share memory; nothing of theirs is sent then.
    """
    if not comms:
        raise ValueError("comms must be at least one Comm, got none")
    for i, comm in enumerate(comms):
        if not isinstance(comm, Comm):
            raise TypeError(f"comms[{i}] must be a Comm, got {comm!r}")
    if len({id(comm) for comm in comms}) < len(comms):
        raise ValueError(f"comms must be different ones, got {[comm.name for comm in comms]}")
    return Batch([comm._session for comm in comms], max_bytes, max_ops)
