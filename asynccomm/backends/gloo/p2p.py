"""Send and receive over gloo.

gloo matches messages by peer and tag, in order, but trusts both sides to know the size: a shorter message fills half
of the tensor in silence, a longer one ends the process. So each message has a header that says how many elements of
which dtype it brings. A short payload comes with it; a long one follows under a tag of its own, and is received only if
it fits. What does not fit fails with both descriptions.

Messages to oneself never reach gloo, which has no connection to itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.lanes import Lanes
from asynccomm.backends.gloo.lowering import place
from asynccomm.backends.gloo.torch_gloo import Gloo
from asynccomm.backends.matching import Matching
from asynccomm.errors import BrokenError, CollectiveMismatchError
from asynccomm.ops import Recv, Send

__all__ = ["PointToPoint"]

_DTYPES = {zlib.crc32(str(d).encode()): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


HEADER = 16  # bytes: how many elements, of which dtype
SHORT = 4096  # bytes of payload that travel in the header's message, which saves a round trip


def _message(op: Send, data: Tensor) -> Tensor:
    """The header, and behind it the payload if that is short."""
    header = torch.tensor([op.numel, zlib.crc32(str(op.dtype).encode())], device="cpu").view(torch.uint8)
    return torch.cat([header, data]) if data.numel() <= SHORT else header


@final
class PointToPoint:
    """Sends and receives of one rank.

    Args:
        complete: runs the steps that end an operation, settles it, and reports what goes wrong; called on a lane.
        on_error: where a mismatch goes.
    """

    def __init__(
        self,
        rank: int,
        lanes: Lanes,
        complete: Callable[[Submission, Sequence[Callable[[], object]]], None],
        on_error: Callable[[BrokenError], object],
    ) -> None:
        self._rank = rank
        self._lanes = lanes
        self._complete = complete
        self._on_error = on_error
        self._own: Matching[Submission, Submission] = Matching(1)  # from this rank to itself, its only source

    def submit(self, gloo: Gloo, submission: Submission) -> None:
        """Start a send or receive. Under the comm's lock."""
        op = submission.op
        if isinstance(op, Send):
            if op.peer == self._rank:
                receive = self._own.claim(0, op.tag)
                if receive is None:
                    self._own.keep(submission, 0, op.tag)
                else:
                    self._meet(submission, receive)
            else:
                self._send(gloo, op, submission)
        else:
            assert isinstance(op, Recv)
            assert op.peer is not None, "gloo has no receive from any source that tells the sender"
            if op.peer == self._rank:
                found = self._own.post(submission, 0, op.tag)
                if found is not None:
                    self._meet(found[1], submission)
            else:
                self._recv(gloo, op, op.peer, submission)

    def drop(self) -> None:
        """Let go of what this rank has sent itself."""
        self._own.clear()

    def _send(self, gloo: Gloo, op: Send, submission: Submission) -> None:
        data = arithmetic.resolved(submission.inputs[0]).view(torch.uint8)
        message = _message(op, data)
        steps = [gloo.send(message, op.peer, 2 * op.tag).wait]
        if data.numel() > SHORT:
            steps.append(gloo.send(data, op.peer, 2 * op.tag + 1).wait)

        def job() -> None:
            self._complete(submission, steps)
            staged.clear()

        staged = [message, data]  # gloo reads them until then
        self._lanes.put(("send", op.peer, op.tag), job)

    def _recv(self, gloo: Gloo, op: Recv, peer: int, submission: Submission) -> None:
        message = torch.empty(HEADER + SHORT, dtype=torch.uint8, device="cpu")
        arrival = gloo.recv(message, peer, 2 * op.tag)

        def take_payload() -> None:
            numel, code = message[:HEADER].view(torch.int64).tolist()
            sent = Send(_DTYPES.get(code, torch.uint8), numel, self._rank, op.tag)
            if not op.takes(sent):
                raise CollectiveMismatchError(submission.work.seq, peer, str(sent), self._rank, str(op))
            values, copy_back = place(submission.outputs[0])
            data = values.view(torch.uint8)
            if data.numel() <= SHORT:
                data.copy_(message[HEADER : HEADER + data.numel()])
            else:
                gloo.recv(data, peer, 2 * op.tag + 1).wait()
            if copy_back is not None:
                copy_back()
            submission.work.source = peer

        self._lanes.put(("recv", peer, op.tag), partial(self._complete, submission, [arrival.wait, take_payload]))

    def _meet(self, send: Submission, recv: Submission) -> None:
        assert isinstance(send.op, Send)
        assert isinstance(recv.op, Recv)
        if not recv.op.takes(send.op):
            self._on_error(CollectiveMismatchError(send.work.seq, self._rank, str(send.op), self._rank, str(recv.op)))
            return
        recv.outputs[0].detach().copy_(send.inputs[0].detach().reshape(recv.outputs[0].shape))
        recv.work.source = self._rank
        send.work.settle()
        recv.work.settle()
