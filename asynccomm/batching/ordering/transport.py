"""Agreed ordering over a backend: sends the messages of ``protocol``, and runs the decided operations.

Every rank sends its announcements to rank 0, which replies to all ranks with decisions. Both are parcels in a tag space
of their own, so they match no other message. The operations issued in one iteration of the event loop are announced in
one message, at the end of that iteration; further announcements wait while a message is being sent. Without new
operations no message is sent.

A closing rank sends a goodbye and waits at most ``GOODBYE_SECONDS`` for the reply, so that no receive stays posted
without a matching send. A rank that reads a goodbye later than ``ANSWER_SECONDS`` does not reply, as its peer may have
exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, final

from torch import Tensor

from asynccomm.backends.base import Backend, Submission
from asynccomm.batching.ordering.codec import Mismatch, OrderMessageError
from asynccomm.batching.ordering.protocol import Announcer, OrderCoordinator
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import Call, MessageSpace, Parcel, RecvParcel, SendParcel
from asynccomm.ops.signature import Signature
from asynccomm.ops.validation import CommInfo

BATCH_OPS: Final = 1024  # operations decided together; rarely more are ready at once
BATCH_BYTES: Final = 128 << 20
SELF: Final = BATCH_BYTES + 1  # the size of an operation that must be alone in its batch
GOODBYE_SECONDS: Final = 1.0  # wait for the reply; a rank that does not reply has failed or is busy
ANSWER_SECONDS: Final = 0.5  # a goodbye older than this gets no reply; the clocks of hosts may differ
_COORDINATOR: Final = 0
_TAG: Final = 2  # on the internal channel; backends use other tags
_NEWS, _GOODBYE = b"\0", b"\1"
_WHEN: Final = struct.Struct("<d")  # wall-clock time of sending, in seconds

Item = Sequence[Submission]  # the submissions of one call


@final
class OrderingSession:
    """One rank's part. Used on the event loop, except for ``issue`` and ``outstanding``.

    Args:
        backend: carries the messages.
        lock: the comm's lock, which guards every submission.
        run: called with the items of one batch; numbers and submits them.
        fail: called with an error that breaks the comm.
    """

    def __init__(
        self,
        group: CommInfo,
        mailbox: Mailbox,
        backend: Backend,
        lock: AbstractContextManager[object],
        run: Callable[[list[Item]], object],
        fail: Callable[[BrokenError], object],
    ) -> None:
        self._group = group
        self._mailbox = mailbox
        self._backend = backend
        self._lock = lock
        self._run = run
        self._fail = fail
        self._announcer: Announcer[Item] = Announcer()
        coordinates = group.rank == _COORDINATOR
        self._coordinator = OrderCoordinator(group.size, BATCH_OPS, BATCH_BYTES) if coordinates else None
        self._peers = [rank for rank in range(group.size) if rank != group.rank] if coordinates else [_COORDINATOR]
        self._listening = set(self._peers)  # peers that have not sent a goodbye
        self._greeted: set[int] = set()  # peers that this rank has sent a goodbye
        self._quiet = asyncio.Event()  # set when all goodbyes have arrived and all messages are sent, or at the end
        self._due = self._deciding = False  # an announcement, or a decision, is scheduled on the event loop
        self._sending: set[Work[Any]] = set()
        self._ended = False
        if group.size == 1:
            self._peers = []
            self._listening = set()
        for peer in self._peers:
            self._listen(peer)

    # -- issued operations --------------------------------------------------------------------------------------------

    def issue(self, tag: str, what: Signature, text: str, nbytes: int, item: Item) -> None:
        """Add the submissions of one call. From any thread, under the comm's lock."""
        self._announcer.issue(tag, what, text, nbytes, item)
        if not self._due:
            self._due = True
            self._mailbox.post(lambda: self._mailbox.loop.call_soon(self._speak))

    def outstanding(self, tag: str) -> int:
        """The number of operations under ``tag`` that this rank has issued and that are not decided."""
        return self._announcer.outstanding(tag)

    def _speak(self) -> None:
        self._due = False
        if self._ended or (self._sending and self._coordinator is None):
            return  # ``_sent`` calls this method again
        with self._lock:
            message = self._announcer.message()
        if message is None:
            return
        if self._coordinator is not None:
            try:
                self._consider(_COORDINATOR, message)
            except OrderMessageError as exc:  # this rank has issued too much
                self._garbled(_COORDINATOR, exc)
        elif _COORDINATOR in self._listening:
            self._send(_COORDINATOR, _NEWS + message)
        else:
            self._look_around()

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _consider(self, rank: int, message: bytes) -> None:
        """Add a rank's announcements. On the coordinator."""
        assert self._coordinator is not None
        self._coordinator.hear(rank, message)
        if not self._deciding:
            self._deciding = True
            self._mailbox.loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._deciding = False
        assert self._coordinator is not None
        if self._ended:
            return
        if (message := self._coordinator.message()) is not None:
            for peer in self._peers:
                if peer in self._listening:
                    self._send(peer, _NEWS + message)
            self._obey(message)
        self._look_around()

    def _obey(self, message: bytes) -> None:
        try:
            with self._lock:
                batches = self._announcer.hear(message)
        except Mismatch as exc:
            rank, op, other_rank, other_op = exc.rank, exc.text, exc.other_rank, exc.other_text
            self._fail(CollectiveMismatchError(UNNUMBERED, rank, op, other_rank, other_op))
            return
        for batch in batches:
            try:
                self._run(batch)
            except Exception as exc:  # no caller can get the error, and the other ranks have started the batch
                error = BackendError(f"the agreed operations cannot be submitted: {type(exc).__name__}: {exc}")
                error.__cause__ = exc
                self._fail(error)
                return

    def _heard(self, peer: int, message: bytes) -> None:
        try:
            if message[:1] == _GOODBYE:
                self._part(peer, message[1:])
                return
            if message[:1] != _NEWS:
                raise OrderMessageError("it is neither news nor a goodbye")
            if self._coordinator is not None:
                self._consider(peer, message[1:])
            else:
                self._obey(message[1:])
        except OrderMessageError as exc:
            self._garbled(peer, exc)
        else:
            if not self._ended:
                self._listen(peer)

    def _garbled(self, peer: int, exc: Exception) -> None:
        error = BackendError(f"rank {peer} sent an invalid message of agreed ordering: {exc}")
        error.__cause__ = exc
        self._fail(error)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _listen(self, peer: int) -> None:
        heads: deque[bytes] = deque()

        def place(source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
            heads.append(head)
            return ()

        def done(work: Work[Any]) -> None:
            error = work.take_error()
            if self._ended or isinstance(error, BrokenError):
                return  # the backend reported it to the comm
            if error is None:
                self._heard(peer, heads.popleft())
            else:
                self._garbled(peer, error)

        op = RecvParcel("agree", peer, _TAG, MessageSpace.INTERNAL)
        self._submit(Call(op, (), (), None, place=place), _nothing).add_done_callback(done)

    def _send(self, peer: int, message: bytes) -> None:
        op = SendParcel("agree", peer, _TAG, MessageSpace.INTERNAL)
        work = self._submit(Call(op, (), (), None, parcels=(Parcel(message, ()),)), Work.take_error)
        if not work.done():
            self._sending.add(work)
            work.add_done_callback(self._sent)

    def _sent(self, work: Work[Any]) -> None:
        self._sending.discard(work)
        if self._coordinator is None and not self._due:
            self._speak()
        self._look_around()

    def _submit(self, call: Call, settled: Callable[[Work[Any]], object]) -> Work[Any]:
        work: Work[Any] = Work(
            call.op, 0, self._mailbox, value=None, timeout=math.inf, on_settled=settled, driver=self._backend
        )
        with self._lock:
            self._backend.submit((Submission(call, work),))
        return work

    # -- ending -------------------------------------------------------------------------------------------------------

    def _bid_goodbye(self, peer: int) -> None:
        if peer not in self._greeted and not self._ended:
            self._greeted.add(peer)
            self._send(peer, _GOODBYE + _WHEN.pack(time.time()))

    def _part(self, peer: int, when: bytes) -> None:
        """Handle the goodbye of ``peer``."""
        if len(when) != _WHEN.size:
            raise OrderMessageError("a goodbye does not say when")
        self._listening.discard(peer)
        if abs(time.time() - _WHEN.unpack(when)[0]) < ANSWER_SECONDS:
            self._bid_goodbye(peer)
        self._look_around()

    def _look_around(self) -> None:
        """Fail operations that can no longer be decided because a rank has left."""
        if self._ended or len(self._listening) == len(self._peers):
            return
        if not self._listening and not self._sending:
            self._quiet.set()
        left = self._announcer if self._coordinator is None else self._coordinator
        with self._lock:
            text = left.undecided
        if text is not None:
            gone = next(peer for peer in self._peers if peer not in self._listening)
            self._fail(BackendError(f"rank {gone} has closed the comm and takes no part in {text}"))

    async def aclose(self) -> None:
        """Exchange goodbyes with the peers. Called when no operation is undecided here."""
        if self._ended or not self._peers:
            return
        for peer in self._peers:
            if peer in self._listening:
                self._bid_goodbye(peer)
        self._look_around()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._quiet.wait()
        self.end()

    def end(self) -> None:
        """Send and receive no more messages. From any thread."""
        self._ended = True
        self._mailbox.post(self._quiet.set)


def _nothing(work: Work[Any]) -> None:
    pass
