"""A comm with blocking methods, and the functions that make such comms.

The methods that return Works are those of the awaitable comm, on the same state: they may be called from any thread,
and ``Work.wait`` blocks. Only methods that are coroutines, or make comms, have a twin here, which calls them on the
comm's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, SupportsIndex, TypeAlias, TypeVar, final

from asynccomm.blocking.loop_thread import EXIT_SECONDS, at_exit, on_a_thread
from asynccomm.blocking.portal import Portal
from asynccomm.comm.comm import Comm
from asynccomm.comm.comm import coalesce as coalesce_comms
from asynccomm.comm.methods.collectives import Collectives
from asynccomm.comm.methods.experts import ExpertCollectives
from asynccomm.comm.methods.lists import CoalescedCollectives
from asynccomm.comm.methods.objects import Objects
from asynccomm.comm.methods.p2p import P2P
from asynccomm.comm.methods.tensor_dicts import TensorDicts
from asynccomm.comm.methods.variable import VariableCollectives
from asynccomm.comm.new_comm import join_comm as join_awaitable
from asynccomm.comm.new_comm import new_comm as new_awaitable
from asynccomm.comm.pairs import pair_comm as pair_awaitable
from asynccomm.comm.pending import PendingComm
from asynccomm.comm.scopes import CoalesceScope

P = ParamSpec("P")
T = TypeVar("T")


Place: TypeAlias = Callable[..., Any]  # an empty function that a twin replaces, so that type checkers see the twin


def _here(method: Callable[Concatenate[Comm, P], T]) -> Callable[[Place], Callable[Concatenate[BlockingComm, P], T]]:
    """A decorator: in place of the function, a method of the comm that any thread may call."""

    @functools.wraps(method)
    def called(self: BlockingComm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.comm, *args, **kwargs)

    return lambda _: called


def _there(
    method: Callable[Concatenate[Comm, P], Awaitable[T]],
) -> Callable[[Place], Callable[Concatenate[BlockingComm, P], T]]:
    """A decorator: in place of the function, the blocking twin of a coroutine method."""

    @functools.wraps(method)
    def called(self: BlockingComm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._portal.call(lambda: method(self.comm, *args, **kwargs))

    return lambda _: called


def _making(
    method: Callable[Concatenate[Comm, P], PendingComm[Comm]],
) -> Callable[[Place], Callable[Concatenate[BlockingComm, P], BlockingComm]]:
    """A decorator: in place of the function, the blocking twin of a method that makes a comm."""

    @functools.wraps(method)
    def called(self: BlockingComm, /, *args: P.args, **kwargs: P.kwargs) -> BlockingComm:
        return connected(lambda: method(self.comm, *args, **kwargs))

    return lambda _: called


def _making_some(
    method: Callable[Concatenate[Comm, P], PendingComm[Comm | None]],
) -> Callable[[Place], Callable[Concatenate[BlockingComm, P], BlockingComm | None]]:
    """As ``_making``, for a method that makes a comm on some ranks."""

    @functools.wraps(method)
    def called(self: BlockingComm, /, *args: P.args, **kwargs: P.kwargs) -> BlockingComm | None:
        return connected_or_none(lambda: method(self.comm, *args, **kwargs))

    return lambda _: called


@final
class BlockingComm(
    Collectives, VariableCollectives, CoalescedCollectives, ExpertCollectives, P2P, Objects, TensorDicts
):
    """A comm for programs without an event loop: the methods of :class:`asynccomm.Comm`, to be called from any thread.

    - Methods that return Works return them at once; ``work.wait(timeout)`` blocks the calling thread. On a thread with
      a running event loop, ``wait`` and all blocking methods raise ``WouldBlockError``.
    - Coroutine methods, and those that make comms, block until they are done, and return the result. Ctrl-C cancels
      them.
    - ``with`` in place of ``async with``: for the comm, scopes, sinks; ``for`` in place of ``async for`` for streams.
    - Leaving ``with`` by an exception, KeyboardInterrupt and SystemExit included, aborts the comm. A comm that is open
      when the process ends is closed; operations in flight have five seconds.

    Errors, order, time limits and memory are as everywhere. A forked child gets ``ClosedError``. Windows, queues and
    events have no blocking form.
    """

    _instead = "make a comm there, by asynccomm.blocking.new_comm() or comm.split()"

    def __init__(self, comm: Comm, portal: Portal) -> None:
        """Not for users: see :func:`asynccomm.blocking.new_comm`."""
        vars(self).update(vars(comm))  # one state, to which both belong
        self.comm: Final[Comm] = comm  #: the awaitable comm, for functions that take one; its loop runs in a thread
        self._portal = portal
        at_exit(self)

    @_here(Comm.monitored_barrier)
    def monitored_barrier(self) -> Any: ...

    @_here(Comm.time_estimator)
    def time_estimator(self) -> Any: ...

    @_here(Comm.coalesce)
    def coalesce(self) -> Any: ...

    @_here(Comm.add_hook)
    def add_hook(self) -> Any: ...

    @_here(Comm.trace)
    def trace(self) -> Any: ...

    @_here(Comm.graph_capture)
    def graph_capture(self) -> Any: ...

    @_here(Comm.set_timeout)
    def set_timeout(self) -> Any: ...

    @_here(Comm.extend_timeout)
    def extend_timeout(self) -> Any: ...

    @_here(Comm.abort)
    def abort(self) -> Any: ...

    @_there(Comm.diagnose)
    def diagnose(self) -> Any: ...

    @_there(Comm.ready)
    def ready(self) -> Any: ...

    @_there(Comm.preempted)
    def preempted(self) -> Any: ...

    @_there(Comm.newcomers)
    def newcomers(self) -> Any: ...

    @_making(Comm.dup)
    def dup(self) -> Any: ...

    @_making(Comm.subgroups)
    def subgroups(self) -> Any: ...

    @_making_some(Comm.subgroups_by_enumeration)
    def subgroups_by_enumeration(self) -> Any: ...

    @_making(Comm.intra_node)
    def intra_node(self) -> Any: ...

    @_making_some(Comm.inter_node)
    def inter_node(self) -> Any: ...

    @_making(Comm.shrink)
    def shrink(self) -> Any: ...

    @_making(Comm.reconfigure)
    def reconfigure(self) -> Any: ...

    def split(
        self,
        ranks: Sequence[SupportsIndex],
        name: str,
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> BlockingComm | None:
        """See :meth:`asynccomm.Comm.split`. Returns: the new comm; None if ``ranks`` is empty."""
        return connected_or_none(lambda: self.comm.split(ranks, name, hints=hints, timeout=timeout))

    @property
    def parent_ranks(self) -> tuple[int, ...]:
        """See :attr:`asynccomm.Comm.parent_ranks`."""
        return self.comm.parent_ranks

    def close(self) -> None:
        """Refuse further calls, wait for the operations in flight, and free everything. Idempotent.

        Not collective. An exception that interrupts it (Ctrl-C) aborts the comm.
        """
        self._end(self.comm.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(lambda: self.comm.__aexit__(kind, exc, traceback))

    def end_of_process(self) -> None:
        """Close the comm within ``EXIT_SECONDS``. Not for users."""

        async def closing() -> None:
            with contextlib.suppress(TimeoutError):  # the cancelled aclose() aborts the comm
                async with asyncio.timeout(EXIT_SECONDS):
                    await self.comm.aclose()

        self._end(closing)

    def __del__(self) -> None:
        portal = getattr(self, "_portal", None)
        if portal is not None and portal.held:  # the comm itself warns; this may be the loop's thread
            on_a_thread(portal.release)

    def _end(self, end: Callable[[], Awaitable[None]]) -> None:
        if not self._portal.held:
            return
        try:
            self._portal.call(end)
        finally:
            self._portal.release()


def connected(make: Callable[[], PendingComm[Comm]]) -> BlockingComm:
    """The comm that ``make`` makes on the loop, with a hold on the loop of its own."""
    comm = connected_or_none(make)
    assert comm is not None
    return comm


def connected_or_none(make: Callable[[], PendingComm[Any]]) -> BlockingComm | None:
    """As :func:`connected`; None if ``make`` gives no comm on this rank."""
    portal = Portal()
    try:
        comm = portal.call(make)
        made = None if comm is None else BlockingComm(comm, portal)
    except BaseException:
        portal.release()
        raise
    if made is None:
        portal.release()
    return made


def _maker(make: Callable[P, PendingComm[Comm]], example: str) -> Callable[[Place], Callable[P, BlockingComm]]:
    @functools.wraps(make)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> BlockingComm:
        return connected(lambda: make(*args, **kwargs))

    blocking.__doc__ = f"""The blocking twin of :func:`asynccomm.{make.__name__}`, with the same arguments.

    ::

        with blocking.{example} as comm:
            comm.all_reduce(tensor).wait()

    Blocks until all ranks have connected. Raises: the errors of the call and of awaiting it; WouldBlockError on a
    thread with a running event loop. Ctrl-C cancels it.
    """
    return lambda _: blocking


@_maker(new_awaitable, "new_comm()")
def new_comm() -> Any: ...


@_maker(join_awaitable, "join_comm()")
def join_comm() -> Any: ...


@_maker(pair_awaitable, 'pair_comm("trainer", "server 3", store="tcp://host:port")')
def pair_comm() -> Any: ...


def coalesce(*comms: BlockingComm, max_bytes: int | None = None, max_ops: int | None = None) -> CoalesceScope:
    """:func:`asynccomm.coalesce` for comms that block; ``with``, and ``batch.wait()`` after it."""
    for i, comm in enumerate(comms):
        if not isinstance(comm, BlockingComm):
            raise TypeError(f"comms[{i}] must be a BlockingComm, got {comm!r}")
    return coalesce_comms(*[comm.comm for comm in comms], max_bytes=max_bytes, max_ops=max_ops)
