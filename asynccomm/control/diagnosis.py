"""The states of the ranks of a comm: as data, and as readable text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self, cast, final

from asynccomm.control.transport.schema import decode


@final
@dataclass(frozen=True, slots=True)
class PendingOp:
    """An operation in flight, or the last operation called."""

    op: str
    seq: int  #: number on the comm; -1: not sent yet
    age: float  #: seconds since the call
    site: str  #: place of the call; empty: unknown
    p2p: bool = False  #: whether it is no part of the sequence of collectives

    def __str__(self) -> str:
        number = f" #{self.seq}" if self.seq >= 0 else ""
        return f"{self.op}{number} {self.age:.1f} s ago" + (f" at {self.site}" if self.site else "")


@final
@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank."""

    rank: int
    answered: bool  #: if False, only ``silent``, ``gone``, ``reachable`` and ``relay`` are known
    silent: float | None = None  #: seconds since the last message of a rank that did not answer; None: unknown
    gone: str | None = None  #: reason of the loss; empty: an orderly leave; None: not gone
    reachable: bool = True  #: whether the rank has a control channel
    #: the rank that does not answer and would have to pass messages on to this one; -1: it is not in the comm
    relay: int | None = None
    state: str = ""  #: "open", "closed", or "broken: " with the reason
    host: str = ""
    pid: int = 0
    collectives: int = 0  #: collectives issued so far
    finished: int = 0  #: number of them that are done
    messages: int = 0  #: point-to-point operations issued so far
    nbytes: int = 0  #: bytes of the operations sent so far
    straggler: int = -1  #: the rank that came last the most, by the comm's metrics; -1: none, or no metrics
    last: PendingOp | None = None  #: the operation called last
    pending: tuple[PendingOp, ...] = ()  #: the oldest operations in flight
    in_flight: int = 0  #: number of all operations in flight
    blocked: bool = False  #: whether the event loop failed to run a callback in time
    issued: int = 0  #: operations without an agreed order yet, under the requested tag
    stacks: str = ""  #: stacks of threads and tasks, if requested
    problem: str = ""  #: why the rank could not answer with its state

    @classmethod
    def from_answer(cls, rank: int, answer: Mapping[str, Any]) -> Self:
        """The state in a rank's answer, empty if the rank has no such comm (any more). Raises: MessageError."""
        known = {key: value for key, value in answer.items() if key in _ANSWERED}
        return cast(Self, decode(cls, {"state": "closed", **known, "rank": rank, "answered": True}))

    @property
    def doing(self) -> str:
        """The rank's last operation, and whether the rank can make progress, in one line."""
        if self.gone is not None:
            return f"is gone: {self.gone}" if self.gone else "has left"
        if not self.reachable:
            return "has no control channel"
        if self.relay is not None:
            relay = f"rank {self.relay}" if self.relay >= 0 else "a rank outside this comm"
            return f"could not be asked: {relay}, which passes messages on to it, does not answer"
        if not self.answered:
            heard = "" if self.silent is None else f": it was last heard {self.silent:.1f} s ago"
            return f"does not answer{heard}; it is stopped, or something holds its interpreter lock"
        if self.problem:
            return f"could not report its state: {self.problem}"
        parts = []
        if self.state not in ("", "open"):
            parts.append(f"is {self.state}")
        if self.last is None:
            parts.append("has called nothing")
        else:
            waits = any(one.seq == self.last.seq and one.op == self.last.op for one in self.pending)
            done = not waits and self.in_flight <= len(self.pending)  # else it may be one that is not listed
            parts.append(f"called last {self.last}{', which is done' if done else ''}")
        if self.blocked:
            parts.append("its event loop is blocked")
        return "; ".join(parts)

    def __str__(self) -> str:
        where = f" (process {self.pid} on {self.host})" if self.pid else ""
        lines = [f"rank {self.rank}{where} {self.doing}"]
        lines += [f"    waits for {one}" for one in self.pending]
        if self.in_flight > len(self.pending):
            lines.append(f"    and for {self.in_flight - len(self.pending)} more")
        lines += [f"    | {line}" for line in self.stacks.splitlines()]
        return "\n".join(lines)


# all fields of an answer that describe the rank itself
_ANSWERED: Final = {field.name for field in fields(RankState)} - {"silent", "gone", "reachable", "relay"}


@final
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The states of all ranks of a comm; ``str()`` gives a readable text."""

    comm: str
    ranks: tuple[RankState, ...]  #: in rank order

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks that have issued fewer collectives than others, are gone, or did not answer when asked."""
        most = max((state.collectives for state in self.ranks), default=0)
        asked = [state for state in self.ranks if state.relay is None]
        return tuple(s.rank for s in asked if not s.answered or s.gone is not None or s.collectives < most)

    def __str__(self) -> str:
        count = max((state.collectives for state in self.ranks), default=0)
        head = f"comm {self.comm!r}, {len(self.ranks)} ranks, {count} collectives issued"
        if self.behind:
            head += f"; behind: ranks {list(self.behind)}"
        return "\n".join([head, *map(str, self.ranks)])
