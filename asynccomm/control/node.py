"""One rank's place in the tree of the control channel: which way messages go, and who is gone. Without any I/O.

A message says whom it is for: a rank, ``"root"``, or ``"all"``. What is for all goes up to the root, which sends it
down to everybody; so all get such messages in one order. Each node knows the ranks below it by what has come from
there.

The end of a connection is the end of the rank behind it, unless that has said goodbye before. It is final: a rank that
was declared lost is not let in again, because the others have gone on without it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, final

from asynccomm.control.frames import Message
from asynccomm.control.roster import Roster

__all__ = ["ALL", "HERE", "ROOT", "Link", "Node"]

ALL: Final = "all"
ROOT: Final = "root"
KEPT: Final = 4096  # messages that wait for a connection to the next one above

LOST, LEFT, PULSE, HERE = "lost", "left", "pulse", "here"  # kinds that nodes handle among themselves


class Link(Protocol):
    """A connection to another rank."""

    def send(self, message: Message) -> None:
        """Put ``message`` on its way."""

    def close(self) -> None:
        """End it, after what was sent."""


@final
class Node:
    """Routes messages for rank ``rank``.

    Args:
        roster: of the job.
        deliver: called with each message for this rank.
        gone: called once with each rank that is gone, and how: empty for one that left in good order.
    """

    def __init__(
        self,
        rank: int,
        roster: Roster,
        deliver: Callable[[Message], object],
        gone: Callable[[int, str], object],
    ) -> None:
        self.rank = rank
        self.roster = roster
        self.up: Link | None = None  #: to the next one above
        self.gone: dict[int, str] = {}  #: by rank, how; empty: it left in good order
        self.heard: dict[int, float] = {}  #: when each rank below or above was last heard, as far as is known here
        self.fenced = ""  #: why the others go on without this rank, if they do
        self._deliver = deliver
        self._tell_gone = gone
        self._up_rank: int | None = None
        self._down: dict[Link, int] = {}  # connected to this one
        self._routes: dict[int, Link] = {}  # where ranks below are
        self._waiting: deque[Message] = deque(maxlen=KEPT)

    @property
    def is_root(self) -> bool:
        """Whether all messages meet here."""
        return self.roster.root(self.gone) == self.rank

    @property
    def above(self) -> int | None:
        """Whom this one should be connected to; None: it is the root."""
        return self.roster.above(self.rank, self.gone)

    @property
    def links(self) -> list[Link]:
        """All connections."""
        return [*self._down, *([] if self.up is None else [self.up])]

    @property
    def missing(self) -> list[int]:
        """At the root: the ranks that are not gone, and not connected either."""
        return [r for r in self.roster.contacts if r != self.rank and r not in self.gone and r not in self._routes]

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, to: int | str, kind: str, **content: Any) -> None:
        """Send a message; what cannot go on its way now waits for a connection, or is dropped if nobody is there."""
        self._route({"to": to, "from": self.rank, "kind": kind, **content}, None)

    def _route(self, message: Message, came_by: Link | None) -> None:
        to = message["to"]
        if to == self.rank:
            self._take(message, came_by)
        elif to == ALL and (self.is_root or (came_by is not None and came_by is self.up)):
            for link in list(self._down):
                link.send(message)
            self._take(message, came_by)
        elif to == ROOT and self.is_root:
            self._take(message, came_by)
        elif to in self._routes:
            self._routes[to].send(message)
        elif self.up is not None:
            if came_by is not self.up:
                self.up.send(message)
        elif not self.is_root:
            self._waiting.append(message)

    def _take(self, message: Message, came_by: Link | None) -> None:
        kind = message["kind"]
        if kind in (LOST, LEFT):
            self._hear_gone(message)
        elif kind != PULSE:
            self._deliver(message)

    # -- connections --------------------------------------------------------------------------------------------------

    def refusal(self, rank: int) -> str:
        """Why ``rank`` cannot be connected to this one; empty if it can."""
        if rank == self.rank or rank not in self.roster.contacts:
            return f"there is no rank {rank} to be let in"
        if rank in self.gone:
            return f"rank {rank} was given up: {self.gone[rank] or 'it has left'}"
        if rank in self._down.values():
            return f"rank {rank} is here already"
        return ""

    def welcome(self, rank: int, link: Link) -> None:
        """``rank`` has connected to this one."""
        self._down[link] = rank
        self._routes[rank] = link
        self.heard[rank] = time.monotonic()
        self.send(ROOT, HERE)
        for gone, how in self.gone.items():  # it may not have heard
            link.send(self._gone_message(gone, how, rank))

    def attach(self, rank: int, link: Link) -> None:
        """This one has connected to ``rank``, above it."""
        self.up, self._up_rank = link, rank
        self.heard[rank] = time.monotonic()
        self.send(ROOT, HERE)
        for below in self._routes:
            link.send({"to": ROOT, "from": below, "kind": HERE})
        while self._waiting:
            self._route(self._waiting.popleft(), None)

    def received(self, link: Link, message: Message) -> None:
        """A message came by ``link``. Raises: ValueError if it is none that a node could have sent."""
        to, source = message.get("to"), message.get("from")
        if not isinstance(message.get("kind"), str) or type(source) is not int or source not in self.roster.contacts:
            raise ValueError(f"no message of a control channel: {message!r:.200}")
        if type(to) is not int and to not in (ALL, ROOT):
            raise ValueError(f"no message of a control channel: {message!r:.200}")
        now = time.monotonic()
        below = self._down.get(link)
        if below is not None:
            self.heard[below] = now
            if source in self.gone:
                return  # it was on its way
            self._routes[source] = link
            if message["kind"] == PULSE:
                for rank, age in message.get("ages", {}).items():
                    if str(rank).isdecimal() and isinstance(age, (int, float)):
                        self.heard[int(rank)] = now - age
                return
            if message["kind"] == LEFT and source == below:
                self._note_gone(source, "")  # its connection ends now, before the root can have said so
        elif link is self.up and self._up_rank is not None:
            self.heard[self._up_rank] = now
            if message["kind"] == PULSE:
                return
        else:
            return  # of a connection that was given up
        self._route(message, link)

    def ended(self, link: Link, how: str) -> None:
        """A connection has ended."""
        if link is self.up:
            rank, self.up, self._up_rank = self._up_rank, None, None
            assert rank is not None
            self._declare(rank, how)
        elif (below := self._down.pop(link, None)) is not None:
            for rank in [rank for rank, route in self._routes.items() if route is link]:
                del self._routes[rank]
            self._declare(below, how)

    def _declare(self, rank: int, how: str) -> None:
        """Take ``rank`` for lost, having seen it; tell the others."""
        if rank in self.gone:
            return
        message = self._gone_message(rank, how, ROOT)
        self._note_gone(rank, how)
        if self.is_root:
            self._fan_out(message)
        else:
            self._route(message, None)

    def fence(self, why: str) -> None:
        """The others have given this rank up, and go on without it."""
        self.fenced = self.fenced or why or "the others have given it up"
        for other in self.roster.contacts:
            if other != self.rank:
                self._note_gone(other, f"it goes on without rank {self.rank}: {why}")

    def give_up(self, rank: int, how: str) -> None:
        """Take ``rank`` for lost, though its connection stands: it does not answer any more."""
        self._declare(rank, how)

    def give_up_silent(self, seconds: float) -> None:
        """Take the rank above for lost if it was not heard for so long."""
        rank = self._up_rank
        if rank is not None and (silence := self.silence(rank)) is not None and silence > seconds:
            self._declare(rank, f"it was silent for {silence:.1f} s, and others go on without it")

    def depart(self) -> None:
        """Say goodbye to all."""
        message = {"to": ALL, "from": self.rank, "kind": LEFT, "rank": self.rank}
        if self.is_root:
            for link in list(self._down):
                link.send(message)
        elif self.up is not None:
            self.up.send(message)

    def _gone_message(self, rank: int, how: str, to: int | str) -> Message:
        kind = LOST if how else LEFT
        return {"to": to, "from": self.rank, "kind": kind, "rank": rank, "how": how}

    def _hear_gone(self, message: Message) -> None:
        rank, how = message.get("rank"), message.get("how", "")
        if type(rank) is not int or rank not in self.roster.contacts or not isinstance(how, str):
            raise ValueError(f"no message of a control channel: {message!r:.200}")
        if message["kind"] == LOST:
            how = how or "it was lost"
        if rank == self.rank:
            if message["kind"] == LOST and message["to"] != ROOT:
                self.fence(how)
            return
        if rank in self.gone:
            return
        self._note_gone(rank, how)
        if message["to"] == ROOT:
            self._fan_out(self._gone_message(rank, how, ALL))

    def _fan_out(self, message: Message) -> None:
        for link in list(self._down):
            link.send({**message, "to": ALL})

    def _note_gone(self, rank: int, how: str) -> None:
        if rank in self.gone:
            return
        self.gone[rank] = how
        self._routes.pop(rank, None)
        given_up = bool(how) and not self.fenced
        farewell = self._gone_message(rank, how, rank)  # it may be alive, and must not go on alone
        for link, below in list(self._down.items()):
            if below == rank:
                del self._down[link]
                if given_up:
                    link.send(farewell)
                for other in [other for other, route in self._routes.items() if route is link]:
                    del self._routes[other]  # they come back by another way
                link.close()
        if self._up_rank == rank:
            up, self.up, self._up_rank = self.up, None, None
            if up is not None:
                if given_up:
                    up.send(farewell)
                up.close()
        self._tell_gone(rank, how)

    # -- heartbeats ---------------------------------------------------------------------------------------------------

    def pulse(self) -> None:
        """Let those at the other ends of the connections know that this rank runs. To be called now and then."""
        now = time.monotonic()
        message: Message = {"to": ROOT, "from": self.rank, "kind": PULSE}
        if self.up is not None:
            below = {str(rank): round(now - self.heard[rank], 3) for rank in self._routes if rank in self.heard}
            self.up.send({**message, "ages": below} if below else message)
        for link in list(self._down):
            link.send(message)

    def silence(self, rank: int) -> float | None:
        """For how many seconds ``rank`` was not heard, as far as this one can know."""
        heard = self.heard.get(rank)
        return None if heard is None else time.monotonic() - heard
