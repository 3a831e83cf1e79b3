"""Send and receive over gloo.

gloo matches messages by peer and tag, in order, but trusts both sides on the size: a shorter message silently fills a
part of the tensor, a longer one ends the process. Each message therefore has a header with its number of elements and
its dtype. A short payload follows in the same message; a long one follows under a second tag, and is received only if
it fits. A payload that does not fit raises an error with both descriptions. Parcels describe themselves
(``payloads.py``); they have separate tags.

Messages from a rank to itself never reach gloo, which has no such connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.gloo.payloads import InboundParcel, OutboundParcel
from asynccomm.backends.gloo.staging import place, room, unpack
from asynccomm.backends.gloo.torch_gloo import GlooGroup
from asynccomm.backends.matching import MatchQueues
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.backends.regions import bytes_of
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import MessageSpace, PeerOp, PeerParcel, Recv, Send
from asynccomm.ops.dtypes import BY_CODE, CODES

HEADER = 16  # bytes: number of elements, and dtype
SHORT = 4096  # bytes of payload that travel in the header's message, which saves a round trip


def _message(op: Send, data: Tensor) -> Tensor:
    """The header, followed by the payload if it is short."""
    header = torch.tensor([op.numel, CODES[op.dtype]], device="cpu").view(torch.uint8)
    return torch.cat([header, data]) if data.numel() <= SHORT else header


@final
class PointToPoint:
    """Sends and receives of one rank.

    Args:
        lanes: for messages of users.
        internal: for messages between the ranks themselves; neither kind of message may delay the other.
        complete: runs the steps that end an operation, settles it, and reports exceptions; called on a lane.
        on_error: called with a mismatch.
    """

    def __init__(
        self,
        rank: int,
        lanes: OrderedExecutor,
        internal: OrderedExecutor,
        complete: Callable[[Submission, Sequence[Callable[[], object]]], None],
        on_error: Callable[[BrokenError], object],
    ) -> None:
        self._rank = rank
        self._lanes = lanes
        self._internal = internal
        self._complete = complete
        self._on_error = on_error
        self._own: MatchQueues[Submission, Submission] = MatchQueues(1)  # from this rank to itself, its only source

    def submit(self, gloo: GlooGroup, submission: Submission) -> None:
        """Start a send or receive. Under the comm's lock."""
        op = submission.op
        assert isinstance(op, PeerOp)
        assert op.peer is not None, "gloo has no receive from any source that tells the sender"
        if op.peer == self._rank:
            self._to_self(op, submission)
        elif isinstance(op, Send):
            self._send(gloo, op, submission)
        elif isinstance(op, Recv):
            self._recv(gloo, op, op.peer, submission)
        elif op.is_send:
            self._send_parcel(gloo, op.peer, op.key, submission)
        else:
            self._recv_parcel(gloo, op.peer, op.key, submission)

    def drop(self) -> None:
        """Drop the messages from this rank to itself."""
        self._own.clear()

    def _send(self, gloo: GlooGroup, op: Send, submission: Submission) -> None:
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

    def _recv(self, gloo: GlooGroup, op: Recv, peer: int, submission: Submission) -> None:
        # zeros: a message that is too short leaves the rest unchanged, and old memory must not be parsed
        message = torch.zeros(HEADER + SHORT, dtype=torch.uint8, device="cpu")
        arrival = gloo.recv(message, peer, 2 * op.tag)

        def take_payload() -> None:
            numel, code = message[:HEADER].view(torch.int64).tolist()
            if code not in BY_CODE or numel < 0:
                what = f"{numel} elements of a dtype unknown here (code {code:#x})"
                raise BackendError(f"rank {peer} sent what is no message for {op}: {what}")
            sent = Send(BY_CODE[code], numel, self._rank, op.tag)
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

    def _send_parcel(self, gloo: GlooGroup, peer: int, key: int, submission: Submission) -> None:
        parcel = OutboundParcel(submission.parcels[0])
        staged = [parcel]  # gloo reads it until then
        steps = parcel.send(gloo, peer, key)

        def job() -> None:
            self._complete(submission, steps)
            staged.clear()

        self._lanes_of(key).put(("send", peer, key), job)

    def _recv_parcel(self, gloo: GlooGroup, peer: int, key: int, submission: Submission) -> None:
        parcel = InboundParcel(gloo, peer, key)

        def take() -> None:
            parcel.read()
            delivery = Delivery(submission)
            parcel.take(delivery.accept(peer, parcel.head, {peer: parcel.nbytes}))
            submission.work.source = peer
            conclude(delivery, submission)

        self._lanes_of(key).put(("recv", peer, key), partial(self._complete, submission, [take]))

    def _lanes_of(self, key: int) -> OrderedExecutor:
        return self._internal if key >= MessageSpace.INTERNAL.key(0) else self._lanes

    def _to_self(self, op: PeerOp, submission: Submission) -> None:
        if op.is_send:
            receive = self._own.claim(0, op.key)
            if receive is None:
                self._own.keep(submission, 0, op.key)
            else:
                self._meet(submission, receive)
        else:
            found = self._own.post(submission, 0, op.key)
            if found is not None:
                self._meet(found[1], submission)

    def _meet(self, send: Submission, recv: Submission) -> None:
        if isinstance(recv.op, PeerParcel):
            self._complete(recv, [partial(self._hand_over, send, recv)])
        else:
            assert isinstance(send.op, Send)
            assert isinstance(recv.op, Recv)
            if not recv.op.takes(send.op):
                sides = self._rank, str(send.op), self._rank, str(recv.op)
                self._on_error(CollectiveMismatchError(send.work.seq, *sides))
                return
            unpack(bytes_of(send.inputs[0]), recv.outputs)  # one side may be complex, the other real
            recv.work.source = self._rank
            recv.work.settle()
        send.work.settle()

    def _hand_over(self, send: Submission, recv: Submission) -> None:
        parcel = send.parcels[0]
        delivery = Delivery(recv)
        tensors = delivery.accept(self._rank, parcel.head, {self._rank: parcel.nbytes})
        if tensors is not None:
            unpack(torch.cat([bytes_of(tensor) for tensor in parcel.tensors] or [room(0)]), tensors)
        recv.work.source = self._rank
        conclude(delivery, recv)


def conclude(delivery: Delivery, submission: Submission) -> None:
    """Finish a complete delivery. Raises an error that breaks the comm; ``submission`` keeps any other error."""
    delivery.finish()
    if isinstance(delivery.error, BrokenError):
        raise delivery.error
    submission.error = delivery.error
