"""Windows over gloo: requests to the target, which a thread of its backend serves.

Each rank has a thread for each other rank, from its first window on. The thread receives that rank's requests one after
the other and carries them out, also while the event loop is blocked. A request is one message of 64 bytes, with a short
payload in it. A long payload follows under another tag, and is received in its place. Replies to ``get`` and ``fence``
come in the order of the requests, so the requesting rank posts their receives in that order.

A short request is on its way, and its operation done, when the call returns.

A closing rank sends a request that ends the other side's thread.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple, Self, final

import torch
from torch import Tensor

from asynccomm.backends.base import BackendWindow, Submission
from asynccomm.backends.gloo.staging import place, room
from asynccomm.backends.gloo.torch_gloo import GlooGroup
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.backends.regions import bytes_of
from asynccomm.backends.windows import LocalPart, ServedPart
from asynccomm.errors import AsyncCommError, BackendError, BrokenError
from asynccomm.ops import (
    WindowAccumulate,
    WindowFence,
    WindowGet,
    WindowInfo,
    WindowOp,
    WindowSignal,
    WindowTransfer,
    WindowWait,
)
from asynccomm.ops.dtypes import BY_CODE, CODES
from asynccomm.ops.validation import CommInfo

REQUEST_TAG: Final = 2**31 - 4  # these are above the tags of messages, and below those in ``torch_gloo``
PAYLOAD_TAG: Final = 2**31 - 5
REPLY_TAG: Final = 2**31 - 6
SHORT: Final = 4096  # bytes of payload that travel in the request
MOST_SENT: Final = 64  # short requests to a rank, until an operation waits for all of them: else they would pile up
AHEAD: Final = 4  # receives of requests that wait: a signal mostly follows its put, and needs no wake-up of its own
ACK_BYTES: Final = 1
CLOSE_SECONDS: Final = 0.2  # for the other ranks to close, too


class RequestKind(IntEnum):
    """The kinds of requests."""

    PUT = 1
    ACCUMULATE = 2
    GET = 3
    SIGNAL = 4
    FENCE = 5
    GOODBYE = 6


class WindowRequest(NamedTuple):
    """The head of a request."""

    kind: int
    window: int = 0
    start: int = 0  #: byte in the target's memory
    nbytes: int = 0
    dtype: int = 0  #: code
    slot: int = 0
    value: int = 0
    add: int = 0

    def message(self, payload: Tensor | None = None) -> Tensor:
        """The request as one message, with a payload of bytes that is short."""
        message = bytearray(_REQUEST.pack(*self))
        if payload is not None:
            message += payload.numpy().data
        return torch.frombuffer(message, dtype=torch.uint8)

    @classmethod
    def of(cls, message: Tensor) -> Self:
        return cls(*_REQUEST.unpack_from(message.numpy().data))


_REQUEST: Final = struct.Struct("=6qQq")


@final
class WindowService:
    """The windows of one rank: serves the other ranks' requests, and sends this rank's requests.

    Args:
        gloo: a group on which no other message uses the three tags.
        on_error: called with an error that breaks the comm, from any thread.
    """

    def __init__(self, gloo: GlooGroup, group: CommInfo, name: str, on_error: Callable[[BrokenError], object]) -> None:
        self._gloo = gloo
        self._rank, self._size = group.rank, group.size
        self._on_error = on_error
        self._lanes = OrderedExecutor(f"{name}-windows", 2 * group.size)
        self._parts: dict[int, ServedPart] = {}
        self._sent: list[list[Callable[[], object]]] = [[] for _ in range(group.size)]  # short requests, not waited for
        self._ended = False
        self._gone: set[int] = set()  # ranks that have closed
        self._threads = [
            threading.Thread(target=self._serve, args=(peer,), name=f"{name}-window-{peer}", daemon=True)
            for peer in range(group.size)
            if peer != group.rank
        ]
        for thread in self._threads:
            thread.start()

    def serve(self, number: int, part: ServedPart) -> None:
        """Serve ``part`` to the other ranks, as this rank's part of a window, until ``forget``."""
        self._parts[number] = part

    def forget(self, number: int) -> None:
        """Serve a window no longer."""
        self._parts.pop(number, None)

    # -- requests of other ranks ---------------------------------------------------------------------------------------

    def _serve(self, peer: int) -> None:
        """Serve the requests of ``peer``, until it closes. On a thread of its own."""
        try:
            messages = deque(
                [torch.zeros(_REQUEST.size + SHORT, dtype=torch.uint8, device="cpu") for _ in range(AHEAD)]
            )
            arrivals = deque([self._gloo.recv(message, peer, REQUEST_TAG) for message in messages])
            while arrivals:
                arrivals.popleft().wait()
                message = messages.popleft()
                request = WindowRequest.of(message)
                if request.kind == RequestKind.GOODBYE:  # one for each receive
                    self._gone.add(peer)
                    continue
                self._carry_out(peer, request, message[_REQUEST.size :])
                messages.append(message)
                arrivals.append(self._gloo.recv(message, peer, REQUEST_TAG))
        except Exception as exc:
            self._fail(f"serving the windows of rank {peer}", exc)

    def _carry_out(self, peer: int, request: WindowRequest, payload: Tensor) -> None:
        part = self._parts.get(request.window)
        start, nbytes = request.start, request.nbytes
        if part is None or not 0 <= start <= start + nbytes <= part.memory.numel():
            raise BackendError(f"rank {peer} sent a request that fits no window: {request}")
        if request.kind == RequestKind.PUT and nbytes <= SHORT:  # torch's views would take most of a short copy
            memmove(part.memory.data_ptr() + start, payload.data_ptr(), nbytes)
            return
        memory = part.memory[start : start + nbytes]
        match request.kind:
            case RequestKind.PUT:
                self._gloo.recv(memory, peer, PAYLOAD_TAG).wait()
            case RequestKind.ACCUMULATE if request.dtype in BY_CODE:
                values = payload[:nbytes].clone()
                if nbytes > SHORT:
                    values = room(nbytes)
                    self._gloo.recv(values, peer, PAYLOAD_TAG).wait()
                part.accumulate(start, values.view(BY_CODE[request.dtype]))
            case RequestKind.GET:
                self._gloo.send(memory, peer, REPLY_TAG).wait()
            case RequestKind.SIGNAL if 0 <= request.slot < part.count:
                part.signal(request.slot, request.value, add=bool(request.add))
            case RequestKind.FENCE:
                self._gloo.send(torch.zeros(ACK_BYTES, dtype=torch.uint8, device="cpu"), peer, REPLY_TAG).wait()
            case _:
                raise BackendError(f"rank {peer} sent a request that cannot be read: {request}")

    # -- requests of this rank -----------------------------------------------------------------------------------------

    def submit(self, op: WindowOp, submission: Submission, peers: Sequence[int] = ()) -> None:
        """Send the requests of an operation that needs other ranks. Under the comm's lock.

        Args:
            peers: the ranks of a fence.
        """
        try:
            if isinstance(op, WindowFence):
                self._fence(op, submission, peers)
                return
            assert op.peer is not None
            self._check_there(op, op.peer)
            if isinstance(op, WindowGet) and op.nbytes:
                self._get(op, submission)
            elif isinstance(op, WindowSignal):
                request = WindowRequest(RequestKind.SIGNAL, op.window, slot=op.slot, value=op.value, add=op.add)
                self._send_short(op.peer, submission, request.message())
            else:
                assert isinstance(op, WindowTransfer), op
                self._put(op, submission)  # a get of nothing is a put of nothing
        except (RuntimeError, BackendError) as exc:  # the group is broken, and this call is the first to detect it
            self._fail(str(op), exc)

    def _check_there(self, op: WindowOp, peer: int) -> None:
        if peer in self._gone:
            raise BackendError(f"rank {peer} has closed the comm, and {op} needs it")

    def _request(self, peer: int, message: Tensor) -> Callable[[], object]:
        return self._gloo.send(message, peer, REQUEST_TAG).wait

    def _put(self, op: WindowTransfer, submission: Submission) -> None:
        kind = RequestKind.ACCUMULATE if isinstance(op, WindowAccumulate) else RequestKind.PUT
        data = bytes_of(submission.inputs[0]) if submission.inputs else room(0)
        request = WindowRequest(kind, op.window, op.start, op.nbytes, CODES[op.dtype])
        if op.nbytes <= SHORT:
            self._send_short(op.peer, submission, request.message(data))
            return
        steps = [self._request(op.peer, request.message()), self._gloo.send(data, op.peer, PAYLOAD_TAG).wait]
        self._send(op.peer, submission, steps)

    def _send_short(self, peer: int, submission: Submission, message: Tensor) -> None:
        """Send a request that holds all of its operation, which is done then; of many, one waits for those before."""
        sent = self._sent[peer]
        sent.append(self._request(peer, message))
        if len(sent) < MOST_SENT:
            submission.work.settle()
        else:
            self._sent[peer] = []
            self._send(peer, submission, sent)

    def _get(self, op: WindowTransfer, submission: Submission) -> None:
        values, copy_back = place(submission.outputs[0])
        arrival = self._gloo.recv(values.view(torch.uint8), op.peer, REPLY_TAG)
        request = WindowRequest(RequestKind.GET, op.window, op.start, op.nbytes)
        steps = [self._request(op.peer, request.message()), arrival.wait]
        if copy_back is not None:
            steps.append(copy_back)
        self._lanes.put(("reply", op.peer), partial(self._complete, submission, steps))

    def _fence(self, op: WindowFence, submission: Submission, peers: Sequence[int]) -> None:
        steps: list[Callable[[], object]] = []
        for peer in peers:
            self._check_there(op, peer)
            arrival = self._gloo.recv(room(ACK_BYTES), peer, REPLY_TAG)
            steps += [self._request(peer, WindowRequest(RequestKind.FENCE, op.window).message()), arrival.wait]
        # earlier operations have taken effect when the replies come, but their own lanes may not have settled them yet
        before = [(lane, peer) for peer in peers for lane in ("send", "reply")]
        settle = self._lanes.behind(before, submission.work.settle)
        self._lanes.put("fence", partial(self._complete, submission, steps, settle))

    def _send(self, peer: int, submission: Submission, steps: Sequence[Callable[[], object]]) -> None:
        self._lanes.put(("send", peer), partial(self._complete, submission, steps))

    def _complete(
        self, submission: Submission, steps: Sequence[Callable[[], object]], settle: Callable[[], object] | None = None
    ) -> None:
        """Wait for the messages of an operation, and settle it, by ``settle`` if it is given. On a lane."""
        if self._ended:
            return
        try:
            for step in steps:
                step()
        except Exception as exc:
            self._fail(str(submission.op), exc)
        else:
            (settle or submission.work.settle)()

    def _fail(self, doing: str, exc: Exception) -> None:
        if self._ended:
            return
        if not isinstance(exc, BrokenError):
            error = BackendError(f"gloo failed in {doing}: {str(exc).strip()}")
            exc.__traceback__ = None  # its frames hold the group
            error.__cause__ = exc
            exc = error
        self._on_error(exc)

    # -- ending -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Drop all operations. The group must be poisoned, too, which ends the threads. From any thread."""
        self._ended = True
        for part in list(self._parts.values()):
            part.end()

    def close(self) -> bool:
        """Say goodbye to all ranks; returns whether the threads have ended; else only an abort ends them."""
        if not self._ended:
            for peer in range(self._size):
                if peer != self._rank:
                    sent = self._sent[peer]
                    with contextlib.suppress(RuntimeError):
                        for _ in range(AHEAD):
                            sent.append(self._request(peer, WindowRequest(RequestKind.GOODBYE).message()))
                    self._lanes.put(("goodbye", peer), partial(_ignoring_errors, sent))
        self.join(CLOSE_SECONDS)
        self.abort()
        return not any(thread.is_alive() for thread in self._threads)

    def join(self, seconds: float) -> None:
        """Block until the threads have ended, at most about ``seconds``."""
        for thread in self._threads:
            thread.join(seconds / len(self._threads))
        self._lanes.join(seconds)

    def end(self) -> None:
        """End the lanes' threads. After ``close``."""
        self._lanes.end()


