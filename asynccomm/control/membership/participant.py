"""A participant's side of the agreement on who goes on; the protocol is in
:mod:`asynccomm.control.membership.coordinator`.

States, and what moves them (``hear`` unless it says otherwise)::

    idle       ask() -> wants
    wants      Decided -> joins, Refused -> refused, LeftOut -> out
    joins      prepared() -> prepared, failed() -> failed, Again -> wants, LeftOut -> out
    failed     Again -> wants, LeftOut -> out
    prepared   Committed -> committed, Again -> wants, LeftOut -> out
    committed  Over -> committed, and may leave; LeftOut -> out
    refused    ask() -> wants
    out        is final

Nobody can take back what was asked or prepared: whoever stops waiting for it stops waiting, and the agreement goes on.
Only who leaves the comm or is lost takes part no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import final

from asynccomm.control.membership.messages import (
    Again,
    Committed,
    Decided,
    Decision,
    GarbledError,
    LeftOut,
    Message,
    Order,
    Over,
    Refused,
    Report,
    State,
    Who,
    check_proposal,
    parse_order,
    report_message,
)

_HOLDS = (State.JOINS, State.FAILED, State.PREPARED)


@final
class Candidate:
    """One participant in the agreement of one comm. It is kept as long as its process is on the channel.

    Args:
        who: its rank of the comm, or its name if it is a newcomer.
        ranks: all ranks of the comm, in order.
    """

    __slots__ = ("_attempt", "_decision", "_over", "_proposal", "_ranks", "_refused", "_state", "_wait", "_who", "_why")

    def __init__(self, who: Who, ranks: Iterable[int]) -> None:
        self._who = who
        self._ranks = frozenset(ranks)
        self._state: State | None = None
        self._attempt = 0
        self._proposal: tuple[Who, ...] | None = None
        self._wait = math.inf
        self._decision: Decision | None = None
        self._refused: Refused | None = None
        self._why = ""  # it failed
        self._over = False

    @property
    def decision(self) -> Decision | None:
        """What it has heard and not dropped."""
        return self._decision

    @property
    def asking(self) -> bool:
        """Whether a call is under way: from ``ask`` until Committed, Refused or LeftOut."""
        return self._state is State.WANTS or self._state in _HOLDS

    @property
    def committed(self) -> bool:
        return self._state is State.COMMITTED

    @property
    def left_out(self) -> bool:
        """Whether the others went on without it, for good. A newcomer may come again under another name."""
        return self._state is State.OUT

    @property
    def may_leave(self) -> bool:
        """Whether nobody needs it on the channel: it has not committed, or all others know of it."""
        return not self.committed or self._over

    def ask(self, proposal: Sequence[Who] | None, wait: float = math.inf) -> None:
        """Want to go on.

        Args:
            proposal: who is to go on, in the order of the new ranks; None: all ranks. A newcomer's counts for nothing.
            wait: seconds that it waits for others to ask, too. The shortest of all that ask counts.

        Raises: ValueError: no such proposal or wait is possible.
        """
        assert self._state in (None, State.REFUSED), f"asked while {self._state}"
        checked = None if proposal is None else check_proposal(proposal, self._ranks)
        if not wait >= 0:
            raise ValueError(f"wait must be at least 0 seconds, got {wait}")
        self._state, self._proposal, self._wait = State.WANTS, checked, float(wait)
        self._refused = None

    def prepared(self, key: str) -> None:
        """All members of the decision ``key`` are connected. Nothing happens if that was dropped meanwhile."""
        if self._state is State.JOINS and self._holds(key):
            self._state = State.PREPARED

    def failed(self, key: str, why: str) -> None:
        """They could not be connected. Nothing happens if that was dropped meanwhile, or was prepared."""
        if self._state is State.JOINS and self._holds(key):
            self._state, self._why = State.FAILED, why

    def report(self) -> Message | None:
        """For the coordinator, also when there is nothing to report."""
        if self._state is None:
            return None
        if self._state is State.REFUSED:
            assert self._refused is not None
            said = Report(State.REFUSED, self._refused.attempt, why=self._refused.why, mistake=self._refused.mistake)
        else:
            said = Report(self._state, self._attempt, self._proposal, self._wait, self._decision, self._why)
        return report_message(said)

    def hear(self, message: object) -> Order | None:
        """What the coordinator says; None if it was said before this participant moved on.

        Raises: GarbledError: no coordinator of this agreement says this now. It changed nothing.
        """
        order = parse_order(message, self._ranks)
        match order:
            case Decided(decision):
                if self._state is not State.WANTS:
                    return None
                if self._who not in decision.members:
                    raise GarbledError("a decision that is not for this participant")
                self._state, self._decision = State.JOINS, decision
            case Committed(key):
                if self._state is not State.PREPARED or not self._holds(key):
                    raise GarbledError(f"a commit of {key!r}, which is not prepared here")
                self._state = State.COMMITTED
            case Again(key, attempt):
                if self.committed and self._holds(key):
                    raise GarbledError(f"{key!r} is committed here, and cannot be undone")
                if not self._holds(key):
                    return None
                self._state, self._attempt = State.WANTS, max(attempt, self._attempt)
                self._decision, self._why = None, ""
            case Over(key):
                if not self.committed or not self._holds(key):
                    raise GarbledError(f"{key!r} is over, and was never committed here")
                self._over = True
            case Refused(attempt):
                if self._state is not State.WANTS or attempt < self._attempt:
                    return None
                self._state, self._refused, self._attempt = State.REFUSED, order, attempt + 1
            case LeftOut():
                if self._state in (None, State.REFUSED, State.OUT):
                    return None
                self._state, self._decision = State.OUT, None
        return order

    def _holds(self, key: str) -> bool:
        return self._decision is not None and self._decision.key == key
