"""The messages of one rank to others: short ones leave with their data, long ones are offered (see ``p2p.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast, final

from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.endpoint import Endpoint
from asynccomm.backends.gloo.links import JOINED, MessageLink, copied, view
from asynccomm.backends.gloo.messages import HEADER_BYTES, OFFERED, SHORT, WINDOW, Header, Kind, impossible
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.ops import PeerOp, Send
from asynccomm.ops.dtypes import CODES

ROOM_SECONDS: Final = 5e-5  # to wait in a call of send for room in the socket: a rank that receives makes some

_core: Final[Any] = load("asynccomm.backends.gloo._frames")


@final
class Outbox:
    """The sends of one rank. All methods are called under the endpoint's lock.

    Args:
        sent: called with a submission when the socket has its data.
    """

    def __init__(self, endpoint: Endpoint, sent: Callable[[Submission], object]) -> None:
        self._endpoint = endpoint
        self._sent = sent
        self._numbers = 0
        self._unsent: dict[int, Submission] = {}  # long messages, by number, until the socket has their data
        self._offers: dict[int, tuple[bytes, Sequence[Tensor]]] = {}  # the heads and data of those not cleared yet
        self._window: dict[MessageLink, int] = {}  # bytes that may still be sent

    def send(self, link: MessageLink, submission: Submission) -> bool:
        """Send a message, or offer it; returns whether it has left, so that ``sent`` will not be called."""
        op = submission.op
        head = b""
        if isinstance(op, Send):
            tensors: Sequence[Tensor] = submission.inputs
            nbytes = op.nbytes
            header = Header(Kind.TENSOR, op.tag, 0, op.numel, CODES[op.dtype])
        else:
            parcel = submission.parcels[0]
            head, tensors = parcel
            payload = parcel.nbytes
            nbytes = len(head) + payload
            header = Header(Kind.PARCEL, cast(PeerOp, op).key, 0, len(head), payload)
        window = self._window.get(link, WINDOW) - HEADER_BYTES - nbytes
        plain = [arithmetic.resolved(tensor) for tensor in tensors if tensor.numel()]
        if nbytes <= SHORT and window >= 0:
            self._window[link] = window
            packed = header.pack() + head
            if nbytes > JOINED and len(plain) == 1:
                self._send_from(link, packed, plain[0])
            else:
                self._endpoint.send(link, b"".join([packed, *[copied(each, each.nbytes) for each in plain]]))
            return True
        self._numbers += 1
        self._unsent[self._numbers] = submission
        self._offers[self._numbers] = head, plain
        self._endpoint.send(link, header._replace(kind=header.kind + OFFERED, number=self._numbers).pack())
        return False

    def _send_from(self, link: MessageLink, packed: bytes, tensor: Tensor) -> None:
        """Send a short message from the memory of ``tensor``."""
        outcome: list[int] = []
        arguments = link.fd, packed, tensor.data_ptr(), tensor.nbytes, ROOM_SECONDS, outcome
        try:
            if self._endpoint.sink(link.peer) is not None and not isinstance(_core, CoreUnavailable):
                _core.send_message(*arguments)
        finally:  # also if a signal handler raises
            count = outcome[0] if outcome else 0
            if count < len(packed) + tensor.nbytes:
                self._endpoint.send(link, packed[count:], view(tensor)[max(0, count - len(packed)) :])

    def answered(self, link: MessageLink, header: Header) -> None:
        """Handle a header from the receiving rank. Raises: BackendError for one that no receiver writes."""
        if header.kind == Kind.CLEAR and header.number in self._offers:
            self._send_data(link, header.number)
        elif header.kind == Kind.TAKEN and 0 < header.first <= WINDOW - self._window.get(link, WINDOW):
            self._window[link] += header.first
        else:
            raise impossible(link.peer, header)

    def _send_data(self, link: MessageLink, number: int) -> None:
        """Send the data of an offered message."""
        head, tensors = self._offers.pop(number)
        held = [*tensors]

        def done() -> None:
            held.clear()  # kept until the socket has taken them
            submission = self._unsent.pop(number, None)
            if submission is not None:
                self._sent(submission)

        link.put(Header(Kind.DATA, number=number).pack(), head, *[view(tensor) for tensor in tensors], done=done)
        self._endpoint.flush(link)

    def unsent(self, peer: int) -> list[Submission]:
        """The messages to ``peer`` for which ``sent`` has still to be called."""
        return [submission for submission in self._unsent.values() if cast(PeerOp, submission.op).peer == peer]

    def clear(self) -> None:
        """Drop all messages; ``sent`` is not called any more."""
        self._unsent.clear()
        self._offers.clear()
