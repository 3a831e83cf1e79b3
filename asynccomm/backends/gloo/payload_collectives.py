"""Collectives of parcels, made of messages between the ranks.

In the call, every sending rank starts its sends, and every receiving rank posts the receives of the headers. gloo's
order of messages between two ranks thus keeps the collectives in order, and no rank waits for another in the call. One
lane does the rest, collective by collective: it waits for all heads first, as each receiving rank needs all lengths,
then for the payloads, and last for this rank's own sends: receiving depends only on the others' calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.gloo.p2p import conclude
from asynccomm.backends.gloo.payloads import InboundParcel, OutboundParcel
from asynccomm.backends.gloo.torch_gloo import GlooGroup
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops import MessageSpace, Parcels

_KEY = MessageSpace.INTERNAL.key(0)


@final
class PayloadExchange:
    """The collectives of parcels of one rank.

    Args:
        lane: runs one job at a time.
        complete: runs the steps that end an operation, then the function that settles it, and reports exceptions;
            called on the lane.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        lane: OrderedExecutor,
        complete: Callable[[Submission, Sequence[Callable[[], object]], Callable[[], object]], None],
    ) -> None:
        self._rank = rank
        # the next rank first, so that at any time each rank sends to a different one
        self._others = [(rank + i) % size for i in range(1, size)]
        self._lane = lane
        self._complete = complete

    def submit(self, gloo: GlooGroup, op: Parcels, submission: Submission, over: Callable[[], object]) -> None:
        """Start a collective, in the same order on all ranks; ``over`` settles the submission."""
        givers = [rank for rank in self._others if op.takes(self._rank) and op.gives(rank)]
        takers = [rank for rank in reversed(self._others) if op.gives(self._rank) and op.takes(rank)]
        coming = {giver: InboundParcel(gloo, giver, _KEY) for giver in givers}
        delivery = Delivery(submission)
        sent: list[OutboundParcel] = []  # gloo reads them until the end
        steps: list[Callable[[], object]] = []
        for taker in takers:
            if not op.shared or not sent:
                seq = submission.work.seq
                sent.append(
                    OutboundParcel(submission.parcels[0 if op.shared else taker], _code(op, seq), f"#{seq} {op}")
                )
            steps += sent[-1].send(gloo, taker, _KEY)
        if coming:
            reception = _Receive(op, self._rank, coming, submission, delivery)
            steps = [reception.receive, *steps]
        if not steps:
            delivery.finish()
            over()
            return
        steps.append(partial(conclude, delivery, submission))

        def job() -> None:
            self._complete(submission, steps, over)
            sent.clear()

        self._lane.put("parcels", job)


@final
class _Receive:
    """The parcels that this rank receives in one collective."""

    def __init__(
        self, op: Parcels, rank: int, coming: dict[int, InboundParcel], submission: Submission, delivery: Delivery
    ) -> None:
        self._op = op
        self._rank = rank
        self._coming = coming
        self._submission = submission
        self._delivery = delivery

    def receive(self) -> None:
        """Receive all parcels."""
        coming, delivery = self._coming, self._delivery
        for giver, parcel in coming.items():
            parcel.read(partial(self._check, giver))
        lengths = {giver: coming[giver].nbytes for giver in sorted(coming)}
        tensors = {giver: delivery.accept(giver, coming[giver].head, lengths) for giver in lengths}
        for giver, parcel in coming.items():
            parcel.take(tensors[giver])

    def _check(self, giver: int, code: int, text: str) -> None:
        seq = self._submission.work.seq
        if code != _code(self._op, seq):
            number, _, theirs = text.partition(" ")
            if number != f"#{seq}":
                theirs += f" as operation {number}"
            raise CollectiveMismatchError(seq, giver, theirs, self._rank, str(self._op))


def _code(op: Parcels, seq: int) -> int:
    return zlib.crc32(repr((seq, op.method, op.shared, op.giver, op.taker)).encode())
