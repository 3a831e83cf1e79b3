"""The messages of the membership agreement: the reports of participants and the orders of the coordinator.

A report always holds the whole state of its participant, so that it means the same to every coordinator, however often
it arrives.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Final, TypeAlias, final

from msgspec import Meta
from msgspec.structs import force_setattr

from asynccomm.control.runs import MAX_LISTED, MAX_NAME, MAX_RANK, ParticipantId, Runs, compact, expand
from asynccomm.control.transport.schema import Message, MessageError, TaggedMessage, decode, shown

MAX_TEXT: Final = 2000  # characters of a reason; longer reasons are cut
MAX_PLACE: Final = 2**16  # characters of a place as JSON
MAX_ATTEMPT: Final = 2**31  # in a report; up to twice as high in a coordinator's orders
SHOWN: Final = 16  # participants listed in a text

Participants: TypeAlias = Annotated[tuple[ParticipantId, ...], Meta(min_length=1, max_length=MAX_LISTED)]
ParticipantRuns: TypeAlias = Annotated[Runs, Meta(min_length=1, max_length=MAX_LISTED)]
Key: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]
Reason: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
NextAttempt: TypeAlias = Annotated[int, Meta(ge=0, le=2 * MAX_ATTEMPT)]

Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


@final
class View(Message, frozen=True, rename={"listed": "members"}):
    """The members that continue."""

    key: Key  #: unique
    by: Annotated[int, Meta(ge=0, le=MAX_RANK)]  #: rank of the coordinator; a later coordinator has a higher rank
    attempt: NextAttempt
    listed: ParticipantRuns  #: the members in compact form
    place: Any = None  #: the members' rendezvous; only the users of the coordinator and the members interpret it

    def __post_init__(self) -> None:
        plain(self.place)
        force_setattr(self, "listed", compact(self.listed))

    @property
    def members(self) -> tuple[ParticipantId, ...]:
        """The members, in the proposed order."""
        return expand(self.listed)


class ParticipantState(enum.StrEnum):
    """The state of a participant that has asked."""

    WANTS = "wants"
    JOINS = "joins"  # has received a decision, and connects
    PREPARED = "prepared"  # connected: accepts another decision only after Retry
    FAILED = "failed"  # could not connect
    COMMITTED = "committed"
    REFUSED = "refused"  # its last call was rejected
    OUT = "out"  # excluded: the others continued without it


_HOLDING: Final = (
    ParticipantState.JOINS,
    ParticipantState.PREPARED,
    ParticipantState.FAILED,
    ParticipantState.COMMITTED,
)


@final
class StatusReport(Message, frozen=True):
    """The whole state of a participant."""

    state: ParticipantState
    attempt: Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
    proposal: ParticipantRuns | None = None  #: in compact form; None: all ranks
    wait: Seconds | None = None  #: for the calls of others; None: no limit
    decision: View | None = None
    why: Reason = ""
    mistake: bool = False  #: as in Rejected

    def __post_init__(self) -> None:
        _cut_reason(self)
        if self.proposal is not None:
            force_setattr(self, "proposal", compact(self.proposal))
        holds = self.state in _HOLDING
        if holds != (self.decision is not None):
            raise ValueError(f"state {self.state} goes {'with a' if holds else 'without'} decision")


class _Order(TaggedMessage, frozen=True):
    """An order of the coordinator to a participant."""

    def __post_init__(self) -> None:
        _cut_reason(self)


@final
class Prepare(_Order, frozen=True):
    """Connect the members, then call ``prepared`` or ``failed``."""

    decision: View


@final
class Commit(_Order, frozen=True):
    """All members are prepared: the new comm may be used."""

    key: Key


@final
class Retry(_Order, frozen=True):
    """Drop the connections of this decision. The participant returns to WANTS by itself."""

    key: Key
    attempt: NextAttempt
    why: Reason


@final
class Finalized(_Order, frozen=True):
    """All reachable members have taken the decision: this rank may leave the channel."""

    key: Key


@final
class Rejected(_Order, frozen=True):
    """The calls up to this attempt failed without a decision, on all ranks. The ranks may call again."""

    attempt: NextAttempt
    why: Reason
    mistake: bool  #: whether the proposals are at fault, rather than the connections


@final
class Excluded(_Order, frozen=True):
    """The others continue without this participant. A comm that the participant has committed to is void."""

    why: Reason


CoordinatorOrder: TypeAlias = Prepare | Commit | Retry | Finalized | Rejected | Excluded


def _cut_reason(message: StatusReport | _Order) -> None:
    """Cut the reason, which may be the text of any exception, to the length that a receiver accepts."""
    why = getattr(message, "why", "")
    if len(why) > MAX_TEXT:
        force_setattr(message, "why", why[:MAX_TEXT])


def describe_participant(who: ParticipantId) -> str:
    """A participant in a readable text."""
    return f"rank {who}" if isinstance(who, int) else f"newcomer {who!r}"


def describe_many(people: Sequence[ParticipantId]) -> str:
    """At most ``SHOWN`` participants in a readable text."""
    if len(people) <= SHOWN:
        return repr(list(people))
    return f"[{', '.join(map(repr, people[:SHOWN]))}, ... {len(people)} in all]"


def check_proposal(proposal: Sequence[object], ranks: Collection[ParticipantId]) -> tuple[ParticipantId, ...]:
    """The checked proposal.

    Raises: MessageError, a ValueError: it is empty or too long, or has a participant twice or a rank outside the comm.
    """
    found: tuple[ParticipantId, ...] = decode(Participants, list(proposal))
    for who in found:
        if isinstance(who, int) and who not in ranks:
            raise MessageError(f"a proposal names ranks of the comm and newcomers, got {shown(who)}")
    if len(set(found)) < len(found):
        raise MessageError(f"a proposal names each participant once, got {describe_many(found)}")
    return found


def plain(place: object) -> object:
    """A copy of ``place`` after a round trip through JSON, so that all holders of a decision have equal ones.

    Raises: ValueError: JSON cannot carry ``place``, or the text is too long.
    """
    try:
        text = json.dumps(place, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("a place is something that JSON can carry") from None
    if len(text) > MAX_PLACE:
        raise ValueError(f"a place has at most {MAX_PLACE} characters as JSON, got {len(text)}")
    found: object = json.loads(text)
    return found
