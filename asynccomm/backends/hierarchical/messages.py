"""Messages of ranks on several hosts: through the host's shared memory or over the network, as the peer is placed.

A receive from any source is posted on both ways, and has one message (``backends/claims.py``). A message from one rank
always takes the same way, and both ways get the receives in the order of the calls. The order is
therefore that of a single queue: a rank's messages of one tag come in order, and the oldest receive that fits gets the
message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

from torch import Tensor

from asynccomm.backends.base import Backend, Submission
from asynccomm.backends.claims import Claim
from asynccomm.backends.gloo.backend import GlooBackend
from asynccomm.backends.hierarchical.pipeline import Pipeline
from asynccomm.backends.hierarchical.placement import HostPlacement
from asynccomm.backends.shm.backend import ShmBackend
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.ops import Call, PeerOp


@final
class PlacedMessages:
    """The sends and receives of one rank.

    Args:
        inside: leads to the ranks of this host; None: there are no others.
        between: leads to all ranks; None: all are on this host.
        pipeline: of collectives, which use ``inside``, too.
    """

    def __init__(
        self,
        placement: HostPlacement,
        inside: ShmBackend | None,
        between: GlooBackend | None,
        pipeline: Pipeline,
        mailbox: Mailbox,
    ) -> None:
        self._placement = placement
        self._inside, self._between = inside, between
        self._pipeline = pipeline
        self._mailbox = mailbox
        self._works: dict[Work[Any], Work[Any]] = {}  # those of ``inside``, by the Work that the comm has made
        self._inside_first = False  # of the next receive from any source: both ways have their turn

    def submit(self, submission: Submission, op: PeerOp) -> None:
        """Start a send or receive. Under the comm's lock."""
        inside = self._inside
        assert self._between is not None
        if inside is None:
            self._between.submit((submission,))
        elif op.peer is None:
            self._receive_from_any(submission, inside, self._between)
        elif self._placement.is_local(op.peer):
            self._submit_inside(inside, self._numbered_inside(submission, self._placement.position_of(op.peer)))
        else:
            self._between.submit((submission,))

    def before_await(self, work: Work[Any]) -> None:
        """See ``Backend.before_await``."""
        backend, message = self._way_of(work)
        backend.before_await(message)

    def before_block(self, work: Work[Any]) -> None:
        """See ``Backend.before_block``."""
        backend, message = self._way_of(work)
        backend.before_block(message)

    def _way_of(self, work: Work[Any]) -> tuple[Backend, Work[Any]]:
        """The backend that is to be helped with a message, and the Work that it knows."""
        message = self._works.get(work)
        if message is not None and self._inside is not None:
            return self._inside, message
        assert self._between is not None
        return self._between, work

    def _submit_inside(self, inside: ShmBackend, submission: Submission) -> None:
        self._pipeline.call(partial(inside.submit, (submission,)))

    def _receive_from_any(self, outer: Submission, inside: ShmBackend, between: GlooBackend) -> None:
        def settled(work: Work[Any]) -> None:
            inside.withdraw(here)
            self._settle(outer, work, work.source)

        here = self._numbered_inside(outer, None, lambda: between.withdraw(there))
        there = self._copy(outer, outer.op, outer.place, settled)
        here.claim = there.claim = Claim(2)
        self._inside_first = not self._inside_first
        if self._inside_first:
            self._submit_inside(inside, here)
        between.submit((there,))
        if not self._inside_first:
            self._submit_inside(inside, here)

    def _numbered_inside(
        self, outer: Submission, peer: int | None, claimed: Callable[[], object] = lambda: None
    ) -> Submission:
        """A copy of ``outer`` with the numbers that the ranks have on this host.

        Args:
            claimed: called at its end if it had to take a claim, and has it.
        """
        local = self._placement.local

        def place(source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
            assert outer.place is not None
            return outer.place(local[source], head, {local[rank]: n for rank, n in lengths.items()})

        def settled(work: Work[Any]) -> None:
            self._works.pop(outer.work, None)
            if submission.claim is not None:
                if submission.claim.winner is not submission:
                    return  # the message has come, or will come, over the network
                claimed()
            self._settle(outer, work, None if work.source is None else local[work.source])

        op: Any = outer.op
        submission = self._copy(outer, replace(op, peer=peer), None if outer.place is None else place, settled)
        self._works[outer.work] = submission.work
        return submission

    def _settle(self, outer: Submission, work: Work[Any], source: int | None) -> None:
        outer.work.source = source
        outer.work.settle(work.take_error())

    def _copy(self, outer: Submission, op: Any, place: Any, settled: Any) -> Submission:
        work: Work[Any] = Work(op, outer.work.seq, self._mailbox, value=None, timeout=math.inf, on_settled=settled)
        call = Call(
            op,
            outer.inputs,
            outer.outputs,
            None,
            parcels=outer.parcels,
            place=place,
            begin=outer.begin,
            keep=outer.keep,
            copies=outer.copies,
        )
        copy = Submission(call, work, detached=True)
        copy.nbytes = outer.nbytes
        return copy
