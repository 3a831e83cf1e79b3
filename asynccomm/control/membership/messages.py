"""The messages of the membership agreement: the reports of participants and the orders of the coordinator.

Both are dicts that JSON can carry. Received messages are not trusted: :func:`parse_report` and :func:`parse_order`
raise MembershipMessageError for each message that no participant or coordinator sends.

A report always holds the whole state of its participant, so that it means the same to every coordinator, however often
it arrives.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, final

ParticipantId: TypeAlias = int | str  # a rank of the comm, or a newcomer's name
Message: TypeAlias = dict[str, object]  # a JSON object

MAX_RANK: Final = 2**31 - 1
MAX_PEOPLE: Final = 2**16  # participants in a proposal
MAX_NAME: Final = 256  # characters of a newcomer's name and of a key
MAX_TEXT: Final = 2000  # characters of a reason; longer reasons are cut
MAX_PLACE: Final = 2**16  # characters of a place as JSON
MAX_ATTEMPT: Final = 2**31  # in a report; up to twice as high in a coordinator's orders
SHOWN: Final = 16  # participants listed in a text


class MembershipMessageError(ValueError):
    """A message that no participant or coordinator of this agreement sends. The message had no effect."""


@final
class View(NamedTuple):
    """The members that continue."""

    key: str  #: unique
    by: int  #: rank of the coordinator that decided; a later coordinator has a higher rank
    attempt: int
    members: tuple[ParticipantId, ...]  #: in the proposed order
    place: object = None  #: the members' rendezvous; only the users of the coordinator and the members interpret it


class ParticipantState(enum.StrEnum):
    """The state of a participant that has asked."""

    WANTS = "wants"
    JOINS = "joins"  # has received a decision, and connects
    PREPARED = "prepared"  # connected: accepts another decision only after Retry
    FAILED = "failed"  # could not connect
    COMMITTED = "committed"
    REFUSED = "refused"  # its last call was rejected
    OUT = "out"  # excluded: the others continued without it


@final
class StatusReport(NamedTuple):
    """The whole state of a participant."""

    state: ParticipantState
    attempt: int
    proposal: tuple[ParticipantId, ...] | None = None  #: None: all ranks
    wait: float = math.inf  #: seconds to wait for the calls of others
    decision: View | None = None
    why: str = ""
    mistake: bool = False  #: as in Rejected


@final
class Prepare(NamedTuple):
    """Connect the members, then call ``prepared`` or ``failed``."""

    decision: View


@final
class Commit(NamedTuple):
    """All members are prepared: the new comm may be used."""

    key: str


@final
class Retry(NamedTuple):
    """Drop the connections of this decision. The participant returns to WANTS by itself."""

    key: str
    attempt: int  #: the next attempt
    why: str


@final
class Finalized(NamedTuple):
    """All reachable members have taken the decision: this rank may leave the channel."""

    key: str


@final
class Rejected(NamedTuple):
    """The calls up to this attempt failed without a decision, on all ranks. The ranks may call again."""

    attempt: int
    why: str
    mistake: bool  #: whether the proposals are at fault, rather than the connections


@final
class Excluded(NamedTuple):
    """The others continue without this participant. A comm that the participant has committed to is void."""

    why: str


CoordinatorOrder: TypeAlias = Prepare | Commit | Retry | Finalized | Rejected | Excluded


def describe_participant(who: ParticipantId) -> str:
    """A participant in a readable text."""
    return f"rank {who}" if isinstance(who, int) else f"newcomer {who!r}"


def describe_many(people: Sequence[ParticipantId]) -> str:
    """At most ``SHOWN`` participants in a readable text."""
    if len(people) <= SHOWN:
        return repr(list(people))
    return f"[{', '.join(map(repr, people[:SHOWN]))}, ... {len(people)} in all]"


def check_proposal(proposal: Sequence[object], ranks: Collection[int]) -> tuple[ParticipantId, ...]:
    """The checked proposal. Raises: ValueError: it is empty, or has a participant twice or a rank outside the comm."""
    if not 0 < len(proposal) <= MAX_PEOPLE:
        raise ValueError(f"a proposal names 1 to {MAX_PEOPLE} participants, got {len(proposal)}")
    found: list[ParticipantId] = []
    for who in proposal:
        if isinstance(who, bool) or not isinstance(who, int | str):
            raise ValueError(f"a participant is a rank or a newcomer's name, got a {type(who).__name__}")
        if isinstance(who, str) and not 0 < len(who) <= MAX_NAME:
            raise ValueError(f"a newcomer's name has 1 to {MAX_NAME} characters, got {len(who)}")
        if isinstance(who, int) and who not in ranks:
            raise ValueError(f"{_short(who)} is not a rank of the comm")
        found.append(who)
    if len(set(found)) < len(found):
        raise ValueError("a proposal names each participant once")
    return tuple(found)


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


def report_message(report: StatusReport) -> Message:
    return {
        "state": report.state.value,
        "attempt": report.attempt,
        "proposal": None if report.proposal is None else list(report.proposal),
        "wait": None if math.isinf(report.wait) else report.wait,
        "decision": None if report.decision is None else _decision_message(report.decision),
        "why": report.why[:MAX_TEXT],
        "mistake": report.mistake,
    }


def parse_report(message: object, who: ParticipantId, ranks: Collection[int]) -> StatusReport:
    """The report of ``who`` to the coordinator of a comm with these ranks.

    Raises: MembershipMessageError.
    """
    fields = _Fields(message)
    try:
        state = ParticipantState(fields.text("state", MAX_NAME))
    except ValueError:
        raise MembershipMessageError("a report with no state that there is") from None
    wait = fields.get("wait")
    if wait is None:
        wait = math.inf
    elif isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
        raise MembershipMessageError("a wait is seconds, or null")
    proposal, decision = fields.get("proposal"), fields.get("decision")
    holds = state in (
        ParticipantState.JOINS,
        ParticipantState.PREPARED,
        ParticipantState.FAILED,
        ParticipantState.COMMITTED,
    )
    if holds != (decision is not None):
        raise MembershipMessageError(f"{state} goes {'with a' if holds else 'without'} decision")
    report = StatusReport(
        state=state,
        attempt=fields.number("attempt", MAX_ATTEMPT),
        proposal=None if proposal is None else _people(proposal, ranks),
        wait=_seconds(wait),
        decision=None if decision is None else _parse_decision(decision, ranks),
        why=fields.text("why", MAX_TEXT),
        mistake=fields.flag("mistake"),
    )
    if report.decision is not None and who not in report.decision.members:
        raise MembershipMessageError(f"{describe_participant(who)} holds a decision that is not for it")
    return report


def order_message(order: CoordinatorOrder) -> Message:
    match order:
        case Prepare(decision):
            return {"say": "decided", "decision": _decision_message(decision)}
        case Commit(key):
            return {"say": "committed", "key": key}
        case Retry(key, attempt, why):
            return {"say": "again", "key": key, "attempt": attempt, "why": why[:MAX_TEXT]}
        case Finalized(key):
            return {"say": "over", "key": key}
        case Rejected(attempt, why, mistake):
            return {"say": "refused", "attempt": attempt, "why": why[:MAX_TEXT], "mistake": mistake}
        case Excluded(why):
            return {"say": "left out", "why": why[:MAX_TEXT]}


def parse_order(message: object, ranks: Collection[int]) -> CoordinatorOrder:
    """The order of a coordinator to a participant in a comm with these ranks.

    Raises: MembershipMessageError.
    """
    fields = _Fields(message)
    say = fields.get("say")
    if say == "decided":
        return Prepare(_parse_decision(fields.get("decision"), ranks))
    if say == "committed":
        return Commit(fields.text("key", MAX_NAME))
    if say == "again":
        return Retry(
            fields.text("key", MAX_NAME), fields.number("attempt", 2 * MAX_ATTEMPT), fields.text("why", MAX_TEXT)
        )
    if say == "over":
        return Finalized(fields.text("key", MAX_NAME))
    if say == "refused":
        return Rejected(fields.number("attempt", 2 * MAX_ATTEMPT), fields.text("why", MAX_TEXT), fields.flag("mistake"))
    if say == "left out":
        return Excluded(fields.text("why", MAX_TEXT))
    raise MembershipMessageError("an order that there is not")


def _decision_message(decision: View) -> Message:
    return {**decision._asdict(), "members": list(decision.members)}


def _parse_decision(message: object, ranks: Collection[int]) -> View:
    fields = _Fields(message)
    try:
        place = plain(fields.get("place"))
    except ValueError as exc:
        raise MembershipMessageError(str(exc)) from None
    return View(
        key=fields.text("key", MAX_NAME),
        by=fields.number("by", MAX_RANK),
        attempt=fields.number("attempt", 2 * MAX_ATTEMPT),
        members=_people(fields.get("members"), ranks),
        place=place,
    )


def _people(value: object, ranks: Collection[int]) -> tuple[ParticipantId, ...]:
    if not isinstance(value, list):
        raise MembershipMessageError("participants are a list")
    try:
        return check_proposal(value, ranks)
    except ValueError as exc:
        raise MembershipMessageError(str(exc)) from None


def _seconds(wait: float) -> float:
    try:
        return float(wait)
    except OverflowError:  # an int may be larger than any float
        raise MembershipMessageError("a wait that no clock will see the end of") from None


def _short(number: int) -> str:
    return str(number) if abs(number) <= MAX_RANK else "so large a number"


@final
class _Fields:
    """A message with unchecked fields."""

    __slots__ = ("_message",)

    def __init__(self, message: object) -> None:
        if not isinstance(message, Mapping):
            raise MembershipMessageError(f"a message is a dict, got a {type(message).__name__}")
        self._message: Mapping[object, object] = message

    def get(self, name: str) -> object:
        if name not in self._message:
            raise MembershipMessageError(f"a message without {name!r}")
        return self._message[name]

    def text(self, name: str, most: int) -> str:
        value = self.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise MembershipMessageError(f"{name!r} is a text of at most {most} characters")
        return value

    def number(self, name: str, most: int) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise MembershipMessageError(f"{name!r} is a number from 0 to {most}")
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise MembershipMessageError(f"{name!r} is true or false")
        return value
