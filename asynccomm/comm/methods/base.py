"""The base of all method groups: properties of a comm, submitting, and receiving objects of unknown size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import UnionType
from typing import Any, Final, NamedTuple, Self, SupportsIndex, TypedDict, final

import torch
from torch import Tensor

from asynccomm.backends.base import Backend
from asynccomm.comm.direct_calls import fast_path
from asynccomm.comm.in_flight import CommStatistics
from asynccomm.comm.measuring import measure_if_wanted
from asynccomm.comm.session import Session
from asynccomm.comm.tracing import trace_if_wanted
from asynccomm.core.handles import Handle
from asynccomm.core.state import DirectCaller
from asynccomm.core.work import Work
from asynccomm.errors import ClosedError, PayloadError, PayloadTypeError
from asynccomm.ops import Call, Parcel, RecvParcel, Several
from asynccomm.ops.validation import as_index, check_rank, check_tag
from asynccomm.options import CommOptions, check_bool, check_expect
from asynccomm.serialization.objects import IncomingObject, PayloadKind, clone_out, kind_of
from asynccomm.serialization.tensor_dicts import ReceiverSchemaCache, SenderSchemaCache

ENDING: Final = 4096  # bytes of an end-of-stream message, which is accepted even above ``max_bytes``
MAX_BYTES: Final = 1 << 32  # of head and payload from one sender, unless the caller gives another limit


class ReceiveArguments(TypedDict, total=False):
    """Keyword arguments of all methods that receive objects."""

    weights_only: bool
    max_bytes: int
    timeout: float | timedelta | None
    hints: Mapping[str, str] | None


class CollectiveArguments(ReceiveArguments, total=False):
    """Keyword arguments of all collectives on objects."""

    tag: str | None


class CommBase(Handle, DirectCaller):
    """Properties of a comm, and the one path by which all methods submit operations."""

    _instead = "make a comm there, by asynccomm.new_comm() or comm.split()"

    def __init__(self, session: Session, backend_name: str) -> None:
        """Not for users: see ``asynccomm.new_comm``."""
        super().__init__()
        self._session = session
        self._submitter = session.submitter
        self._group = session.group
        self._backend_name = backend_name
        self._fast = fast_path(self._submitter)
        # for methods that take tensors and plain values
        self._call = self._submitter.call if self._fast is None else self._fast.submit
        trace_if_wanted(session)
        measure_if_wanted(session)
        self._sent_schemas = SenderSchemaCache()
        self._received_schemas = ReceiverSchemaCache()

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number in the comm, from 0."""
        return self._group.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._group.size

    @property
    def name(self) -> str:
        """The comm's name, the same on all ranks."""
        return self._group.name

    @property
    def device(self) -> torch.device:
        """The device of the comm's tensors."""
        return self._group.device

    @property
    def backend(self) -> str:
        """The name of the backend in use (never ``"auto"``)."""
        return self._backend_name

    @property
    def options(self) -> CommOptions:
        """The options of the comm."""
        return self._session.options

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which the comm's Works are awaited."""
        return self._session.mailbox.loop

    def unsafe_get_backend(self) -> Backend:
        """The backend object: an escape hatch, without promises of compatibility."""
        self._submitter.check_open()
        assert self._submitter.backend is not None
        return self._submitter.backend

    def statistics(self) -> CommStatistics:
        """Counts of operations submitted, in flight and held, at this time."""
        return self._session.in_flight.statistics()

    def __repr__(self) -> str:
        error = self._session.error
        state = "open" if error is None else "closed" if isinstance(error, ClosedError) else "broken"
        return (
            f"<Comm {self.name!r} rank {self.rank} of {self.size}, {self._backend_name} on {self.device}, {state}, "
            f"{self.statistics().in_flight} in flight>"
        )

    def _submit(
        self,
        call: Call,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        tag: str | None = None,
    ) -> Work[Any]:
        return self._submitter.submit_made(call, timeout, hints, tag)

    def _submit_together(
        self,
        calls: Sequence[Call],
        result: Any,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        tag: str | None = None,
    ) -> Work[Any]:
        """Submit ``calls`` under one Work, whose result is ``result``."""
        return self._submitter.submit_made(Several(calls, result), timeout, hints, tag)

    def _receive_op(self, method: str, src: SupportsIndex | None, tag: SupportsIndex) -> RecvParcel:
        return RecvParcel(method, None if src is None else check_rank(self._group, "src", src), check_tag(tag))


