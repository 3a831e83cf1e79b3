"""A comm with blocking methods, and the functions that make such comms.

The methods that return Works are those of the awaitable comm, on the same state: they may be called from any thread,
and ``Work.wait`` blocks. Only methods that are coroutines, or make comms, have a twin here, which calls them on the
comm's loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, ParamSpec, SupportsIndex, final

from asynccomm.blocking.events import BlockingEvents
from asynccomm.blocking.portal import Portal
from asynccomm.blocking.queue import BlockingQueue
from asynccomm.blocking.twins import Place, Twin, here, made, making, there
from asynccomm.blocking.window import BlockingWindow
from asynccomm.comm.comm import Comm
from asynccomm.comm.comm import coalesce as coalesce_comms
from asynccomm.comm.join_comm import join_comm as join_awaitable
from asynccomm.comm.methods.collectives import Collectives
from asynccomm.comm.methods.experts import ExpertCollectives
from asynccomm.comm.methods.lists import CoalescedCollectives
from asynccomm.comm.methods.objects import Objects
from asynccomm.comm.methods.p2p import P2P
from asynccomm.comm.methods.tensor_dicts import TensorDicts
from asynccomm.comm.methods.variable import VariableCollectives
from asynccomm.comm.new_comm import new_comm as new_awaitable
from asynccomm.comm.pairs import pair_comm as pair_awaitable
from asynccomm.comm.pending import PendingComm
from asynccomm.comm.scopes import CoalesceScope
from asynccomm.observe.events import KEPT

P = ParamSpec("P")


def _comm(comm: Comm, portal: Portal) -> BlockingComm:
    return BlockingComm(comm, portal)


def comm_or_none(comm: Comm | None, portal: Portal) -> BlockingComm | None:
    """The blocking form of ``comm``; None, and no hold on the loop, if there is no comm on this rank."""
    if comm is None:
        portal.release()
        return None
    return BlockingComm(comm, portal)


@final
class BlockingComm(
    Collectives,
    VariableCollectives,
    CoalescedCollectives,
    ExpertCollectives,
    P2P,
    Objects,
    TensorDicts,
    Twin[Comm],
):
    """A comm for programs without an event loop: the methods of :class:`asynccomm.Comm`, to be called from any thread.

    - Methods that return Works return them at once; ``work.wait(timeout)`` blocks the calling thread. On a thread with
      a running event loop, ``wait`` and all blocking methods raise ``WouldBlockError``.
    - Coroutine methods, and those that make comms, block until they are done, and return the result. Ctrl-C cancels
      them.
    - ``with`` in place of ``async with``: for the comm, scopes, sinks; ``for`` in place of ``async for`` for streams.
    - Leaving ``with`` by an exception, KeyboardInterrupt and SystemExit included, aborts the comm. A comm that is open
      when the process ends is closed; operations in flight have five seconds.

    Errors, order, time limits and memory are as everywhere. A forked child gets ``ClosedError``.
    """

    _instead = "make a comm there, by asynccomm.blocking.new_comm() or comm.split()"

    def __init__(self, comm: Comm, portal: Portal) -> None:
        """Not for users: see :func:`asynccomm.blocking.new_comm`."""
        vars(self).update(vars(comm))  # one state, to which both belong
        self.comm: Final[Comm] = comm  #: the awaitable comm, for functions that take one; its loop runs in a thread
        self._hold(comm, portal)

    @here(Comm.monitored_barrier)
    def monitored_barrier(self) -> Any: ...

    @here(Comm.time_estimator)
    def time_estimator(self) -> Any: ...

    @here(Comm.coalesce)
    def coalesce(self) -> Any: ...

    @here(Comm.add_hook)
    def add_hook(self) -> Any: ...

    @here(Comm.trace)
    def trace(self) -> Any: ...

    @here(Comm.empty)
    def empty(self) -> Any: ...

    @here(Comm.memory)
    def memory(self) -> Any: ...

    @there(Comm.register)
    def register(self) -> Any: ...

    @there(Comm.deregister)
    def deregister(self) -> Any: ...

    @here(Comm.graph_capture)
    def graph_capture(self) -> Any: ...

    @here(Comm.set_timeout)
    def set_timeout(self) -> Any: ...

    @here(Comm.extend_timeout)
    def extend_timeout(self) -> Any: ...

    @here(Comm.abort)
    def abort(self) -> Any: ...

    @there(Comm.diagnose)
    def diagnose(self) -> Any: ...

    @there(Comm.ready)
    def ready(self) -> Any: ...

    @there(Comm.preempted)
    def preempted(self) -> Any: ...

    @there(Comm.newcomers)
    def newcomers(self) -> Any: ...

    @making(Comm.dup, _comm)
    def dup(self) -> Any: ...

    @making(Comm.subgroups, _comm)
    def subgroups(self) -> Any: ...

    @making(Comm.subgroups_by_enumeration, comm_or_none)
    def subgroups_by_enumeration(self) -> Any: ...

    @making(Comm.intra_node, _comm)
    def intra_node(self) -> Any: ...

    @making(Comm.inter_node, comm_or_none)
    def inter_node(self) -> Any: ...

    @making(Comm.shrink, _comm)
    def shrink(self) -> Any: ...

    @making(Comm.reconfigure, _comm)
    def reconfigure(self) -> Any: ...

    @making(Comm.window, BlockingWindow)
    def window(self) -> Any: ...

    @making(Comm.queue, BlockingQueue)
    def queue(self) -> Any: ...

    def events(self, *, size: int = KEPT) -> BlockingEvents:
        """See :meth:`asynccomm.Comm.events`; to be read with ``for``, by one thread."""
        return BlockingEvents(self.comm.events(size=size), Portal(self.loop))

    def split(
        self,
        ranks: Sequence[SupportsIndex],
        name: str,
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> BlockingComm | None:
        """See :meth:`asynccomm.Comm.split`. Returns: the new comm; None if ``ranks`` is empty."""
        return made(lambda: self.comm.split(ranks, name, hints=hints, timeout=timeout), comm_or_none)

    @property
    def parent_ranks(self) -> tuple[int, ...]:
        """See :attr:`asynccomm.Comm.parent_ranks`."""
        return self.comm.parent_ranks


def _maker(make: Callable[P, PendingComm[Comm]], example: str) -> Callable[[Place], Callable[P, BlockingComm]]:
    @functools.wraps(make)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> BlockingComm:
        return made(lambda: make(*args, **kwargs), BlockingComm)

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
