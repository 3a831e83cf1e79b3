"""Point-to-point operations: tensors from one rank to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import SupportsIndex, final

import torch  # noqa: F401  # in the annotations that __init__ has from TensorOp
from torch import Tensor

from asynccomm.ops.base import Call, PeerOp, TensorOp, moved
from asynccomm.ops.validation import CommInfo, check_rank, check_tag, check_tensor


@final
@dataclass(frozen=True, slots=True)
class Send(PeerOp, TensorOp):
    """A tensor to ``peer`` under ``tag``."""

    kind = "send"
    is_send = True
    peer: int
    tag: int

    @classmethod
    def of(cls, group: CommInfo, tensor: Tensor, dst: SupportsIndex, tag: SupportsIndex) -> Call:
        rank = check_rank(group, "dst", dst)
        check_tensor(group, "tensor", tensor)
        return Call(cls(*moved(tensor.dtype, tensor.numel()), rank, check_tag(tag)), (tensor,), (), tensor)


@final
@dataclass(frozen=True, slots=True)
class Recv(PeerOp, TensorOp):
    """A tensor from ``peer`` under ``tag``; ``peer`` None: from any rank."""

    kind = "recv"
    is_send = False
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
