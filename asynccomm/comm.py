"""The communicator: every collective as a plain method that sends now and returns a Work.

Here are the methods and what they promise; ``ops`` checks their arguments, ``session`` does what they say.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, SupportsIndex, final

import torch
from torch import Tensor

from asynccomm import ops
from asynccomm.backends.base import Backend
from asynccomm.errors import ClosedError
from asynccomm.ops import Call
from asynccomm.options import CommOptions
from asynccomm.reduce_op import ReduceOp
from asynccomm.session import CommStatistics, Session
from asynccomm.work import Work

__all__ = ["Comm"]


@final
class Comm:
    """A group of ranks that exchange tensors; made by :func:`asynccomm.new_comm`.

    All ranks call the same collectives in the same order. Each method returns at once; ``await`` the Work for the
    output. Common to all:

    - ``timeout``: seconds (or a timedelta) from the call until the operation counts as failed and the comm as broken;
      None: the comm's. ``hints``: strings for the backend; what it does not know is ignored.
    - Raises at the call, before anything is sent: TypeError and ValueError naming the argument, ClosedError,
      BrokenError. The rest is raised by awaiting.
    - Autograd is not involved: a tensor that requires grad is read and written as plain data.
    - Tensors must not be changed, and outputs not be read, before the Work is done. They need not be kept. Giving a
      tensor other memory (``tensor.data = ...``) is fine; resizing the memory it has (``resize_``) is not, and can end
      the process.
    - Cancelling an await is safe: it abandons the wait, the operation goes on.
    - May be called from any thread, but on a thread with a running event loop only from the comm's own.
    """

    def __init__(self, session: Session, backend_name: str) -> None:
        """Not for users: see ``asynccomm.new_comm``."""
        self._session = session
        self._group = session.group
        self._backend_name = backend_name

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
        return self._session.options

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that its Works are awaited on."""
        return self._session.mailbox.loop

    def unsafe_get_backend(self) -> Backend:
        """The backend itself: an escape hatch, without promises of compatibility."""
        self._session.check_open()
        assert self._session.backend is not None
        return self._session.backend

    def statistics(self) -> CommStatistics:
        """How much is going on."""
        return self._session.statistics()

    def __repr__(self) -> str:
        error = self._session.error
        state = "open" if error is None else "closed" if isinstance(error, ClosedError) else "broken"
        return (
            f"<Comm {self.name!r} rank {self.rank} of {self.size}, {self._backend_name} on {self.device}, {state}, "
            f"{self.statistics().in_flight} in flight>"
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
        src: SupportsIndex | None = None,
        tag: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Receive into ``tensor`` what rank ``src`` sends under ``tag``: as many elements, of the same dtype.

        Args:
            src: None: the message under ``tag`` that comes first, from any rank; not every backend can, and one that
                cannot raises ``ValueError``. ``Work.source`` says whose it was.

        Returns: Work of ``tensor``.
        """
        return self._submit(ops.Recv.of(self._group, tensor, src, tag), timeout, hints)

    # -- flow and ending ----------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until less is in flight than ``options.max_ops`` and ``options.max_bytes``.

        Calls are never refused for being too many; await this between them in a producer that could run far ahead.
        Cancelling is safe. Raises: ClosedError, BrokenError.
        """
        await self._session.ready()

    def _submit(self, call: Call, timeout: float | timedelta | None, hints: Mapping[str, str] | None) -> Work[Any]:
        return self._session.submit(call, timeout, hints)

    def abort(self, reason: str = "abort() was called") -> None:
        """Stop everything at once, here and on the other ranks; waits for nobody. From any thread.

        What is pending here fails with ``AbortedError(rank, reason)`` before this returns, on the other ranks as soon
        as they hear of it. Aborting a comm that is closed or broken already does nothing. ``aclose`` is still due.
        """
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
