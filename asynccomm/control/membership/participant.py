"""A participant's side of the membership agreement; the protocol is in
:mod:`asynccomm.control.membership.coordinator`.

States and transitions (orders are passed to ``on_order``)::

    idle       ask() -> wants
    wants      Prepare -> joins, Rejected -> refused, Excluded -> out
    joins      prepared() -> prepared, failed() -> failed, Retry -> wants, Excluded -> out
    failed     Retry -> wants, Excluded -> out
    prepared   Commit -> committed, Retry -> wants, Excluded -> out
    committed  Finalized -> committed, and may leave; Excluded -> out
    refused    ask() -> wants
    out        is final

A request or a prepared decision cannot be withdrawn: when the caller stops waiting, the agreement goes on. Only a
participant that leaves the comm or is lost drops out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import final

from asynccomm.control.membership.messages import (
    Commit,
    CoordinatorOrder,
    Excluded,
    Finalized,
    ParticipantState,
    Prepare,
    Rejected,
    Retry,
    StatusReport,
    View,
    check_proposal,
    describe_many,
)
from asynccomm.control.runs import ParticipantId, Runs, compact
from asynccomm.control.transport.schema import MessageError

_HOLDS = (ParticipantState.JOINS, ParticipantState.FAILED, ParticipantState.PREPARED)


@final
class Participant:
    """One participant in the agreement of one comm. It is kept as long as its process is on the channel.

    Args:
        who: the rank in the comm, or the name of a newcomer.
        ranks: all ranks of the comm, in order.
    """

    __slots__ = ("_attempt", "_decision", "_over", "_proposal", "_ranks", "_refused", "_state", "_wait", "_who", "_why")

    def __init__(self, who: ParticipantId, ranks: Iterable[int]) -> None:
        self._who = who
        self._ranks = frozenset(ranks)
        self._state: ParticipantState | None = None
        self._attempt = 0
        self._proposal: Runs | None = None
        self._wait = math.inf
        self._decision: View | None = None
        self._refused: Rejected | None = None
        self._why = ""  # the reason of a failure
        self._over = False

    @property
    def decision(self) -> View | None:
        """The decision received last, unless dropped."""
        return self._decision

    @property
    def asking(self) -> bool:
        """Whether a call is in flight: from ``ask`` until Commit, Rejected or Excluded."""
        return self._state is ParticipantState.WANTS or self._state in _HOLDS

    @property
    def committed(self) -> bool:
        return self._state is ParticipantState.COMMITTED

    @property
    def can_leave(self) -> bool:
        """Whether the participant may leave the channel: it is not committed, or has received Finalized."""
        return not self.committed or self._over

    def ask(self, proposal: Sequence[ParticipantId] | None, wait: float = math.inf) -> None:
        """Ask to continue the comm.

        Args:
            proposal: the next members, in the order of the new ranks; None: all ranks. Those of newcomers are ignored.
            wait: seconds to wait for the calls of other participants. The shortest wait of all asking ranks applies.

        Raises: ValueError: the proposal or the wait is invalid.
        """
        assert self._state in (None, ParticipantState.REFUSED), f"asked while {self._state}"
        checked = None if proposal is None else compact(check_proposal(proposal, self._ranks))
        if not wait >= 0:
            raise ValueError(f"wait must be at least 0 seconds, got {wait}")
        self._state, self._proposal, self._wait = ParticipantState.WANTS, checked, float(wait)
        self._refused = None

    def prepared(self, key: str) -> None:
        """Note that all members of decision ``key`` are connected. No effect if the decision was dropped."""
        if self._state is ParticipantState.JOINS and self._holds(key):
            self._state = ParticipantState.PREPARED

    def failed(self, key: str, why: str) -> None:
        """Note that the members of ``key`` could not connect. No effect if ``key`` was dropped, or is prepared."""
        if self._state is ParticipantState.JOINS and self._holds(key):
            self._state, self._why = ParticipantState.FAILED, why

    def report(self) -> StatusReport | None:
        """The report for the coordinator; None, which is sent as well: there is nothing to report."""
        if self._state is None:
            return None
        if self._state is ParticipantState.REFUSED:
            assert self._refused is not None
            return StatusReport(
                ParticipantState.REFUSED, self._refused.attempt, why=self._refused.why, mistake=self._refused.mistake
            )
        wait = None if math.isinf(self._wait) else self._wait
        return StatusReport(self._state, self._attempt, self._proposal, wait, self._decision, self._why)

    def on_order(self, order: CoordinatorOrder) -> CoordinatorOrder | None:
        """Apply an order of the coordinator, and return it; None: the order is out of date, and has no effect.

        Raises:
            MessageError: no coordinator of this agreement sends this order in this state. The order had no effect.
        """
        match order:
            case Prepare(decision):
                check_proposal(decision.members, self._ranks)
                if self._state is not ParticipantState.WANTS:
                    return None
                if self._who not in decision.members:
                    raise MessageError(f"a decision for other participants: {describe_many(decision.members)}")
                self._state, self._decision = ParticipantState.JOINS, decision
            case Commit(key):
                if self.committed and self._holds(key):
                    return None  # sent again over a new connection
                if self._state is not ParticipantState.PREPARED or not self._holds(key):
                    raise MessageError(f"a commit of {key!r}, which is not prepared here")
                self._state = ParticipantState.COMMITTED
            case Retry(key, attempt):
                if self.committed and self._holds(key):
                    raise MessageError(f"{key!r} is committed here, and cannot be undone")
                if not self._holds(key):
                    return None
                self._state, self._attempt = ParticipantState.WANTS, max(attempt, self._attempt)
                self._decision, self._why = None, ""
            case Finalized(key):
                if not self.committed or not self._holds(key):
                    raise MessageError(f"{key!r} is over, and was never committed here")
                self._over = True
            case Rejected(attempt):
                if self._state is not ParticipantState.WANTS or attempt < self._attempt:
                    return None
                self._state, self._refused, self._attempt = ParticipantState.REFUSED, order, attempt + 1
            case Excluded():
                if self._state in (None, ParticipantState.REFUSED, ParticipantState.OUT):
                    return None
                self._state, self._decision = ParticipantState.OUT, None
        return order

    def _holds(self, key: str) -> bool:
        return self._decision is not None and self._decision.key == key
