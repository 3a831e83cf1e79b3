"""Streams: a sequence of objects from one rank to another, of a length that only the sender decides."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, SupportsIndex, final

from torch import Tensor

from asynccomm.comm.methods.base import MAX_BYTES, CommBase, ReceivePolicy, wrong_kind
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, PayloadError
from asynccomm.ops import Call, MessageSpace, RecvParcel, SendParcel
from asynccomm.ops.validation import check_rank, check_tag
from asynccomm.options import seconds
from asynccomm.serialization.objects import IncomingObject, PayloadKind, encode, kind_of

ENDING: Final = 4096  # bytes of an end-of-stream message, which is accepted even above ``max_bytes``


class Streams(CommBase):
    """Streams of objects."""

    def sink(self, dst: SupportsIndex, tag: SupportsIndex = 0) -> Sink:
        """The sending end of a stream to rank ``dst``, which reads it by :meth:`stream`.

        ::

            async with comm.sink(1) as sink:
                for batch in batches:
                    await sink.put(batch)

        Items of streams are never matched with other messages, even under the same tag.
        """
        return Sink(self, check_rank(self._group, "dst", dst), check_tag(tag))

    def stream(
        self,
        src: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Stream:
        """The items that rank ``src`` puts into its :meth:`sink` of the same ``tag``, until the sink is closed.

        ::

            async for batch in comm.stream(0):
                ...

        A stream that is read when the comm is closed ends with ClosedError.

        Args:
            src: the sending rank; required, since a stream has one source.
            weights_only, max_bytes: as with ``recv_object``, for each item.
            timeout: seconds or a timedelta that the sender may take for the next item; None: no limit, also where the
                comm has one. (The death of the sender ends the stream in any case.)
            hints: for each receive.
        """
        peer, key = check_rank(self._group, "src", src), check_tag(tag)
        limit = seconds("timeout", timeout, math.inf)
        return Stream(self, peer, key, ReceivePolicy.of(weights_only, max_bytes), limit, hints)


@final
class Sink(Handle):
    """The sending end of a stream; made by ``comm.sink``.

    ``async with`` closes the stream at its end. If its body raises, the receiver gets a PayloadError with the reason
    instead of a normal end, and the sender does not wait until the receiver has it.
    """

    _instead = "make one there, by comm.sink()"

    def __init__(self, comm: Streams, peer: int, tag: int) -> None:
        self._comm = comm
        self._op = SendParcel("sink", peer, tag, MessageSpace.STREAMS)
        self._last: Work[None] | None = None

    def put(
        self,
        item: object,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[None]:
        """Send ``item``, any object as in ``send_object``. The call sends; awaiting the Work slows down a fast sender.

        Tensors in ``item`` must not be changed before the Work is done. Cancelling the await is safe: ``item`` is sent.

        Raises: RuntimeError after :meth:`close`; TypeError if ``item`` cannot be pickled.
        """
        if self._last is not None:
            raise RuntimeError(f"{self!r} is closed, so nothing can be put into it any more")
        return self._send(PayloadKind.ITEM, item, timeout, hints)

    def close(self, *, timeout: float | timedelta | None = None, hints: Mapping[str, str] | None = None) -> Work[None]:
        """End the stream. The call sends an end to the receiver; the Work is done when it is sent. Idempotent."""
        if self._last is None:
            self._last = self._send(PayloadKind.END, None, timeout, hints)
        return self._last

    def _send(
        self, kind: PayloadKind, item: object, timeout: float | timedelta | None, hints: Mapping[str, str] | None
    ) -> Work[None]:
        call = Call(self._op, (), (), None, parcels=(encode(kind, item, "item"),))
        return self._comm._submit(call, timeout, hints)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            await self.close()
        elif self._last is None:
            reason = f"{type(exc).__name__}: {exc}"[: ENDING // 8] if str(exc) else type(exc).__name__
            with suppress(AsyncCommError):  # closed or broken: the receiver gets that error; ``exc`` says more
                self._last = self._send(PayloadKind.FAILURE, reason, None, None)

    def __repr__(self) -> str:
        return f"<Sink to rank {self._op.peer}, tag {self._op.tag}{'' if self._last is None else ', closed'}>"


@final
class Stream(Handle, AsyncIterator[Any]):
    """The receiving end of a stream, an async iterator; made by ``comm.stream``.

    Leaving ``async for``, or cancelling it, loses no item: a later ``async for`` on the same Stream goes on with the
    next item. An item that is not accepted raises PayloadError, and the next ``async for`` goes on with the items after
    it. The PayloadError of a sender that gave up is final.
    """

    _instead = "make one there, by comm.stream()"

    def __init__(
        self,
        comm: Streams,
        peer: int,
        tag: int,
        terms: ReceivePolicy,
        timeout: float,
        hints: Mapping[str, str] | None,
    ) -> None:
        self._comm = comm
        self._timeout, self._hints = timeout, hints
        self._op = RecvParcel("stream", peer, tag, MessageSpace.STREAMS)
        self._terms = terms
        self._receive: Work[tuple[PayloadKind, Any]] | None = None  # kept until its item was returned
        self._reading = False
        self._ended = False
        self._failure: str | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next item. Cancelling is safe, and loses no item. Raises: PayloadError, BrokenError, ClosedError."""
        if self._reading:
            raise RuntimeError(f"two tasks read from {self!r} at the same time")
        if self._ended:
            self._raise_failure()
            raise StopAsyncIteration
        if self._receive is None:
            inbox = _ItemReceiver(self._comm.rank, self._terms)
            call = Call(self._op, (), (), None, inbox.finish, place=inbox)
            self._receive = self._comm._submit(call, self._timeout, self._hints)
        self._reading = True
        try:
            kind, item = await self._receive
        except AsyncCommError:
            self._receive = None
            raise
        finally:
            self._reading = False
        self._receive = None
        if kind is PayloadKind.ITEM:
            return item
        self._ended = True
        if kind is PayloadKind.FAILURE:
            self._failure = str(item)
            self._raise_failure()
        raise StopAsyncIteration

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PayloadError(f"rank {self._op.peer} gave up its stream (tag {self._op.tag}): {self._failure}")

    def __repr__(self) -> str:
        return f"<Stream from rank {self._op.peer}, tag {self._op.tag}{', ended' if self._ended else ''}>"


@final
class _ItemReceiver:
    """Receives one item of a stream: the ``place`` of its receive."""

    def __init__(self, rank: int, terms: ReceivePolicy) -> None:
        self._rank, self._terms = rank, terms
        self._kind = PayloadKind.ITEM
        self._incoming: IncomingObject | None = None

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> list[Tensor]:
        self._kind = kind_of(source, head)
        if self._kind not in (PayloadKind.ITEM, PayloadKind.END, PayloadKind.FAILURE):
            raise wrong_kind("stream", self._rank, source, self._kind)
        size = len(head) + lengths[source]
        if self._kind is PayloadKind.ITEM or size > ENDING:
            self._terms.check(source, size)
        self._incoming = IncomingObject(source, head, lengths[source])
        return self._incoming.places

    def finish(self, _: object) -> tuple[PayloadKind, Any]:
        """The kind of the item, and the item. Raises: PayloadError."""
        assert self._incoming is not None
        return self._kind, self._incoming.decode(weights_only=self._terms.weights_only)
