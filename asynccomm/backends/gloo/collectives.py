"""Collectives from their submission to their end: order, frame, and what follows it.

Each collective that nothing under way conflicts with (``in_flight.py``) sends a frame, in the order of issue. Frames go
through a gloo group of their own, with one thread, so they come back in that order, one at a time. In that order the
operation itself is then started on the other groups: gloo tells the operations of a group apart by their order, which
would be another on each rank if frames and data shared a group. So nothing that depends on sizes is handed to gloo
before all ranks have said that they mean the same, or will say so: a collective that all ranks expect next
(``ahead.py``) is started at once, and is over when its frames are here, too.

- What fits in the frames is complete with them: a short collective, and every barrier.
- A collective of tensors becomes operations of gloo's (``lowering.py``, ``several.py``), one of parcels messages
  (``exchange.py``).
- Where frames differ nothing follows them but the descriptions (``disputes.py``), on the group for large transfers:
  what was started ahead of its frames may block the group for small ones.

A group that ends on a thread of its own ends the process. So what runs there holds none, but looks it up, under a lock
that closing takes before it lets go of the groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch

from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.gloo.ahead import Ahead, Expected
from asynccomm.backends.gloo.disputes import Dispute
from asynccomm.backends.gloo.exchange import Exchange
from asynccomm.backends.gloo.frames import Frame, complete
from asynccomm.backends.gloo.in_flight import InFlight
from asynccomm.backends.gloo.lowering import OUT_OF_PLACE, start
from asynccomm.backends.gloo.p2p import conclude
from asynccomm.backends.gloo.several import are_small, is_divided, lines_of
from asynccomm.backends.gloo.staging import unpack
from asynccomm.backends.gloo.torch_gloo import Gloos
from asynccomm.backends.gloo.transfers import run
from asynccomm.backends.hazards import separated
from asynccomm.ops import Parcels

__all__ = ["Collectives"]

Over = Callable[[], object]


@final
class Collectives:
    """Those of one rank.

    Args:
        exchange: moves parcels that are too long for a frame.
        failed: takes what ends the comm: an error of ours, or whatever has gone wrong in an operation.
        not_started: takes what has gone wrong before gloo had the operation.
    """

    def __init__(
        self,
        gloos: Gloos,
        rank: int,
        size: int,
        exchange: Exchange,
        failed: Callable[[Submission, Exception], object],
        not_started: Callable[[Submission, Exception], object],
    ) -> None:
        self._gloos: Gloos | None = gloos
        self._rank = rank
        self._size = size
        self._exchange = exchange
        self._failed = failed
        self._not_started = not_started
        self._in_flight = InFlight(self._announce, not_started)
        self._using = threading.RLock()  # held while a thread of gloo's uses the groups
        self._ended = False
        self._frames: list[Frame] = []  # that nothing uses
        self._announcing = 0  # collectives whose frames are under way, or which have not been started after them
        self._counting = threading.Lock()
        self._expected = Expected()

    def submit(self, batch: Sequence[Submission]) -> None:
        """Start the collectives of a batch. Under the comm's lock."""
        alone = len(batch) == 1
        for at, submission in enumerate(batch):
            if not alone:
                submission.batch = batch, at
            try:
                self._in_flight.submit(submission)
            except RuntimeError as exc:  # the group died, and this call is the first to see it
                self._not_started(submission, exc)

    def catch_up(self, timeout: float) -> None:
        """Wait for what may be done with what the ranks have sent, at most ``timeout`` seconds."""
        self._in_flight.catch_up(timeout)

    def end(self) -> None:
        """The comm is broken: start nothing any more. From any thread, more than once."""
        self._ended = True
        self._in_flight.end()

    def close(self, timeout: float) -> None:
        """After ``end``: let go of the groups once nothing is being started, in at most ``timeout`` seconds."""
        self._in_flight.join(timeout)  # the threads that may be starting something are gloo's own
        held = self._using.acquire(timeout=timeout)
        self._gloos = None
        if held:
            self._using.release()

    def _announce(self, submission: Submission, over: Over) -> None:
        gloos = self._gloos
        assert gloos is not None, "started on a closed backend"
        frame = self._frames.pop() if self._frames else Frame(self._rank, self._size)
        frame.fill(submission)
        heading = frame.heading
        expected = self._expected.called(heading)
        with self._counting:
            first = not self._announcing
            self._announcing += 1
        ahead: Ahead | None = None
        if expected and first and self._expected.moved(heading) and are_small(submission):
            ahead = Ahead(over, partial(self._failed, submission))
            self._transfer(submission, ahead.done, ahead.failed)
        work = gloos.frames.all_to_all_single(frame.all, frame.copies)
        work.get_future().add_done_callback(partial(self._announced, frame, submission, ahead, over))

    def _announced(
        self,
        frame: Frame,
        submission: Submission,
        ahead: Ahead | None,
        over: Over,
        future: torch.futures.Future[object],
    ) -> None:
        """All frames are here. In order, one at a time: on the thread of their group, or on that which starts them."""
        try:
            future.value()
            if self._ended:
                return
            sides = frame.differing()
            given, balanced = frame.given()
            if sides is not None or not balanced:
                if ahead is not None:
                    ahead.disputed()
                self.end()
                Dispute(self._gather, submission, self._size, sides, partial(self._failed, submission)).begin()
                return
            submission.batch = None  # which refers to this, and to the tensors of others
            if given is not None:
                self._complete(submission, frame, given)
            else:
                self._expected.moves(frame.heading)
            self._frames.append(frame)
        except Exception as exc:
            self._failed(submission, exc)
            return
        if given is None and ahead is None:
            self._go_on(submission, over)
        with self._counting:
            self._announcing -= 1
        if ahead is not None:
            ahead.done()
        elif given is not None:
            over()

    def _gather(self, output: torch.Tensor, input: torch.Tensor) -> Any:
        with self._using:
            if self._gloos is None:
                raise RuntimeError("the groups of gloo are closed")
            return self._gloos.large.all_gather_single(output, input)

    def _go_on(self, submission: Submission, over: Over) -> None:
        """Start what the ranks have agreed on."""
        error: Exception | None = None
        with self._using:
            try:
                self._transfer(submission, over, partial(self._failed, submission))
            except Exception as exc:
                error = exc.with_traceback(None)  # its frames hold the groups
        if error is not None:
            self._not_started(submission, error)

    def _complete(self, submission: Submission, frame: Frame, given: Sequence[torch.Tensor]) -> None:
        """Do what the frames were enough for."""
        op = submission.op
        if not isinstance(op, Parcels):
            complete(submission, self._rank, given)
            return
        others = [rank for rank in range(self._size) if rank != self._rank and op.takes(self._rank)]
        parcels = {giver: frame.parcel(giver, given[giver]) for giver in others if op.gives(giver)}
        delivery = Delivery(submission)
        lengths = {giver: len(payload) for giver, (_, payload) in parcels.items()}
        for giver, (head, payload) in parcels.items():
            tensors = delivery.accept(giver, head, lengths)
            if tensors is not None:
                unpack(payload, tensors)
        conclude(delivery, submission)

    def _transfer(self, submission: Submission, over: Over, fail: Callable[[Exception], object]) -> None:
        op, gloos = submission.op, self._gloos
        if gloos is None:
            return
        if isinstance(op, Parcels):
            self._exchange.submit(gloos.small, op, submission, over)
            return
        buffers = separated(submission, self._rank, OUT_OF_PLACE)
        if is_divided(submission):
            lines = lines_of(gloos, op, buffers, self._rank, self._size)
            run(lines, partial(_transferred, buffers.lands, over, fail), fail)
            return
        work, finish = start(gloos.by_size(op.nbytes), op, buffers, self._size)
        steps = buffers.lands if finish is None else [finish, *buffers.lands]

        def done(future: torch.futures.Future[object]) -> None:
            _transferred([future.value, *steps], over, fail)

        work.get_future().add_done_callback(done)


def _transferred(steps: Sequence[Callable[[], object]], over: Over, fail: Callable[[Exception], object]) -> None:
    """gloo is done: take the last steps, of which the first raises if gloo has failed."""
    try:
        for step in steps:
            step()
    except Exception as exc:
        fail(exc)
    else:
        over()
