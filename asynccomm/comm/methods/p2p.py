"""Point-to-point operations: tensors from one rank to another, batches of them, and streams of objects."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, SupportsIndex, TypeVar, Unpack, final, overload

from torch import Tensor

from asynccomm.comm.methods.base import (
    ENDING,
    MAX_BYTES,
    CommBase,
    ObjectReceiver,
    ReceiveArguments,
    ReceivePolicy,
)
from asynccomm.comm.methods.direct import direct
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, PayloadError, WouldBlockError
from asynccomm.ops import Call, MessageSpace, Recv, RecvParcel, Send, SendParcel
from asynccomm.ops.validation import CommInfo, check_rank, check_tag
from asynccomm.options import check_bool, seconds
from asynccomm.serialization.objects import PayloadKind, encode

T = TypeVar("T")
_KINDS: Final = PayloadKind.ITEM, PayloadKind.END, PayloadKind.FAILURE  # of the messages of a stream


@final
class BatchSendRecv(Handle):
    """Sends and receives that start together; made by ``comm.batch_op_create()``.

    ``send`` and ``recv`` only check their arguments and record. The order of recording matters only for messages
    between the same two ranks under the same tag. Any ranks may take part; the other ranks do nothing.
    """

    _instead = "make one there, by comm.batch_op_create()"

    def __init__(self, group: CommInfo, submit: Callable[..., Work[Any]]) -> None:
        """Not for users: see ``comm.batch_op_create``."""
        self._group = group
        self._submit = submit
        self._calls: list[Call] = []
        self._issued = False

    @property
    def ops(self) -> list[Send | Recv]:
        """The recorded sends and receives."""
        return [call.op for call in self._calls]  # type: ignore[misc]

    def send(self, tensor: Tensor, dst: SupportsIndex, tag: SupportsIndex = 0) -> None:
        """Record a send, see :meth:`Comm.send`; a send to this rank itself works, too."""
        self._record(Send.of(self._group, tensor, dst, tag))

    def recv(self, tensor: Tensor, src: SupportsIndex | None = None, tag: SupportsIndex = 0) -> None:
        """Record a receive, see :meth:`Comm.recv`."""
        self._record(Recv.of(self._group, tensor, src, tag))

    def _record(self, call: Call) -> None:
        if self._issued:
            raise RuntimeError("this batch was issued; make a new one with comm.batch_op_create()")
        self._calls.append(call)

    def issue(
        self, *, timeout: float | timedelta | None = None, hints: Mapping[str, str] | None = None
    ) -> Work[list[Tensor]]:
        """Start all recorded operations at the same time, once: no order among them can deadlock.

        Returns: Work of the recorded tensors, in the order of recording; done when all operations are. Raises
            ValueError for an empty batch, RuntimeError for a batch that was issued before.
        """
        if self._issued:
            raise RuntimeError("this batch was issued; make a new one with comm.batch_op_create()")
        if not self._calls:
            raise ValueError("nothing was recorded in this batch: call send() or recv() before issue()")
        work = self._submit(self._calls, [call.result for call in self._calls], timeout, hints)
        self._issued = True
        return work


_SEND, _RECV = Send.of, Recv.of  # see collectives.py


class P2P(CommBase):
    """Point-to-point operations on tensors, and streams of objects."""

    @direct(_SEND, "tensor", "dst", "tag")
    def send(
        self,
        tensor: Tensor,
        dst: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Send ``tensor`` to rank ``dst``, which receives it under the same ``tag``.

        The Work is done when ``tensor`` may be changed again. Messages are ordered per pair of ranks and tag, and are
        not part of the sequence of collectives. A rank may send to itself, and then needs a receive, too.

        Returns: Work of ``tensor``.
        """
        return self._call(timeout, hints, None, _SEND, tensor, dst, tag)

    @direct(_RECV, "tensor", "src", "tag")
    def recv(
        self,
        tensor: Tensor,
        src: SupportsIndex | None = None,
        tag: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Tensor]:
        """Receive a tensor that rank ``src`` sends under ``tag`` into ``tensor``: as many elements, the same dtype.

        While the Work is pending, and after it has failed or was cancelled, ``tensor`` may hold a part of a message.

        Args:
            src: None: the first message under ``tag`` from any rank; a backend that does not support this raises
                ``ValueError``. ``Work.source`` gives the rank that sent it.

        Returns: Work of ``tensor``.
        """
        return self._call(timeout, hints, None, _RECV, tensor, src, tag)

    def batch_op_create(self) -> BatchSendRecv:
        """Make a batch of sends and receives that start together, with one Work: a ring exchange cannot deadlock.

        ::

            batch = comm.batch_op_create()
            batch.send(mine, (comm.rank + 1) % comm.size)
            batch.recv(theirs, (comm.rank - 1) % comm.size)
            await batch.issue()
        """
        return BatchSendRecv(self._group, self._submit_together)

    def sink(self, dst: SupportsIndex, tag: SupportsIndex = 0, *, weights_only: bool = True) -> Sink:
        """The sending end of a stream to rank ``dst``, which reads it by :meth:`stream`.

        ::

            async with comm.sink(1) as sink:
                for batch in batches:
                    await sink.put(batch)

        Items of streams are never matched with other messages, even under the same tag.

        Args:
            weights_only: as with ``send_object``, for each item.
        """
        check_bool("weights_only", weights_only)
        return Sink(self, check_rank(self._group, "dst", dst), check_tag(tag), weights_only)

    @overload
    def stream(
        self,
        src: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        expect: None = None,
        **arguments: Unpack[ReceiveArguments],
    ) -> Stream[Any]: ...

    @overload
    def stream(
        self, src: SupportsIndex, tag: SupportsIndex = 0, *, expect: type[T], **arguments: Unpack[ReceiveArguments]
    ) -> Stream[T]: ...

    def stream(
        self,
        src: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        expect: type[Any] | None = None,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Stream[Any]:
        """The items that rank ``src`` puts into its :meth:`sink` of the same ``tag``, until the sink is closed.

        ::

            async for batch in comm.stream(0):
                ...

        A stream that is read when the comm is closed ends with ClosedError.

        Args:
            src: the sending rank; required, since a stream has one source.
            expect, weights_only, max_bytes: as with ``recv_object``, for each item.
            timeout: seconds or a timedelta that the sender may take for the next item; None: no limit, also where the
                comm has one. (The death of the sender ends the stream in any case.)
            hints: for each receive.
        """
        peer, key = check_rank(self._group, "src", src), check_tag(tag)
        limit = seconds("timeout", timeout, math.inf)
        return Stream(self, peer, key, ReceivePolicy.of(weights_only, max_bytes, expect), limit, hints)


@final
class Sink(Handle):
    """The sending end of a stream; made by ``comm.sink``.

    ``async with`` closes the stream at its end, and so does ``with``, which blocks a thread without a loop. If the body
    raises, the receiver gets a PayloadError with the reason instead of a normal end, and the sender does not wait until
    the receiver has it.
    """

    _instead = "make one there, by comm.sink()"

    def __init__(self, comm: CommBase, peer: int, tag: int, weights_only: bool) -> None:
        self._comm = comm
        self._weights_only = weights_only
        self._op = SendParcel("sink", peer, tag, MessageSpace.STREAMS)
        self._last: Work[None] | None = None

    def put(
        self,
        item: object,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[None]:
        """Send ``item``, an object as in ``send_object``. The call sends; awaiting the Work slows down a fast sender.

        Tensors in ``item`` must not be changed before the Work is done. Cancelling the await is safe: ``item`` is sent.

        Raises: RuntimeError after :meth:`close`; TypeError if ``item`` cannot be pickled.
        """
        if self._last is not None:
            raise RuntimeError(f"{self!r} is closed, and accepts no more items")
        return self._send(PayloadKind.ITEM, item, timeout, hints)

    def close(self, *, timeout: float | timedelta | None = None, hints: Mapping[str, str] | None = None) -> Work[None]:
        """End the stream. The call sends an end to the receiver; the Work is done when it is sent. Idempotent."""
        if self._last is None:
            self._last = self._send(PayloadKind.END, None, timeout, hints)
        return self._last

    def _send(
        self, kind: PayloadKind, item: object, timeout: float | timedelta | None, hints: Mapping[str, str] | None
    ) -> Work[None]:
        parcel = encode(kind, item, "item", weights_only=self._weights_only)
        call = Call(self._op, (), (), None, parcels=(parcel,))
        return self._comm._submit(call, timeout, hints)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            await self.close()
        else:
            self._fail(exc)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.close().wait()
        else:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        """End the stream with an error at the receiver, unless it has ended."""
        if self._last is None:
            reason = f"{type(exc).__name__}: {exc}"[: ENDING // 8] if str(exc) else type(exc).__name__
            with suppress(AsyncCommError):  # closed or broken: the receiver gets that error; ``exc`` says more
                self._last = self._send(PayloadKind.FAILURE, reason, None, None)

    def __repr__(self) -> str:
        return f"<Sink to rank {self._op.peer}, tag {self._op.tag}{'' if self._last is None else ', closed'}>"


@final
class Stream(Handle, AsyncIterator[T], Iterator[T]):
    """The receiving end of a stream, an async iterator; made by ``comm.stream``.

    On a thread without a loop, ``for`` iterates and blocks. Leaving ``async for``, or cancelling it, loses no item: a
    later ``async for`` on the same Stream goes on with the next item. An item that is not accepted raises PayloadError,
    and the next ``async for`` goes on with the items after it. The PayloadError of a sender that failed is final.
    """

    _instead = "make one there, by comm.stream()"

    def __init__(
        self,
        comm: CommBase,
        peer: int,
        tag: int,
        policy: ReceivePolicy,
        timeout: float,
        hints: Mapping[str, str] | None,
    ) -> None:
        self._comm = comm
        self._timeout, self._hints = timeout, hints
        self._op = RecvParcel("stream", peer, tag, MessageSpace.STREAMS)
        self._policy = policy
        self._receive: Work[tuple[PayloadKind, Any]] | None = None  # kept until its item was returned
        self._reading = False
        self._ended = False
        self._failure: str | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next item. Cancelling is safe, and loses no item. Raises: PayloadError, BrokenError, ClosedError."""
        if (receive := self._begin()) is None:
            raise StopAsyncIteration
        try:
            kind, item = await receive
        except AsyncCommError:
            self._receive = None
            raise
        finally:
            self._reading = False
        if not self._goes_on(kind, item):
            raise StopAsyncIteration
        return item  # type: ignore[no-any-return]  # checked by the receiver

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """The next item, as ``__anext__`` gives it, by blocking the thread. Raises: WouldBlockError, too."""
        if (receive := self._begin()) is None:
            raise StopIteration
        try:
            kind, item = receive.wait()
        except AsyncCommError as exc:
            if not isinstance(exc, WouldBlockError):
                self._receive = None
            raise
        finally:
            self._reading = False
        if not self._goes_on(kind, item):
            raise StopIteration
        return item  # type: ignore[no-any-return]  # checked by the receiver

    def _begin(self) -> Work[tuple[PayloadKind, Any]] | None:
        """The receive of the next item; None at the end of the stream."""
        if self._reading:
            raise RuntimeError(f"two tasks read from {self!r} at the same time")
        if self._ended:
            self._raise_failure()
            return None
        if self._receive is None:
            receiver = ObjectReceiver("stream", self._comm.rank, _KINDS, self._policy)
            call = Call(self._op, (), (), None, lambda _: (receiver.kind, receiver.only()), place=receiver)
            self._receive = self._comm._submit(call, self._timeout, self._hints)
        self._reading = True
        return self._receive

    def _goes_on(self, kind: PayloadKind, item: object) -> bool:
        """Whether the received ``item`` is one of the stream, and not its end. Raises: the error of the sender."""
        self._receive = None
        if kind is PayloadKind.ITEM:
            return True
        self._ended = True
        if kind is PayloadKind.FAILURE:
            self._failure = str(item)
            self._raise_failure()
        return False

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PayloadError(
                f"the stream of rank {self._op.peer} (tag {self._op.tag}) ended with an error: {self._failure}"
            )

    def __repr__(self) -> str:
        return f"<Stream from rank {self._op.peer}, tag {self._op.tag}{', ended' if self._ended else ''}>"
