"""Point-to-point operations: tensors from one rank to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsIndex, final

from torch import Tensor

from asynccomm.ops.base import Call, TensorOp, described, moved
from asynccomm.ops.validation import CommInfo, check_rank, check_tag, check_tensor


@final
@dataclass(frozen=True, slots=True)
class Send(TensorOp):
    """A tensor to ``peer`` under ``tag``."""

    kind = "send"
    p2p = True
    peer: int
    tag: int

    @classmethod
    def of(cls, group: CommInfo, tensor: Tensor, dst: SupportsIndex, tag: SupportsIndex) -> Call:
        rank = check_rank(group, "dst", dst)
        check_tensor(group, "tensor", tensor)
        return Call(cls(*moved(tensor.dtype, tensor.numel()), rank, check_tag(tag)), (tensor,), (), tensor)

    def __str__(self) -> str:
        return f"send({described(self)}, dst={self.peer}, tag={self.tag})"


@final
@dataclass(frozen=True, slots=True)
class Recv(TensorOp):
    """A tensor from ``peer`` under ``tag``; ``peer`` None: from any rank."""

    kind = "recv"
    p2p = True
    peer: int | None
    tag: int

    @classmethod
    def of(cls, group: CommInfo, tensor: Tensor, src: SupportsIndex | None, tag: SupportsIndex) -> Call:
        rank = None if src is None else check_rank(group, "src", src)
        check_tensor(group, "tensor", tensor, written=True)
        return Call(cls(*moved(tensor.dtype, tensor.numel()), rank, check_tag(tag)), (), (tensor,), tensor)

    def takes(self, send: Send) -> bool:
        """Whether the message of ``send`` fits into this receive."""
        return self.dtype == send.dtype and self.numel == send.numel

    def __str__(self) -> str:
        return f"recv({described(self)}, src={'any' if self.peer is None else self.peer}, tag={self.tag})"
