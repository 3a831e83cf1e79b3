"""Point-to-point operations: tensors from one rank to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, SupportsIndex, final

from torch import Tensor

from asynccomm.comm.methods.base import CommBase
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.ops import Call, Recv, Send
from asynccomm.ops.validation import CommInfo


@final
class BatchSendRecv(Handle):
    """Sends and receives that start together; made by ``comm.batch_op_create()``.

    ``send`` and ``recv`` only check their arguments and record. The order of recording matters only for messages
    between the same two ranks under the same tag. Any ranks may take part; the other ranks do nothing.
    """

    _instead = "make one there, by comm.batch_op_create()"

    def __init__(self, group: CommInfo, submit: Callable[..., Work[Any]]) -> None:
        """Not for users: see ``comm.batch_op_create``."""
        self._group = group
        self._submit = submit
        self._calls: list[Call] = []
        self._issued = False

    @property
    def ops(self) -> list[Send | Recv]:
        """The recorded sends and receives."""
        return [call.op for call in self._calls]  # type: ignore[misc]

    def send(self, tensor: Tensor, dst: SupportsIndex, tag: SupportsIndex = 0) -> None:
        """Record a send, see :meth:`Comm.send`; a send to this rank itself works, too."""
        self._record(Send.of(self._group, tensor, dst, tag))

    def recv(self, tensor: Tensor, src: SupportsIndex | None = None, tag: SupportsIndex = 0) -> None:
        """Record a receive, see :meth:`Comm.recv`."""
        self._record(Recv.of(self._group, tensor, src, tag))

    def _record(self, call: Call) -> None:
        if self._issued:
            raise RuntimeError("this batch was issued; make a new one with comm.batch_op_create()")
        self._calls.append(call)

    def issue(
        self, *, timeout: float | timedelta | None = None, hints: Mapping[str, str] | None = None
    ) -> Work[list[Tensor]]:
        """Start all recorded operations at the same time, once: no order among them can deadlock.

        Returns: Work of the recorded tensors, in the order of recording; done when all operations are. Raises
            ValueError for an empty batch, RuntimeError for a batch that was issued before.
        """
        if self._issued:
            raise RuntimeError("this batch was issued; make a new one with comm.batch_op_create()")
        if not self._calls:
            raise ValueError("nothing was recorded in this batch: call send() or recv() before issue()")
        work = self._submit(self._calls, [call.result for call in self._calls], timeout, hints)
        self._issued = True
        return work


class P2P(CommBase):
    """Point-to-point operations on tensors."""

    def send(
        self,
        tensor: Tensor,
        dst: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Send ``tensor`` to rank ``dst``, which receives it under the same ``tag``.

        The Work is done when ``tensor`` may be changed again. Messages are ordered per pair of ranks and tag, and are
        not part of the sequence of collectives. A rank may send to itself, and then needs a receive, too.

        Returns: Work of ``tensor``.
        """
        return self._submit(Send.of(self._group, tensor, dst, tag), timeout, hints)

    def recv(
        self,
        tensor: Tensor,
        src: SupportsIndex | None = None,
        tag: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Receive a tensor that rank ``src`` sends under ``tag`` into ``tensor``: as many elements, the same dtype.

        Args:
            src: None: the first message under ``tag`` from any rank; a backend that does not support this raises
                ``ValueError``. ``Work.source`` gives the rank that sent it.

        Returns: Work of ``tensor``.
        """
        return self._submit(Recv.of(self._group, tensor, src, tag), timeout, hints)

    def batch_op_create(self) -> BatchSendRecv:
        """Make a batch of sends and receives that start together, with one Work: a ring exchange cannot deadlock.

        ::

            batch = comm.batch_op_create()
            batch.send(mine, (comm.rank + 1) % comm.size)
            batch.recv(theirs, (comm.rank - 1) % comm.size)
            await batch.issue()
        """
        return BatchSendRecv(self._group, self._submit_together)
