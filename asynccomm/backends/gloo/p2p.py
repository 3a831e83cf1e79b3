"""Send and receive over gloo.

gloo matches messages by peer and tag, in order, but trusts both sides to know the size: a shorter message fills half
of the tensor in silence, a longer one ends the process. So each message has a header, under a tag of its own, that says
how many elements of which dtype follow; a receive takes the payload only if it fits, and else fails with both
descriptions.

Messages to oneself never reach gloo, which has no connection to itself.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.lanes import Lanes
from asynccomm.backends.gloo.lowering import as_bytes, target
from asynccomm.backends.gloo.torch_gloo import Gloo
from asynccomm.errors import BrokenError, CollectiveMismatchError
from asynccomm.ops import Recv, Send

__all__ = ["PointToPoint"]

_DTYPES = {zlib.crc32(str(d).encode()): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def _header(op: Send) -> Tensor:
    return torch.tensor([op.numel, zlib.crc32(str(op.dtype).encode())], dtype=torch.int64)


@final
class PointToPoint:
    """Sends and receives of one rank.

    Args:
        complete: runs steps that wait for gloo, finishes and settles the submission, and reports what goes wrong;
            called on a lane.
        on_error: where a mismatch goes.
    """

    def __init__(
        self,
        rank: int,
        lanes: Lanes,
        complete: Callable[[Submission, Sequence[Callable[[], object]], Callable[[], None] | None], None],
        on_error: Callable[[BrokenError], object],
    ) -> None:
        self._rank = rank
        self._lanes = lanes
        self._complete = complete
        self._on_error = on_error
        self._own_sends: defaultdict[int, deque[Submission]] = defaultdict(deque)  # to this rank itself, by tag
        self._own_recvs: defaultdict[int, deque[Submission]] = defaultdict(deque)

    def submit(self, gloo: Gloo, submission: Submission) -> None:
        """Start a send or receive. Under the comm's lock."""
        op = submission.op
        if isinstance(op, Send):
            if op.peer == self._rank:
                self._own_sends[op.tag].append(submission)
                self._meet(op.tag)
            else:
                self._send(gloo, op, submission)
        else:
            assert isinstance(op, Recv)
            if op.peer == self._rank:
                self._own_recvs[op.tag].append(submission)
                self._meet(op.tag)
            else:
                self._recv(gloo, op, submission)

    def drop(self) -> None:
        """Let go of what this rank has sent itself."""
        self._own_sends.clear()
        self._own_recvs.clear()

    def _send(self, gloo: Gloo, op: Send, submission: Submission) -> None:
        header = _header(op)
        data = as_bytes(submission.inputs[0])
        steps = [gloo.send(header, op.peer, 2 * op.tag).wait]
        if op.numel:
            steps.append(gloo.send(data, op.peer, 2 * op.tag + 1).wait)

        def job() -> None:
            self._complete(submission, steps, None)
            staged.clear()

        staged = [header, data]  # gloo reads them until then
        self._lanes.put(("send", op.peer, op.tag), job)

    def _recv(self, gloo: Gloo, op: Recv, submission: Submission) -> None:
        header = torch.empty(2, dtype=torch.int64)
        announced = gloo.recv(header, op.peer, 2 * op.tag)

        def payload() -> None:
            numel, code = header.tolist()
            sent = Send(_DTYPES.get(code, torch.uint8), numel, self._rank, op.tag)
            if not op.takes(sent):
                raise CollectiveMismatchError(submission.work.seq, op.peer, str(sent), self._rank, str(op))
            if numel:
                data, copy_back = target(submission.outputs[0])
                gloo.recv(data, op.peer, 2 * op.tag + 1).wait()
                if copy_back is not None:
                    copy_back()

        def job() -> None:
            self._complete(submission, [announced.wait, payload], None)

        self._lanes.put(("recv", op.peer, op.tag), job)

    def _meet(self, tag: int) -> None:
        if not (self._own_sends[tag] and self._own_recvs[tag]):
            return
        send, recv = self._own_sends[tag].popleft(), self._own_recvs[tag].popleft()
        assert isinstance(send.op, Send)
        assert isinstance(recv.op, Recv)
        if not recv.op.takes(send.op):
            self._on_error(CollectiveMismatchError(send.work.seq, self._rank, str(send.op), self._rank, str(recv.op)))
            return
        with torch.no_grad():
            data, copy_back = target(recv.outputs[0])
            data.copy_(as_bytes(send.inputs[0]))
            if copy_back is not None:
                copy_back()
        send.work.settle()
        recv.work.settle()
