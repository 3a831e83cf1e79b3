"""A job without processes: every message, death and silence of an agreement happens when the test says so."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from asynccomm.control.membership.coordinator import Coordinator
from asynccomm.control.membership.messages import (
    Commit,
    CoordinatorOrder,
    Excluded,
    Prepare,
    Rejected,
    Retry,
    StatusReport,
)
from asynccomm.control.membership.participant import Participant
from asynccomm.control.runs import ParticipantId
from asynccomm.control.transport.schema import dumps, loads

LEFT = "left"  # reported by a rank that has closed the comm
PRESENCE = "presence"  # reported by a rank that has a new connection


class Process:
    """A rank of the job, or a newcomer."""

    def __init__(self, job: Job, who: ParticipantId) -> None:
        self.job, self.who = job, who
        self.participant = Participant(who, job.ranks) if who in job.ranks or isinstance(who, str) else None
        self.alive = True
        self.frozen = False
        self.left = False
        self.detached = False  # the rank that relayed to it is lost
        self.calls = 0
        self.knows_lost: set[ParticipantId] = set()
        self.coordinator: Coordinator | None = None
        self.boss: int = -1  # whom it is attached to
        self.up: dict[int, deque[str]] = {}  # to each coordinator
        self.down: dict[int, deque[str]] = {}  # from each
        self.outcome = ""
        self.comm: tuple[str, tuple[ParticipantId, ...]] | None = None  # that its user has got, and that is not void

    def report(self) -> None:
        """Tell the coordinator how things are."""
        if self.participant is not None:
            said = LEFT if self.left else self.participant.report()
            self.up[self.boss].append(dumps(said))

    def attach(self) -> None:
        """To the lowest rank that it does not know to be lost."""
        ranks = (rank for rank in self.job.everybody if isinstance(rank, int) and rank not in self.knows_lost)
        boss = min(ranks, default=self.boss)  # a newcomer may be alone
        if boss != self.boss:
            if self.boss >= 0:
                self.job.seen["unread"] += bool(self.down[self.boss])
            self.boss, self.detached = boss, False
            self.up.setdefault(boss, deque()).clear()
            self.down.setdefault(boss, deque()).clear()
            if boss == self.who:
                self.coordinate()
            self.report()

    def coordinate(self) -> None:
        job = self.job
        assert isinstance(self.who, int)
        newcomers = [p.who for p in job.everybody.values() if isinstance(p.who, str) and p.who not in self.knows_lost]
        self.coordinator = Coordinator(
            self.who,
            job.ranks,
            patience=job.patience,
            successor=self.who != min(r for r in job.everybody if isinstance(r, int)),
            gone={who: "was lost" for who in self.knows_lost if who in job.ranks or isinstance(who, str)},
            newcomers=[name for name in newcomers if isinstance(name, str)] if job.newcomers_known else (),
            place=lambda members: {"at": self.who, "of": len(members)},
            fresh=lambda: f"key {next(job.keys)}",
        )

    @property
    def acts(self) -> bool:
        return self.alive and not self.frozen


class Job:
    """All processes, what is under way between them, and a clock.

    Args:
        ranks: of the comm.
        outsiders: ranks of the job that are not of the comm.
        wait: of all calls.
        patience: of the coordinators. If it is infinite and nobody is said to be silent, no comm may become void.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        outsiders: Sequence[int] = (),
        newcomers: Sequence[str] = (),
        *,
        wait: float = math.inf,
        patience: float = math.inf,
        proposal: Sequence[ParticipantId] | None = None,
        newcomers_known: bool = True,
    ) -> None:
        self.ranks, self.wait, self.patience, self.proposal = tuple(ranks), wait, patience, proposal
        self.newcomers_known = newcomers_known
        self.calm = math.isinf(patience)
        self.now = 0.0
        self.keys = itertools.count()
        self.everybody: dict[ParticipantId, Process] = {}
        self.ever_prepared: dict[str, set[ParticipantId]] = {}
        self.seen: Counter[str] = Counter()  # what happened, for tests of the tests
        self.proposals: dict[ParticipantId, Sequence[ParticipantId] | None] = {}  # that differ from the job's
        for who in [*sorted([*ranks, *outsiders]), *newcomers]:
            self.everybody[who] = Process(self, who)
        for process in self.everybody.values():
            process.attach()

    # what may happen

    def actions(self) -> list[Callable[[], None]]:
        """Messages, connects and news that may come next; each of them brings the job forward."""
        found: list[Callable[[], None]] = []
        for p in self.everybody.values():
            for boss, queue in p.up.items():
                chief = self.everybody[boss]
                may_arrive = p.alive or p.who not in chief.knows_lost  # what the dead have sent may arrive or not
                hears = chief.acts and chief.coordinator is not None
                if p.detached and p.acts and boss == p.boss and hears:
                    found.append(lambda p=p: self.reattaches(p))
                elif queue and boss == p.boss and hears and may_arrive:
                    found.append(lambda p=p: self.carry_up(p))
            if not p.acts:
                continue
            if p.down.get(p.boss):
                found.append(lambda p=p: self.carry_down(p))
            if p.participant is not None and self.joining(p) and not p.left:
                found.append(lambda p=p: self.connects(p))
            for q in self.everybody.values():
                if not q.alive and q.who not in p.knows_lost:
                    found += [lambda p=p, q=q: self.learns(p, q)] * (3 if p.down.get(p.boss) else 1)
        return found

    def carry_up(self, p: Process) -> None:
        chief = self.everybody[p.boss]
        assert chief.coordinator is not None
        said = p.up[p.boss].popleft()
        if said == PRESENCE:
            chief.coordinator.reattached(p.who)
            return
        if said == dumps(LEFT):
            chief.coordinator.left(p.who)
        else:
            chief.coordinator.on_report(p.who, loads(StatusReport | None, said), self.now)
        self.advance(chief)

    def advance(self, chief: Process) -> None:
        coordinator = chief.coordinator
        assert coordinator is not None
        for who, order in coordinator.advance(self.now):
            self.check_order(chief, order)
            p = self.everybody[who]
            if p.boss == chief.who and not p.detached:
                p.down[p.boss].append(dumps(order))

    def carry_down(self, p: Process) -> None:
        if p.participant is None or p.left:
            p.down[p.boss].popleft()
            return
        held = p.participant.decision
        event = p.participant.on_order(loads(CoordinatorOrder, p.down[p.boss].popleft()))
        self.seen[type(event).__name__] += 1
        match event:
            case None:
                return
            case Commit():
                assert held is not None
                self.check_commit(p, held.key, held.members)
                p.comm, p.outcome = (held.key, held.members), "committed"
            case Rejected():
                p.outcome = "refused"
            case Excluded():
                if p.comm is not None:
                    self.seen["void"] += 1
                    assert not self.calm, f"{p.who} had committed {p.comm}"
                p.comm, p.outcome = None, "left out"
        p.report()

    def joining(self, p: Process) -> bool:
        assert p.participant is not None
        said = p.participant.report()
        return said is not None and said.state == "joins"

    def connects(self, p: Process, why: str = "") -> None:
        assert p.participant is not None
        assert p.participant.decision is not None
        key = p.participant.decision.key
        if why:
            p.participant.failed(key, why)
            self.seen["failed"] += 1
        else:
            p.participant.prepared(key)
            self.ever_prepared.setdefault(key, set()).add(p.who)
        p.report()

    def learns(self, p: Process, dead: Process) -> None:
        """``p`` hears of a death; what the dead coordinator had sent and p has not read is gone."""
        p.knows_lost.add(dead.who)
        p.attach()
        if p.coordinator is not None:
            p.coordinator.lost(dead.who)
            self.advance(p)

    # what tests make happen

    def asks(self, p: Process) -> None:
        assert p.participant is not None
        p.calls += 1
        p.outcome = ""
        p.participant.ask(self.proposals.get(p.who, self.proposal), self.wait)
        p.report()

    def can_ask(self, p: Process) -> bool:
        return p.acts and not p.left and p.participant is not None and p.calls == 0

    def dies(self, p: Process) -> None:
        p.alive, p.comm = False, None
        if p.coordinator is not None:
            self.seen["coordinator died"] += 1

    def leaves(self, p: Process) -> None:
        """It closes the comm, and stays on the channel."""
        assert p.participant is not None
        p.left = True
        p.outcome = "left"
        p.report()

    def exits(self, p: Process) -> None:
        """A rank whose decision is over leaves the channel: nobody who lives may need it any more."""
        assert p.participant is not None
        assert p.participant.can_leave
        if p.comm is not None and self.calm:
            for who in p.comm[1]:
                other = self.everybody[who]
                assert not other.alive or other.left or other.comm == p.comm, f"{p.who} leaves before {who} knows"
        self.seen["exited"] += 1
        self.dies(p)

    def detaches(self, p: Process) -> None:
        """A rank that relayed to ``p`` is lost, with all that was under way."""
        self.seen["detached"] += bool(p.down[p.boss] or p.up[p.boss])
        p.detached = True
        p.down[p.boss].clear()
        p.up[p.boss].clear()

    def reattaches(self, p: Process) -> None:
        """The coordinator can reach ``p`` again, before it reads that."""
        p.detached = False
        p.up[p.boss].append(PRESENCE)
        p.report()

    def is_silent(self, p: Process) -> None:
        for chief in self.everybody.values():
            if chief.acts and chief.coordinator is not None and p.who not in chief.knows_lost:
                chief.coordinator.silent(p.who)
                self.advance(chief)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for chief in self.everybody.values():
            if chief.acts and chief.coordinator is not None:
                due = chief.coordinator.due
                if due is not None and due <= self.now:
                    self.advance(chief)
                    left = chief.coordinator.due
                    assert left is None or left > self.now, "due again at once"

    def next_due(self) -> float | None:
        dues = [p.coordinator.due for p in self.everybody.values() if p.acts and p.coordinator is not None]
        return min((due for due in dues if due is not None), default=None)

    def settle(self, thaw: bool = True) -> None:
        """No more deaths, nobody sleeps (unless told), all that can ask: everything comes to an end."""
        for p in self.everybody.values():
            p.frozen = p.frozen and not thaw
            if self.can_ask(p):
                self.asks(p)
        steps = 0
        while True:
            actions = self.actions()
            if actions:
                for action in actions[:1]:
                    action()
            elif (due := self.next_due()) is not None:
                self.tick(max(0.0, due - self.now))
            else:
                break
            steps += 1
            assert steps < 3000, "it does not end"
        if thaw:
            self.check_end()

    # what must hold

    def living(self) -> list[Process]:
        return [p for p in self.everybody.values() if p.alive and p.participant is not None]

    def check_order(self, chief: Process, order: object) -> None:
        if isinstance(order, Prepare):
            members = order.decision.members
            assert members
            assert not chief.knows_lost & set(members)
            asked = [self.proposals.get(r, self.proposal) for r in self.ranks]
            assert any([w for w in (want or self.ranks) if w in members] == list(members) for want in asked)
        if isinstance(order, Retry) and self.calm:
            assert not any(p.comm and p.comm[0] == order.key for p in self.living()), "again, and it was committed"

    def check_commit(self, p: Process, key: str, members: tuple[ParticipantId, ...]) -> None:
        assert self.ever_prepared[key] == set(members), "committed, and not all were prepared"
        if self.calm:
            for other in self.living():
                assert other.comm is None or other.comm[0] == key, f"{other.who} has {other.comm}, {p.who} gets {key}"

    def check_end(self) -> None:
        living = [p for p in self.living() if not p.left]
        assert len({p.comm for p in living if p.comm is not None}) <= 1, "split brain"
        for p in living:
            assert p.participant is not None
            # a newcomer waits on while ranks may call again, and where nobody coordinates any more
            ranks = [q for q in self.everybody.values() if q.alive and isinstance(q.who, int)]
            waits = isinstance(p.who, str) and (not ranks or any(q.outcome == "refused" for q in ranks))
            assert p.outcome or waits, f"{p.who} hears nothing: {p.participant.report()}"
            if p.comm is not None:
                alone = not any(q.alive and isinstance(q.who, int) for q in self.everybody.values())
                assert p.participant.can_leave or alone, f"{p.who} must_stay for ever"
                assert p.participant.committed
            assert (p.outcome == "committed") == (p.comm is not None)