@final
class ReceivePolicy(NamedTuple):
    """The objects that a receiver accepts: of the class ``expect``, if there is one."""

    weights_only: bool
    max_bytes: int
    expect: type = object

    @classmethod
    def of(cls, weights_only: object, max_bytes: SupportsIndex, expect: type | None = None) -> Self:
        check_bool("weights_only", weights_only)
        check_expect(expect)
        limit = as_index(max_bytes)
        if limit is None:
            raise TypeError(f"max_bytes must be an integer, got {max_bytes!r}")
        if limit < 0:
            raise ValueError(f"max_bytes must not be negative, got {limit}")
        return cls(bool(weights_only), limit, object if expect is None else expect)

    def check_own(self, name: str, obj: object) -> None:
        """Raise TypeError if this rank sends, as the argument ``name``, an object that all ranks would refuse."""
        if not isinstance(obj, self.expect):
            raise TypeError(f"{name} must be a {self.expect.__qualname__}, as expect says, got a {_class_name(obj)}")

    def check(self, source: int, nbytes: int) -> None:
        """Raise PayloadError if ``nbytes`` from rank ``source`` are more than ``max_bytes``."""
        if nbytes > self.max_bytes:
            raise PayloadError(f"rank {source} sent {nbytes} bytes, but max_bytes is {self.max_bytes}")


@final
class ObjectReceiver:
    """Receives the objects of one operation: its ``place``.

    Args:
        method: the receiving method, for error texts.
        rank: this rank.
        kinds: the kinds that the objects may have.
        missed: called with every parcel of another kind.
    """

    __slots__ = ("_kinds", "_method", "_missed", "_rank", "incoming", "kind", "policy")

    def __init__(
        self,
        method: str,
        rank: int,
        kinds: Sequence[PayloadKind],
        policy: ReceivePolicy,
        missed: Callable[[int, bytes], object] | None = None,
    ) -> None:
        self._method, self._rank, self._kinds, self._missed = method, rank, kinds, missed
        self.policy: ReceivePolicy = policy
        self.kind: PayloadKind = kinds[0]  #: of the last parcel
        self.incoming: dict[int, IncomingObject] = {}  #: by source

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        length = lengths[source]
        self.kind = kind = kind_of(source, head)
        if kind not in self._kinds:
            if self._missed is not None:
                self._missed(source, head)
            raise wrong_kind(self._method, self._rank, source, kind)
        if kind not in (PayloadKind.END, PayloadKind.FAILURE) or len(head) + length > ENDING:
            self.policy.check(source, len(head) + length)
        incoming = self.incoming[source] = IncomingObject(source, head, length)
        return incoming.places

    def begin(self, parcel: Parcel, *_: object) -> Sequence[Tensor]:
        """Copy this rank's own ``parcel`` to the host as it is when the operation takes effect."""
        self.incoming[self._rank] = clone_out(self._rank, parcel)
        return ()

    def only(self, _: object = None) -> Any:
        """The object of the only sender. Raises: PayloadError."""
        ((source, incoming),) = self.incoming.items()
        return self._decoded(source, incoming)

    def all(self, _: object = None) -> list[object]:
        """The objects in rank order. Raises: PayloadError."""
        return [self._decoded(source, incoming) for source, incoming in sorted(self.incoming.items())]

    def _decoded(self, source: int, incoming: IncomingObject) -> Any:
        obj = incoming.decode(weights_only=self.policy.weights_only)
        expect = self.policy.expect
        if not isinstance(obj, expect) and self.kind in (PayloadKind.OBJECT, PayloadKind.ITEM):
            raise PayloadTypeError(
                f"{self._method}() of rank {self._rank} expected a {expect.__qualname__}, but rank {source} sent a "
                f"{_class_name(obj)}"
            )
        return obj


def _class_name(obj: object) -> str:
    return type(obj).__qualname__


def check_type(name: str, value: object, kind: type | UnionType, text: str) -> None:
    """Check that ``value`` is a ``kind``, which ``text`` describes."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {text}, got {value!r} ({type(value).__name__})")


def wrong_kind(method: str, rank: int, source: int, kind: PayloadKind) -> PayloadError:
    """The error of a receive that gets a parcel of another kind."""
    return PayloadError(f"{method}() of rank {rank} received the payload that rank {source} sent by {kind.sender}()")
