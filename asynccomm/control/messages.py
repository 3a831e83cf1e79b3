"""The messages between the ranks of a job, and between newcomers and the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeAlias, final

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from asynccomm.control.fingerprints import Fingerprint
from asynccomm.control.membership.messages import CoordinatorOrder, StatusReport
from asynccomm.control.runs import RankRuns, compact_ranks, expand_ranks
from asynccomm.control.transport.schema import JsonObject, Message, TaggedMessage

ALL: Final = "all"
ROOT: Final = "root"

Age: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]  # seconds
Address: TypeAlias = int | Literal["all", "root"]  # a rank of the job, all ranks, or the root


@final
class Presence(TaggedMessage, frozen=True):
    """The sender is connected, to the root or to a rank below it."""


@final
class Heartbeat(TaggedMessage, frozen=True):
    """The sender runs."""

    ages: dict[int, Age] = {}  # noqa: RUF012 (msgspec copies it)  #: of the last messages of the ranks below


@final
class Departure(TaggedMessage, frozen=True):
    """Ranks are gone."""

    ranks: RankRuns  #: in compact form
    reason: str  #: empty: an orderly leave

    def __post_init__(self) -> None:
        force_setattr(self, "ranks", compact_ranks(self.ranks))


@final
class DepartureAck(TaggedMessage, frozen=True):
    """The sender no longer needs the rank that leaves."""


@final
class News(TaggedMessage, frozen=True):
    """A message of a comm to its other ranks."""

    comm: str
    item: JsonObject  #: for the comm


@final
class Request(TaggedMessage, frozen=True):
    comm: str
    question: JsonObject
    number: int


@final
class Reply(TaggedMessage, frozen=True):
    number: int  #: of the request
    answer: JsonObject


@final
class IssuedCollectives(TaggedMessage, frozen=True):
    """The fingerprints of collectives that the sender has issued, to the root."""

    comm: str
    size: int
    fingerprints: list[Fingerprint]


@final
class ParticipantReport(TaggedMessage, frozen=True):
    """The state of a rank or newcomer in the agreement of a comm, to the root."""

    comm: str
    ranks: RankRuns  #: of the comm, in compact form
    report: StatusReport | None
    left: bool = False  #: whether the sender takes no further part

    def __post_init__(self) -> None:
        force_setattr(self, "ranks", compact_ranks(self.ranks))


@final
class ReportRequest(TaggedMessage, frozen=True):
    """A new root requests the report of a rank."""

    comm: str


@final
class OrderMessage(TaggedMessage, frozen=True):
    """The root's order in the agreement of a comm."""

    comm: str
    order: CoordinatorOrder


@final
class MeetingArrival(TaggedMessage, frozen=True):
    """The sender has come to a meeting for a new comm; to the root."""

    meeting: str
    terms: JsonObject  #: to be the same on all ranks


@final
class MeetingWithdrawal(TaggedMessage, frozen=True):
    """The sender waits no longer for the meeting that it has come to; to the root."""

    meeting: str


@final
class WithdrawalAck(TaggedMessage, frozen=True):
    """The root has received the withdrawal before the meeting began."""

    meeting: str


@final
class MeetingBegin(TaggedMessage, frozen=True):
    """All ranks have come to a meeting."""

    meeting: str
    epoch: str
    terms: dict[int, JsonObject]  #: of the first rank, and of the first one with other terms


_Membership: TypeAlias = ParticipantReport | ReportRequest | OrderMessage
_Meeting: TypeAlias = MeetingArrival | MeetingWithdrawal | WithdrawalAck | MeetingBegin
Body: TypeAlias = (
    Presence
    | Heartbeat
    | Departure
    | DepartureAck
    | News
    | Request
    | Reply
    | IssuedCollectives
    | _Membership
    | _Meeting
)


@final
class RankAnswer(TaggedMessage, frozen=True):
    """The answers of a rank's comms, to a process outside the job."""

    rank: int
    comms: dict[str, JsonObject]


@final
class JobOverview(TaggedMessage, frozen=True):
    """The last message to a process outside the job."""

    silent: dict[int, float | None]  #: seconds since the last message of each rank without an answer; None: unknown
    gone: dict[int, str]  #: reasons, by rank
    sockets: dict[int, str]  #: names, by rank


@final
class RoutedMessage(Message, frozen=True):
    """A message on its way through the tree of ranks."""

    to: Address
    source: int
    body: Body
    number: int | None = None  #: counts the messages to all of their source
    patient: bool = False  #: whether a message to all may wait for others, to be sent with them
    also: RankRuns = ()  #: further sources of the same message to all with the same number, in compact form
    held: bool = False  #: whether the root has not sent the message to all yet; its heir keeps it

    def __post_init__(self) -> None:
        if self.also:
            if self.to != ALL or self.number is None:
                raise ValueError("only a numbered message to all has several sources")
            force_setattr(self, "also", compact_ranks(self.also))

    @property
    def sources(self) -> tuple[int, ...]:
        """All sources."""
        return (self.source, *expand_ranks(self.also)) if self.also else (self.source,)

    def of(self, sources: Sequence[int]) -> RoutedMessage:
        """The message of these sources."""
        return replace(self, source=sources[0], also=tuple(sources[1:]))


@final
class MessageBatch(Message, frozen=True):
    """Messages that a node sends at once, in order."""

    messages: list[RoutedMessage]
