"""The communicator: every collective as a plain method that sends now and returns a Work.

The methods are in ``methods``, by theme; ``ops`` checks their arguments, ``session`` does what they say. Here they come
together, with how a comm ends.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from types import TracebackType
from typing import Self, final

from asynccomm.comm.methods.barriers import Barriers
from asynccomm.comm.methods.collectives import Collectives
from asynccomm.comm.methods.diagnosing import Diagnosing
from asynccomm.comm.methods.graphs import Graphs
from asynccomm.comm.methods.groups import Groups
from asynccomm.comm.methods.lists import CoalescedCollectives
from asynccomm.comm.methods.objects import Objects
from asynccomm.comm.methods.p2p import P2P
from asynccomm.comm.methods.regrouping import Regrouping
from asynccomm.comm.methods.scopes import Scopes
from asynccomm.comm.methods.state_dict import StateDicts
from asynccomm.comm.methods.streams import Streams
from asynccomm.comm.methods.tensor_dicts import TensorDicts
from asynccomm.comm.methods.variable import VariableCollectives
from asynccomm.options import duration


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
    Barriers,
    Scopes,
    Diagnosing,
    Regrouping,
    Groups,
    Graphs,
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
