"""The life of a collective from submission to its end: order, frame, data.

gloo assumes that all ranks call the same collective. Nothing that depends on sizes is therefore handed to gloo before
it is certain that all ranks issued the same collective, or that the other ranks hand over nothing at that place.

- A collective without conflicts in flight (``hazard_tracker.py``) sends a **frame** (``frames.py``), in the order of
  issue, and they complete in that order, one at a time (``frame_exchange.py``). The collectives themselves are started
  in that order, too: gloo identifies the operations of a group by their order.
- A collective whose data fits into the frames completes with them. Other collectives of tensors become gloo operations
  (``lowering.py``, ``packing.py``), collectives of parcels become messages (``payload_collectives.py``).
- A backend on top of this one may **exchange** the frames of a kind of all_reduce that frames carry, without a
  submission for each: on the wire, and for predictions, an exchange is the same as the call.
- A collective that was **predicted** (``predictions.py``) is started at once, when all earlier calls are known to be
  the same on all ranks: a prediction follows from the earlier calls, so at that place all ranks hand over the same
  collective or nothing. It is done when its frames have arrived, too.
- A predicted collective that needs data from every rank, and more data than frames carry, has **no frame**: its end
  shows that all ranks have called it. A rank that calls a different collective instead sends a frame and raises an
  alarm (``alarms.py``). The other ranks then send a frame for that place, too: late, if they have started the predicted
  collective, otherwise when they call a collective there. A rank that has sent the frame of a later place need not: the
  frames differ anyway.
- If frames differ, the ranks exchange only descriptions of their calls afterwards (``disputes.py``).

A group that is destroyed on one of its own threads ends the process. Code that runs there therefore holds no group; it
reads the groups under a lock that ``close`` acquires before it drops them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.gloo.alarms import Alarms
from asynccomm.backends.gloo.carried import CarriedCall, CarriedMemory
from asynccomm.backends.gloo.disputes import Dispute
from asynccomm.backends.gloo.frame_exchange import FrameExchange
from asynccomm.backends.gloo.frames import CarriedReduce, Frame, complete, equal_part, heading_of, is_carried, parcel_of
from asynccomm.backends.gloo.groups import TransferGroups
from asynccomm.backends.gloo.hazard_tracker import HazardTracker
from asynccomm.backends.gloo.links import Buffer
from asynccomm.backends.gloo.lowering import OUT_OF_PLACE, start
from asynccomm.backends.gloo.p2p import SPIN_SECONDS, conclude
from asynccomm.backends.gloo.packing import chains_of, is_divided
from asynccomm.backends.gloo.payload_collectives import PayloadExchange
from asynccomm.backends.gloo.predictions import Predictor
from asynccomm.backends.gloo.staging import unpack
from asynccomm.backends.gloo.torch_gloo import GlooGroups
from asynccomm.backends.gloo.transfers import run
from asynccomm.backends.hazards import separated
from asynccomm.backends.latch import Latch
from asynccomm.backends.spinning import SHORT_WAIT_SECONDS, waited
from asynccomm.errors import BackendError
from asynccomm.ops import Parcels

Over = Callable[[], object]

_UNDESCRIBED: Final[Any] = None  # the submission of a collective that is described only for an error


@final
class _Started:
    """A collective in the order of issue.

    Attributes:
        place: number of earlier collectives of the group.
        over: settles the collective.
        announced: whether it has a frame.
        latch: waits for its frames and its data, if the data was handed to gloo ahead of the frames.
    """

    __slots__ = ("announced", "heading", "latch", "over", "place", "submission")

    def __init__(self, submission: Submission, over: Over, place: int, heading: bytes) -> None:
        self.submission = submission
        self.over = over
        self.place = place
        self.heading = heading
        self.announced = True
        self.latch: Latch | None = None


class BegunCall(NamedTuple):
    """A collective that ``GlooCollectives.carry_now`` has begun, at the time ``began`` of ``time.monotonic``."""

    began: float
    number: int
    started: _Started


@final
class GlooCollectives:
    """The collectives of one rank.

    Args:
        name: prefix of the threads' names.
        frame_exchange: sends frames to all ranks.
        exchange: moves parcels that are too long for a frame.
        failed: called with an error that breaks the comm, or with any exception from an operation.
        not_started: called with an exception from an operation that gloo has not accepted.
    """

    def __init__(
        self,
        gloos: GlooGroups,
        name: str,
        rank: int,
        size: int,
        frame_exchange: FrameExchange,
        exchange: PayloadExchange,
        failed: Callable[[Submission, Exception], object],
        not_started: Callable[[Submission, Exception], object],
    ) -> None:
        self._gloos: GlooGroups | None = gloos
        self._groups: TransferGroups | None = gloos.transfers
        self._name = name
        self._rank = rank
        self._size = size
        self._frame_exchange = frame_exchange
        self._exchange = exchange
        self._failed = failed
        self._not_started = not_started
        self._in_flight = HazardTracker(self._start, not_started)
        self._using = threading.RLock()  # held while a thread of gloo uses the groups
        self._ended = False
        self._disputed = False
        self._predictor = Predictor()
        self._waited = 0.0  # seconds that the last exchange has waited for other ranks
        self._alarms = Alarms(gloos.frames, name, rank, size, self._alarmed)
        self._order = threading.Lock()  # guards the fields below, and is held while a frame is handed to gloo
        self._places = 0  # number of collectives so far
        # collectives with a frame in flight, and behind them collectives without a frame
        self._queue: deque[_Started] = deque()
        self._without_frame: dict[int, Submission] = {}  # in flight, by place
        self._last_frame = -1  # the highest place with a frame
        self._alarms_ahead: set[int] = set()  # future places with an alarm from another rank

    def use(self, groups: TransferGroups) -> None:
        """Move data by ``groups``, from the first collective on."""
        self._groups = groups

    def submit(self, batch: Sequence[Submission]) -> None:
        """Start the collectives of a batch. Under the comm's lock."""
        alone = len(batch) == 1
        for at, submission in enumerate(batch):
            if not alone:
                submission.batch = batch, at
            try:
                self._in_flight.submit(submission)
            except RuntimeError as exc:  # the group is broken, and this call is the first to detect it
                self._not_started(submission, exc)

    def exchange(
        self, kind: CarriedReduce, tensor: Tensor, number: int, describe: Callable[[], Submission], over: Over
    ) -> bool:
        """Begin an all_reduce of ``tensor`` in place without a submission; False: it has to be submitted.

        Under the comm's lock. The caller keeps ``tensor`` alive, and submits no conflicting collective meanwhile.

        Args:
            number: of the call.
            describe: makes the submission, if it is needed for an error.
            over: called when the all_reduce is done, on any thread.
        """
        if not self._may_exchange():
            return False
        self._predictor.record(kind.heading, needs_every_rank=False)
        frame = Frame(self._rank, self._size)
        with self._order:
            started = self._next_place(kind.heading, over)
            frame.fill_with(tensor, started.place, number, kind.heading)
            self._queue.append(started)
            done = partial(self._exchanged, started, frame, kind, tensor, describe)
            self._frame_exchange.begin(frame, done)
        self._frame_exchange.settle()
        return True

    def carry_now(self, kind: CarriedCall, memory: CarriedMemory, number: int) -> BegunCall | bool:
        """Begin a collective that frames carry, and carry it out on this thread, if the other ranks call it soon.

        Conditions as of ``exchange``. No other thread may free ``memory`` meanwhile.

        Returns: True: it is done; False: nothing was done; otherwise the caller next calls ``go_on``, or
            ``go_on_alone``.
        """
        if self._queue or self._without_frame or not self._may_exchange():
            return False
        began = time.monotonic()
        seconds = SPIN_SECONDS if self._waited <= SHORT_WAIT_SECONDS else 0.0
        with self._order:
            equal = equal_part(self._places, number, kind.heading)
            done = self._frame_exchange.carry(kind, equal, memory, seconds)
            if done is None:
                return False
            self._predictor.record(kind.heading, needs_every_rank=False)
            started = self._next_place(kind.heading, _unset)
            if not done:
                self._queue.append(started)
        self._frame_exchange.settle_all()
        if done:
            self._waited = 0.0
            return True
        return BegunCall(began, number, started)

    def go_on(
        self,
        begun: BegunCall,
        kind: CarriedReduce,
        tensor: Tensor,
        describe: Callable[[], Submission],
        over: Over,
    ) -> None:
        """Go on with an all_reduce that ``carry_now`` has begun; the arguments are those of ``exchange``.

        Args:
            tensor: with the memory of ``carry_now``, which the caller may take from its own tensor from then on.
        """
        started = begun.started
        frame = Frame(self._rank, self._size)
        frame.fill_with(tensor, started.place, begun.number, kind.heading)
        started.over = partial(self._waited_for, begun.began, tensor.nbytes, over)
        self._frame_exchange.go_on(frame, partial(self._exchanged, started, frame, kind, tensor, describe))
        self._frame_exchange.settle()

    def go_on_alone(self, submission: Submission, begun: BegunCall) -> None:
        """Go on with the only collective in flight, which ``carry_now`` has begun for ``submission``."""
        started = begun.started
        started.submission = submission
        started.over = partial(
            self._waited_for, begun.began, submission.nbytes, self._in_flight.enter_alone(submission)
        )
        frame = Frame(self._rank, self._size)
        frame.fill(submission, started.place, started.heading)
        self._frame_exchange.go_on(frame, partial(self._announced, started, frame))
        self._frame_exchange.settle()

    @property
    def idle(self) -> bool:
        """Whether no collective is in flight or waits. Under the comm's lock."""
        return self._in_flight.idle

    def _waited_for(self, began: float, nbytes: int, over: Over) -> None:
        self._waited = waited(began, nbytes)
        over()

    def _may_exchange(self) -> bool:
        """Whether the next collective may be an exchange. Under the comm's lock."""
        prediction = self._predictor.predict()
        alarming = prediction is not None and prediction.needs_every_rank
        return not (alarming or self._ended or self._in_flight.holds_back)

    def _next_place(self, heading: bytes, over: Over) -> _Started:
        """Take the next place for an exchange. Under ``_order``."""
        started = _Started(_UNDESCRIBED, over, self._places, heading)
        self._places += 1
        self._alarms_ahead.discard(started.place)
        self._last_frame = started.place
        return started

    def _exchanged(
        self,
        started: _Started,
        frame: Frame,
        kind: CarriedReduce,
        tensor: Tensor,
        describe: Callable[[], Submission],
        error: Exception | None,
    ) -> None:
        """Handle the frames of all ranks, as ``_announced`` does."""
        if self._ended:
            return
        if error is not None or not kind.complete(tensor, frame):
            started.submission = describe()
            self._announced(started, frame, error)
            return
        self._leave_queue()
        started.over()

    def drain_before_failure(self, timeout: float) -> None:
        """Wait for collectives that have all their data, at most ``timeout`` seconds."""
        self._in_flight.drain_before_failure(timeout)

    @property
    def ended(self) -> bool:
        """Whether ``end`` was called."""
        return self._ended

    def end(self) -> None:
        """Start no more collectives: the comm is broken. From any thread, more than once."""
        self._ended = True
        self._in_flight.end()

    def close(self, timeout: float) -> None:
        """After ``end``: drop the groups once no collective is being started, in at most ``timeout`` seconds."""
        self._in_flight.join(timeout)  # the threads that may be starting collectives are gloo's own
        self._alarms.close(timeout)
        held = self._using.acquire(timeout=timeout)
        self._gloos = self._groups = None
        if held:
            self._using.release()

    def _start(self, submission: Submission, over: Over) -> None:
        """Start a collective; called in order, one at a time. Raises: RuntimeError if a group is broken."""
        assert self._gloos is not None, "started on a closed backend"
        heading = heading_of(submission)
        every_rank = self._size > 1 and submission.op.needs_every_rank and not is_carried(submission, self._size)
        prediction = self._predictor.predict()
        self._predictor.record(heading, every_rank)
        as_predicted = prediction is not None and prediction.heading == heading
        alarming = prediction is not None and prediction.needs_every_rank
        if alarming:
            self._alarms.listen()
        with self._order:
            started = _Started(submission, over, self._places, heading)
            self._places += 1
            first = not self._queue
            started.announced = not (as_predicted and alarming) or started.place in self._alarms_ahead
            self._alarms_ahead.discard(started.place)
            if not started.announced:
                self._without_frame[started.place] = submission
                if not first:
                    self._queue.append(started)
                    return
        if not started.announced:
            self._transfer(submission, partial(self._over_without_frame, started))
            return
        even = submission.op.sizes_known  # the heading contains all sizes
        if as_predicted and not alarming and even and first and self._predictor.is_long(heading):
            started.latch = Latch(2, lambda _: over())
            self._transfer(submission, started.latch)
        self._announce(started)
        if alarming and not as_predicted:
            self._alarms.tell(started.place)

    def _announce(self, started: _Started) -> None:
        """Send the frame of a collective."""
        frame = Frame(self._rank, self._size)
        frame.fill(started.submission, started.place, started.heading)
        with self._order:
            self._queue.append(started)
            self._last_frame = started.place
            self._frame_exchange.begin(frame, partial(self._announced, started, frame))
        self._frame_exchange.settle()

    def _alarmed(self, place: int) -> None:
        """Send a frame for ``place``, where another rank has called an unpredicted collective. On a thread."""
        with self._order:
            if self._gloos is None or self._ended:
                return
            if place >= self._places:
                self._alarms_ahead.add(place)
                return
            submission = self._without_frame.get(place)
            if submission is None or self._last_frame > place:
                return
            frame = Frame(self._rank, self._size)
            frame.fill(submission, place, heading_of(submission), contribute=False)
            self._last_frame = place
            self._frame_exchange.begin(frame, partial(self._announced_late, submission, frame))
        self._frame_exchange.settle()

    def _announced(self, started: _Started, frame: Frame, error: Exception | None) -> None:
        """Handle the frames of all ranks. In order, one at a time, on any thread."""
        submission = started.submission
        try:
            if self._ended:
                return
            if error is not None:
                raise error
            difference = frame.differing()
            given, balanced = frame.given()
            if difference is not None or not balanced:
                self._dispute(submission, difference)
                return
            submission.batch = None  # it refers to this submission, and to all tensors of the batch
            if given is not None:
                self._complete(submission, given)
            else:
                self._predictor.note_long(started.heading)
        except Exception as exc:
            self._failed(submission, exc)
            return
        if given is None and started.latch is None:
            self._go_on(submission, started.over)
        self._leave_queue()
        if started.latch is not None:
            started.latch()
        elif given is not None:
            started.over()

    def _announced_late(self, submission: Submission, frame: Frame, error: Exception | None) -> None:
        """Handle the frames that all ranks sent after an alarm: report the difference."""
        try:
            if self._ended:
                return
            if error is not None:
                raise error
            difference = frame.differing()
            if difference is None:
                raise BackendError(f"rank {self._rank} was told that others had not called {submission.op}")
            self._dispute(submission, difference)
        except Exception as exc:
            self._failed(submission, exc)

    def _leave_queue(self) -> None:
        """Remove the head of the queue, which is started, and start the collectives without a frame that follow."""
        while True:
            with self._order:
                self._queue.popleft()
                if self._ended or not self._queue or self._queue[0].announced:
                    return
                started = self._queue[0]
            self._go_on(started.submission, partial(self._over_without_frame, started))

    def _over_without_frame(self, started: _Started) -> None:
        with self._order:
            self._without_frame.pop(started.place, None)
        started.submission.batch = None
        started.over()

    def _go_on(self, submission: Submission, over: Over) -> None:
        """Start a collective that all ranks have called."""
        error: Exception | None = None
        with self._using:
            try:
                self._transfer(submission, over)
            except Exception as exc:
                error = exc.with_traceback(None)  # its frames hold the groups
        if error is not None:
            self._not_started(submission, error)

    def _dispute(self, submission: Submission, difference: tuple[int, tuple[int, int]] | None) -> None:
        """Find out how the calls of the ranks differ; ``difference`` None: in the sizes of an uneven all_to_all."""
        sides: tuple[int, int] | None = None
        if difference is not None:
            place, sides = difference
            submission = self._without_frame.get(place, submission)
        self._disputed = True
        self.end()
        with self._using:
            self._begin_dispute(submission, sides)

    def _begin_dispute(self, submission: Submission, sides: tuple[int, int] | None) -> None:
        gloos = self._gloos
        if gloos is not None:
            failed = partial(self._failed, submission)
            Dispute(gloos.frames, self._rank, self._size, submission, sides, failed).begin(f"{self._name}-dispute")

    def _transfer_failed(self, submission: Submission, exc: Exception) -> None:
        if not self._disputed:  # else the dispute reports the reason
            self._failed(submission, exc)

    def _complete(self, submission: Submission, given: Sequence[Buffer]) -> None:
        """Complete a collective with the data from the frames."""
        op = submission.op
        if not isinstance(op, Parcels):
            complete(submission, self._rank, given)
            return
        others = [rank for rank in range(self._size) if rank != self._rank and op.takes(self._rank)]
        parcels = {giver: parcel_of(giver, given[giver]) for giver in others if op.gives(giver)}
        delivery = Delivery(submission)
        lengths = {giver: len(payload) for giver, (_, payload) in parcels.items()}
        for giver, (head, payload) in parcels.items():
            tensors = delivery.accept(giver, head, lengths)
            if tensors is not None:
                unpack(payload, tensors)
        conclude(delivery, submission)

    def _transfer(self, submission: Submission, over: Over) -> None:
        """Hand the data of a collective to a group."""
        op, gloos, groups = submission.op, self._gloos, self._groups
        if gloos is None or groups is None:
            return
        if isinstance(op, Parcels):
            self._exchange.submit(gloos.small, op, submission, over)
            return
        fail = partial(self._transfer_failed, submission)
        buffers = separated(submission, self._rank, OUT_OF_PLACE)
        if is_divided(submission):
            lines = chains_of(groups, op, buffers, self._rank, self._size)
            run(lines, partial(_transferred, buffers.lands, over, fail), fail)
            return
        work, finish = start(groups.by_size(op.nbytes), op, buffers, self._size)
        steps = buffers.lands if finish is None else [finish, *buffers.lands]

        def done(future: Any) -> None:
            _transferred([future.value, *steps], over, fail)

        work.get_future().add_done_callback(done)


def _unset() -> None:
    raise AssertionError("an exchange has ended before it was known how to settle it")


def _transferred(steps: Sequence[Callable[[], object]], over: Over, fail: Callable[[Exception], object]) -> None:
    """Run the steps after gloo's operation; the first of them raises if gloo has failed."""
    try:
        for step in steps:
            step()
    except Exception as exc:
        fail(exc)
    else:
        over()
