"""The options of a queue, and the messages by which its ends meet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final, Self, TypedDict, cast, final

from msgspec import Meta

from asynccomm.control.transport.connection import Token
from asynccomm.control.transport.schema import Message, MessageError, dumps, loads
from asynccomm.ops.validation import as_index
from asynccomm.options import check_bool, check_expect, seconds

CAPACITY: Final = 8 << 20  # bytes
MOST_CAPACITY: Final = 1 << 40
MAX_BYTES: Final = 1 << 32  # of one item
OVERFLOWS: Final = ("wait", "drop_oldest")
LOSSES: Final = ("raise", "continue")


class QueueArguments(TypedDict, total=False):
    """Keyword arguments of a queue: the fields of :class:`QueueOptions`."""

    capacity: int
    overflow: str
    on_lost: str
    address: str
    expect: type[Any] | None
    weights_only: bool
    max_bytes: int
    busy_poll: float | timedelta | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """The options of one end of a queue; the first two are those of the end that made the queue."""

    capacity: int = CAPACITY  #: bytes of the ring
    overflow: str = "wait"  #: a full ring: the writer waits for the slowest reader, or drops the oldest items
    on_lost: str = "raise"  #: another end is lost: later calls raise, or the queue goes on without it
    address: str = ""  #: of the interface at which ends on other hosts attach; empty: none, unless the ranks need one
    expect: type[Any] | None = None  #: class of the items that this end reads
    weights_only: bool = True  #: items are of safe values only
    max_bytes: int = MAX_BYTES  #: of an item that this end reads
    busy_poll: float | timedelta | None = None  #: seconds in which this end polls for an item before it sleeps

    def __post_init__(self) -> None:
        for name, most in (("capacity", MOST_CAPACITY), ("max_bytes", None)):
            value = as_index(getattr(self, name))
            if value is None:
                raise TypeError(f"{name} must be an integer, got {getattr(self, name)!r}")
            if value < 1 or (most is not None and value > most):
                limit = "" if most is None else f" up to {most}"
                raise ValueError(f"{name} must be a positive number of bytes{limit}, got {value}")
        for name, choices in (("overflow", OVERFLOWS), ("on_lost", LOSSES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {getattr(self, name)!r}")
        if not isinstance(self.address, str):
            raise TypeError(f"address must be a str, got {self.address!r}")
        check_bool("weights_only", self.weights_only)
        seconds("busy_poll", self.busy_poll, 0.0)
        check_expect(self.expect)


@final
class QueueHandle(Message, frozen=True):
    """The content of a handle. It has the tokens, so it must reach only processes that may use the queue."""

    host: str
    local: str  #: name of the abstract local socket
    address: str
    port: Annotated[int, Meta(ge=0, le=65535)]  #: 0: the queue does not listen on TCP
    ask: Token
    answer: Token
    attaches: str  #: the part of an attached process: "reader" or "writer"
    label: str  #: of the process that listens
    rank: int = -1  #: of that process

    def text(self) -> str:
        return dumps(self)

    @classmethod
    def parse(cls, text: object) -> Self:
        """Raises: TypeError, ValueError."""
        if not isinstance(text, str):
            raise TypeError(f"handle must be a str, got {text!r}")
        try:
            return cast(Self, loads(cls, text))
        except MessageError as exc:
            # a handle that was changed has secrets
            raise ValueError(f"handle must be a queue's handle, got {text!r:.12}..., {len(text)} characters") from exc


@final
class QueueHello(Message, frozen=True):
    """The first message of an end that attaches."""

    token: Token
    label: Annotated[str, Meta(max_length=256)]
    rank: int = -1  #: -1: no rank of the comm


@final
class QueueWelcome(Message, frozen=True):
    """The reply; on a local socket, the ring's descriptor comes with it."""

    token: Token
    refused: str = ""
    ring: Annotated[int, Meta(ge=0, le=2 * MOST_CAPACITY)] = 0
    slot: Annotated[int, Meta(ge=0, lt=64)] = 0
    drops: bool = False
    number: Annotated[int, Meta(ge=0)] = 0  #: of the first item that the reader gets
