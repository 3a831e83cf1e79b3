"""One rank's place in the tree of the control channel: which way messages go, and who is gone. Without any I/O.

A message says whom it is for: a rank, ``"root"``, or ``"all"``. What is for all goes up to the root, which sends it
down to everybody; so all get such messages in one order. Each node knows the ranks below it by the messages in which
these say that they are here.

While ranks go, there may be no way for a moment. So what is for all is numbered by its sender, which sends it again
until it has come back from the root, and each node keeps the last of it for those that connect later. Who has had one
takes it for old.

The end of a connection is the end of the rank behind it, unless that has said goodbye before. It is final: a rank that
was declared lost is not let in again, because the others have gone on without it. Who says goodbye waits until all who
are connected to it have heard that, or somebody could take it for lost.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, Protocol, final

from asynccomm.control.transport.framing import ControlMessage
from asynccomm.control.transport.topology import Topology

ALL: Final = "all"
ROOT: Final = "root"
KEPT: Final = 4096  # messages that wait for a connection to the next one above
LOGGED: Final = 64  # messages for all that are kept for those who connect later
FOREVER: Final = 1e9  # seconds

# kinds that nodes handle among themselves
LOST, LEFT, BYE, PULSE, HERE = "lost", "left", "bye", "pulse", "here"


class Transport(Protocol):
    """A connection to another rank."""

    def send(self, message: ControlMessage) -> None:
        """Put ``message`` on its way."""

    def close(self) -> None:
        """End it, after what was sent."""


@final
class Router:
    """Routes messages for rank ``rank``.

    Args:
        topology: of the job.
        deliver: called with each message for this rank.
        gone: called once with each rank that is gone, and how: empty for one that left in good order.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        deliver: Callable[[ControlMessage], object],
        gone: Callable[[int, str], object],
    ) -> None:
        self.rank = rank
        self.topology = topology
        self.up: Transport | None = None  #: to the next one above
        self.gone: dict[int, str] = {}  #: by rank, how; empty: it left in good order
        self.heard: dict[int, float] = {}  #: when each rank below or above was last heard, as far as is known here
        self.fenced = ""  #: why the others go on without this rank, if they do
        self._deliver = deliver
        self._tell_gone = gone
        self._up_rank: int | None = None
        self._down: dict[Transport, int] = {}  # connected to this one
        self._routes: dict[int, Transport] = {}  # where ranks below are
        self._waiting: deque[ControlMessage] = deque(maxlen=KEPT)
        self._sent = 0  # messages for all
        self._unheard: OrderedDict[tuple[int, int], ControlMessage] = OrderedDict()  # sent up, and not come back
        self._log: deque[ControlMessage] = deque(maxlen=LOGGED)  # what came for all
        self._last: dict[int, int] = {}  # by rank, the number of its last message for all
        self._departing = False
        self._told: set[int] = set()  # who has heard of that
        self._said_above = False  # whether one above has

    @property
    def is_root(self) -> bool:
        """Whether all messages meet here."""
        return self.topology.root(self.gone) == self.rank

    @property
    def above(self) -> int | None:
        """Whom this one should be connected to; None: it is the root, or has said goodbye."""
        return None if self._said_above else self.topology.above(self.rank, self.gone)

    @property
    def links(self) -> list[Transport]:
        """All connections."""
        return [*self._down, *([] if self.up is None else [self.up])]

    @property
    def absent(self) -> list[int]:
        """At the root: the ranks that are not gone, as far as is known, and not connected."""
        if not self.is_root or self._departing:
            return []
        return [r for r in self.topology.contacts if r != self.rank and r not in self.gone and r not in self._routes]

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, to: int | str, kind: str, **content: Any) -> None:
        """Send a message; what cannot go on its way now waits for a connection, or is dropped if nobody is there."""
        message = {"to": to, "from": self.rank, "kind": kind, **content}
        if to == ALL:
            self._sent += 1
            message["nth"] = self._sent
        self._route(message, None)

    def _route(self, message: ControlMessage, came_by: Transport | None) -> None:
        to = message["to"]
        if to == self.rank:
            self._take(message, came_by)
        elif to == ALL and self.is_root:
            if not self._departing:  # else the next root is to tell all: some are with that already
                self._spread(message, came_by)
        elif to == ALL and came_by is not None and came_by is self.up:
            for link in list(self._down):
                link.send(message)
            if self._is_new(message):
                self._take(message, came_by)
        elif to == ROOT and self.is_root:
            self._take(message, came_by)
        elif to in self._routes:
            self._routes[to].send(message)
        elif to == ALL and "nth" in message:
            self._unheard[message["from"], message["nth"]] = message
            if len(self._unheard) > KEPT:
                self._unheard.popitem(last=False)
            if self.up is not None:
                self.up.send(message)
        elif self.up is not None:
            if came_by is not self.up:
                self.up.send(message)
        elif not self.is_root:
            self._waiting.append(message)

    def _spread(self, message: ControlMessage, came_by: Transport | None) -> None:
        """At the root."""
        if self._is_new(message):
            for link in list(self._down):
                link.send(message)
            self._take(message, came_by)
        elif came_by is not None:
            came_by.send(message)  # so that its sender knows

    def _route_again(self) -> None:
        """There is a way again: send what had none, or may have been lost on it."""
        waiting = [*self._unheard.values(), *self._waiting]
        self._waiting.clear()
        for message in waiting:
            self._route(message, None)

    def _is_new(self, message: ControlMessage) -> bool:
        number, source = message.get("nth"), message["from"]
        if number is None:
            return True
        self._unheard.pop((source, number), None)
        if number <= self._last.get(source, 0):
            return False
        self._last[source] = number
        self._log.append(message)
        return True

    def _take(self, message: ControlMessage, came_by: Transport | None) -> None:
        kind = message["kind"]
        if kind in (LOST, LEFT):
            self._hear_gone(message)
        elif kind != PULSE:
            self._deliver(message)

    # -- connections --------------------------------------------------------------------------------------------------

    def refusal(self, rank: int) -> str:
        """Why ``rank`` cannot be connected to this one; empty if it can."""
        if rank == self.rank or rank not in self.topology.contacts:
            return f"there is no rank {rank} to be let in"
        # of who leaves with this one the next one must hear, and maybe only from itself
        if rank in self.gone and (self.gone[rank] or not self._departing):
            return f"rank {rank} was given up: {self.gone[rank] or 'it has left'}"
        if rank in self._down.values():
            return f"rank {rank} is here already"
        return ""

    def welcome(self, rank: int, link: Transport) -> None:
        """``rank`` has connected to this one."""
        self._down[link] = rank
        self._routes[rank] = link
        self.heard[rank] = time.monotonic()
        self.send(ROOT, HERE)
        for gone, how in self.gone.items():  # it may not have heard, or those below it
            link.send(self._gone_message(gone, how, ALL))
        for message in self._log:
            link.send(message)
        if self._departing:
            link.send(self._gone_message(self.rank, "", ALL))

    def attach(self, rank: int, link: Transport) -> None:
        """This one has connected to ``rank``, above it."""
        self.up, self._up_rank = link, rank
        self.heard[rank] = time.monotonic()
        self.send(ROOT, HERE)
        for below in self._routes:
            link.send({"to": ROOT, "from": below, "kind": HERE})
        for gone, how in self.gone.items():
            link.send(self._gone_message(gone, how, ROOT))
        for message in self._log:  # a root that was lost may have told some only
            link.send(message)
        self._route_again()
        if self._departing:
            link.send(self._gone_message(self.rank, "", ALL))

    def received(self, link: Transport, message: ControlMessage) -> None:
        """A message came by ``link``. Raises: ValueError if it is none that a node could have sent."""
        to, source = message.get("to"), message.get("from")
        if not isinstance(message.get("kind"), str) or type(source) is not int or source not in self.topology.contacts:
            raise ValueError(f"no message of a control channel: {message!r:.200}")
        if (type(to) is not int and to not in (ALL, ROOT)) or type(message.get("nth", 0)) is not int:
            raise ValueError(f"no message of a control channel: {message!r:.200}")
        if message["kind"] == BYE:
            self._hear_bye(link)
            return
        now = time.monotonic()
        below = self._down.get(link)
        if below is not None:
            self.heard[below] = now
            if source in self.gone:
                if to != ALL:
                    return  # it was on its way
            elif message["kind"] == HERE:  # and nothing else: what is sent again may be from anywhere
                self._routes[source] = link
            if message["kind"] == PULSE:
                self._hear_ages(message.get("ages", {}), now)
                return
            if message["kind"] == LEFT and message.get("rank") == source == below:
                self._hear_goodbye(below, link)
        elif link is self.up and self._up_rank is not None:
            self.heard[self._up_rank] = now
            if message["kind"] == PULSE:
                return
        else:
            return  # of a connection that was given up
        self._route(message, link)

    def _hear_goodbye(self, rank: int, link: Transport) -> None:
        """``rank``, below this one, leaves: nothing comes from it any more."""
        self._note_gone(rank, "")
        self._fan_out(self._gone_message(rank, "", ALL))  # this one may go, too, before the root has told them
        if not self._departing:  # else the next one is to hear it, too
            self._drop_link(link)
            link.send({"to": rank, "from": self.rank, "kind": BYE})
            link.close()

    def _hear_ages(self, ages: Any, now: float) -> None:
        if not isinstance(ages, dict):
            raise ValueError(f"no ages: {ages!r:.200}")
        ranks = {str(rank): rank for rank in self.topology.contacts}
        for name, age in ages.items():
            if name in ranks and isinstance(age, (int, float)) and 0 <= age < FOREVER:
                self.heard[ranks[name]] = now - age

    def ended(self, link: Transport, how: str) -> None:
        """A connection has ended."""
        if link is self.up:
            rank, self.up, self._up_rank = self._up_rank, None, None
            assert rank is not None
            self._declare(rank, how)
        elif (below := self._drop_link(link)) is not None:
            self._declare(below, how)

    def _drop_link(self, link: Transport) -> int | None:
        """Forget who is behind a link from below; they come back by another way."""
        for rank in [rank for rank, route in self._routes.items() if route is link]:
            del self._routes[rank]
        return self._down.pop(link, None)

    def _declare(self, rank: int, how: str) -> None:
        """Take ``rank`` for lost, having seen it; tell the others."""
        if rank in self.gone:
            return
        message = self._gone_message(rank, how, ROOT)
        self._note_gone(rank, how)
        self._fan_out(message)
        if not self.is_root:
            self._route(message, None)

    def fence(self, why: str) -> None:
        """The others have given this rank up, and go on without it."""
        self.fenced = self.fenced or why or "the others have given it up"
        for link in self.links:
            link.close()
        self.up = self._up_rank = None
        self._down.clear()
        self._routes.clear()
        for other in self.topology.contacts:
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
        """Say goodbye to all; they have heard it once :attr:`departed`."""
        self._departing = True
        message = self._gone_message(self.rank, "", ALL)
        for link in self.links:
            link.send(message)

    @property
    def departed(self) -> bool:
        """Whether all who are connected to this one, or would be now, have heard that it goes."""
        if not self._departing:
            return False
        others = [rank for rank in self.topology.contacts if rank not in self.gone and rank not in self._told]
        below = [rank for rank in others if self.topology.above(rank, self.gone) == self.rank]
        return not below and self.above is None

    def _hear_bye(self, link: Transport) -> None:
        """Who is behind ``link`` has heard that this one goes, and needs it no more."""
        if link is self.up and self._up_rank is not None:
            self._told.add(self._up_rank)
            self._said_above = True
            self.up = self._up_rank = None
        elif link in self._down:
            self._told.add(self._down[link])
            self._drop_link(link)
        link.close()

    def _gone_message(self, rank: int, how: str, to: int | str) -> ControlMessage:
        kind = LOST if how else LEFT
        return {"to": to, "from": self.rank, "kind": kind, "rank": rank, "how": how}

    def _hear_gone(self, message: ControlMessage) -> None:
        rank, how = message.get("rank"), message.get("how", "")
        if type(rank) is not int or rank not in self.topology.contacts or not isinstance(how, str):
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

    def _fan_out(self, message: ControlMessage) -> None:
        for link in list(self._down):
            link.send({**message, "to": ALL})

    def _note_gone(self, rank: int, how: str) -> None:
        if rank in self.gone:
            return
        was_root = self.is_root
        self.gone[rank] = how
        self._routes.pop(rank, None)
        for link in [link for link, below in self._down.items() if below == rank and how]:
            self._drop_link(link)
            link.send(self._gone_message(rank, how, rank))  # it may not know
            link.close()
        if self._up_rank == rank and self.up is not None:
            self.up.send(self._gone_message(rank, how, rank) if how else {"to": rank, "from": self.rank, "kind": BYE})
            self.up.close()
            self.up = self._up_rank = None
        self._tell_gone(rank, how)
        if self.is_root and not was_root:
            now = time.monotonic()
            for other in self.topology.contacts:  # they are to come here now: who does not is silent from now on
                if other != self.rank and other not in self.gone:
                    self.heard.setdefault(other, now)
            for other, why in self.gone.items():  # the root before may have told some only
                self._fan_out(self._gone_message(other, why, ALL))
            self._route_again()

    # -- heartbeats ---------------------------------------------------------------------------------------------------

    def pulse(self) -> None:
        """Let those at the other ends of the connections know that this rank runs. To be called now and then."""
        now = time.monotonic()
        message: ControlMessage = {"to": ROOT, "from": self.rank, "kind": PULSE}
        if self.up is not None:
            below = {str(rank): round(now - self.heard[rank], 3) for rank in self._routes if rank in self.heard}
            self.up.send({**message, "ages": below} if below else message)
        for link in list(self._down):
            link.send(message)

    def listen_anew(self) -> None:
        """Count nobody's silence from before now."""
        now = time.monotonic()
        self.heard = dict.fromkeys(self.heard, now)

    def silence(self, rank: int) -> float | None:
        """For how many seconds ``rank`` was not heard, as far as this one can know."""
        heard = self.heard.get(rank)
        return None if heard is None else time.monotonic() - heard