def _ignoring_errors(steps: Sequence[Callable[[], object]]) -> None:
    with contextlib.suppress(RuntimeError):
        for step in steps:
            step()


@final
class GlooWindow(BackendWindow):
    """One rank's access to a window over gloo; its own part is at hand."""

    def __init__(self, service: WindowService, window: WindowInfo, part: LocalPart) -> None:
        self._service = service
        self._rank = rank = window.group.rank
        self._peers = [peer for peer in range(window.group.size) if peer != rank]
        self._part = part
        self._number = window.number

    def memory(self, rank: int) -> Tensor | None:
        return self._part.memory if rank == self._rank else None

    def load(self, slot: int) -> int:
        return self._part.load(slot)

    def submit(self, batch: Sequence[Submission]) -> None:
        for submission in batch:
            op = submission.op
            assert isinstance(op, WindowOp), op
            if isinstance(op, WindowWait):
                self._part.wait(submission)
            elif op.peer == self._rank:
                if not isinstance(op, WindowFence):  # earlier operations are over
                    self._part.apply(submission)
                submission.work.settle()
            else:
                self._service.submit(op, submission, self._peers if op.peer is None else [op.peer])

    def end_waits(self, error: AsyncCommError) -> None:
        self._part.waits.end(error)

    def abort(self) -> None:
        self._part.end()

    def close(self) -> None:
        self.abort()
        self._service.forget(self._number)
