"""Sends and receives that start together, with torchcomms' names."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from asynccomm.comm.methods.p2p import BatchSendRecv as CommBatch
from asynccomm.compat.torchcomms.errors import refusing
from asynccomm.compat.torchcomms.options import BatchP2POptions
from asynccomm.compat.torchcomms.work import TorchWork
from asynccomm.core.handles import Handle


class P2POpType(enum.Enum):
    """The direction of a message."""

    SEND = "SEND"
    RECV = "RECV"


@final
@dataclass(frozen=True, slots=True, eq=False)
class P2POp:
    """One message of a batch: ``tensor`` goes to, or comes from, rank ``peer``."""

    type: P2POpType
    tensor: Tensor
    peer: int


@final
class BatchSendRecv(Handle):
    """Sends and receives that start together as one operation; made by ``TorchComm.batch_op_create()``.

    Both methods check their arguments and record. Each message needs its other end on another rank.
    """

    _instead = "make one there, by comm.batch_op_create()"

    def __init__(self, batch: CommBatch, run: Callable[..., TorchWork]) -> None:
        """Not for users: see ``TorchComm.batch_op_create``."""
        self._batch = batch
        self._run = run
        self._ops: list[P2POp] = []

    @property
    def ops(self) -> list[P2POp]:
        """The recorded messages."""
        return list(self._ops)

    def send(self, tensor: Tensor, dst: int) -> None:
        """Record a send to rank ``dst``."""
        with refusing():
            self._batch.send(tensor, dst)
        self._ops.append(P2POp(P2POpType.SEND, tensor, dst))

    def recv(self, tensor: Tensor, src: int) -> None:
        """Record a receive from rank ``src``."""
        with refusing():
            self._batch.recv(tensor, src)
        self._ops.append(P2POp(P2POpType.RECV, tensor, src))

    def issue(self, async_op: bool, options: BatchP2POptions | None = None) -> TorchWork:
        """Start all messages, once. Raises: RuntimeError for an empty batch, and for one that was issued."""
        given = BatchP2POptions() if options is None else options
        return self._run("batch_op_issue", async_op, given.hints, given.timeout, self._issue, self.ops)

    def _issue(self, ops: list[P2POp], *, timeout: Any, hints: Any) -> Any:
        return self._batch.issue(timeout=timeout, hints=hints)
