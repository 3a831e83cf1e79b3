"""One rank's node in the tree of the control channel: routes messages and records the ranks that are gone. No I/O.

A message is addressed to a rank, to ``"root"``, or to ``"all"``. A message to all goes up to the root, which sends it
down the whole tree, so all ranks receive such messages in the same order. Each node learns the routes to the ranks
below it from their HERE messages.

While ranks go, a node may be without a route until it reconnects. Each sender therefore numbers its messages to all,
and repeats each message until the root has returned it; each node keeps the last ``LOGGED`` messages to all for ranks
that connect later. A node ignores a numbered message that it has already seen.

The end of a connection is the end of the rank behind it, unless the rank has announced its orderly leave before. A loss
is final: the others have gone on without the lost rank, and do not let it in again. A leaving rank waits until all
ranks connected to it have acknowledged the leave; without that, a peer could take it for lost.
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
KEPT: Final = 4096  # messages that wait for a connection to the rank above
LOGGED: Final = 64  # messages to all that are kept for ranks that connect later
FOREVER: Final = 1e9  # seconds

# message kinds that the nodes themselves handle
LOST, LEFT, BYE, PULSE, HERE = "lost", "left", "bye", "pulse", "here"


class Transport(Protocol):
    """A connection to another rank."""

    def send(self, message: ControlMessage) -> None:
        """Queue ``message`` for sending."""

    def close(self) -> None:
        """Close the connection after the queued messages."""


@final
class Router:
    """Routes messages for rank ``rank``.

    Args:
        topology: of the job.
        deliver: called with each message for this rank.
        gone: called once with each rank that is gone, and the reason; an empty reason means an orderly leave.
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
        self.up: Transport | None = None  #: the connection to the rank above
        self.gone: dict[int, str] = {}  #: by rank, the reason; empty: an orderly leave
        self.heard: dict[int, float] = {}  #: time of the last message of each rank, as far as this node can tell
        self.fenced = ""  #: why the others continue without this rank; empty: not fenced
        self._deliver = deliver
        self._notify_gone = gone
        self._up_rank: int | None = None
        self._down: dict[Transport, int] = {}  # connections from ranks below
        self._routes: dict[int, Transport] = {}  # towards each rank below
        self._waiting: deque[ControlMessage] = deque(maxlen=KEPT)
        self._sent = 0  # messages to all
        self._unacked: OrderedDict[tuple[int, int], ControlMessage] = OrderedDict()  # sent up, not returned by the root
        self._log: deque[ControlMessage] = deque(maxlen=LOGGED)  # the last messages to all
        self._last: dict[int, int] = {}  # by rank, the number of its last message to all
        self._departing = False
        self._acknowledged: set[int] = set()  # ranks that have acknowledged the leave
        self._acknowledged_above = False  # whether the rank above has acknowledged the leave

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root of the tree."""
        return self.topology.root(self.gone) == self.rank

    @property
    def above(self) -> int | None:
        """The rank to connect to; None: this rank is the root, or its leave is acknowledged from above."""
        return None if self._acknowledged_above else self.topology.above(self.rank, self.gone)

    @property
    def links(self) -> list[Transport]:
        """All connections."""
        return [*self._down, *([] if self.up is None else [self.up])]

    @property
    def absent(self) -> list[int]:
        """At the root: the ranks that are not gone, as far as this node can tell, and not connected."""
        if not self.is_root or self._departing:
            return []
        return [r for r in self.topology.contacts if r != self.rank and r not in self.gone and r not in self._routes]

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, to: int | str, kind: str, **content: Any) -> None:
        """Send a message; without a route, it waits for a connection, or is dropped at the root."""
        message = {"to": to, "from": self.rank, "kind": kind, **content}
        if to == ALL:
            self._sent += 1
            message["nth"] = self._sent
        self._route(message, None)

    def _route(self, message: ControlMessage, came_by: Transport | None) -> None:
        to = message["to"]
        if to == self.rank:
            self._handle(message, came_by)
        elif to == ALL and self.is_root:
            if not self._departing:  # else the next root sends the message: some ranks are already connected there
                self._broadcast(message, came_by)
        elif to == ALL and came_by is not None and came_by is self.up:
            for link in list(self._down):
                link.send(message)
            if self._is_new(message):
                self._handle(message, came_by)
        elif to == ROOT and self.is_root:
            self._handle(message, came_by)
        elif to in self._routes:
            self._routes[to].send(message)
        elif to == ALL and "nth" in message:
            self._unacked[message["from"], message["nth"]] = message
            if len(self._unacked) > KEPT:
                self._unacked.popitem(last=False)
            if self.up is not None:
                self.up.send(message)
        elif self.up is not None:
            if came_by is not self.up:
                self.up.send(message)
        elif not self.is_root:
            self._waiting.append(message)

    def _broadcast(self, message: ControlMessage, came_by: Transport | None) -> None:
        """Send a message to all ranks, at the root."""
        if self._is_new(message):
            for link in list(self._down):
                link.send(message)
            self._handle(message, came_by)
        elif came_by is not None:
            came_by.send(message)  # so that the sender sees its message return

    def _route_again(self) -> None:
        """Send all messages that had no route, or that may have been lost with a connection."""
        waiting = [*self._unacked.values(), *self._waiting]
        self._waiting.clear()
        for message in waiting:
            self._route(message, None)

    def _is_new(self, message: ControlMessage) -> bool:
        number, source = message.get("nth"), message["from"]
        if number is None:
            return True
        self._unacked.pop((source, number), None)
        if number <= self._last.get(source, 0):
            return False
        self._last[source] = number
        self._log.append(message)
        return True

    def _handle(self, message: ControlMessage, came_by: Transport | None) -> None:
        kind = message["kind"]
        if kind in (LOST, LEFT):
            self._on_gone(message)
        elif kind != PULSE:
            self._deliver(message)

    # -- connections --------------------------------------------------------------------------------------------------

    def refusal(self, rank: int) -> str:
        """Why ``rank`` may not connect to this node; empty: it may."""
        if rank == self.rank or rank not in self.topology.contacts:
            return f"there is no rank {rank} to be let in"
        # a rank that leaves together with this one may connect: the next root may learn of its leave from no other rank
        if rank in self.gone and (self.gone[rank] or not self._departing):
            return f"rank {rank} was given up: {self.gone[rank] or 'it has left'}"
        if rank in self._down.values():
            return f"rank {rank} is here already"
        return ""

    def welcome(self, rank: int, link: Transport) -> None:
        """Add the connection of ``rank``, below this node."""
        self._down[link] = rank
        self._routes[rank] = link
        self.heard[rank] = time.monotonic()
        self.send(ROOT, HERE)
        for gone, how in self.gone.items():  # the rank, or ranks below it, may have missed the news
            link.send(self._gone_message(gone, how, ALL))
        for message in self._log:
            link.send(message)
        if self._departing:
            link.send(self._gone_message(self.rank, "", ALL))

    def attach(self, rank: int, link: Transport) -> None:
        """Add the connection to ``rank``, above this node."""
        self.up, self._up_rank = link, rank
        self.heard[rank] = time.monotonic()
        self.send(ROOT, HERE)
        for below in self._routes:
            link.send({"to": ROOT, "from": below, "kind": HERE})
        for gone, how in self.gone.items():
            link.send(self._gone_message(gone, how, ROOT))
        for message in self._log:  # a lost root may have reached some ranks only
            link.send(message)
        self._route_again()
        if self._departing:
            link.send(self._gone_message(self.rank, "", ALL))

    def received(self, link: Transport, message: ControlMessage) -> None:
        """Handle a message from ``link``. Raises: ValueError: no node sends such a message."""
        to, source = message.get("to"), message.get("from")
        if not isinstance(message.get("kind"), str) or type(source) is not int or source not in self.topology.contacts:
            raise ValueError(f"no message of a control channel: {message!r:.200}")
        if (type(to) is not int and to not in (ALL, ROOT)) or type(message.get("nth", 0)) is not int:
            raise ValueError(f"no message of a control channel: {message!r:.200}")
        if message["kind"] == BYE:
            self._on_bye(link)
            return
        now = time.monotonic()
        below = self._down.get(link)
        if below is not None:
            self.heard[below] = now
            if source in self.gone:
                if to != ALL:
                    return  # sent before the rank was gone
            elif message["kind"] == HERE:  # no other kind: a repeated message may come from any rank
                self._routes[source] = link
            if message["kind"] == PULSE:
                self._on_ages(message.get("ages", {}), now)
                return
            if message["kind"] == LEFT and message.get("rank") == source == below:
                self._on_leave(below, link)
        elif link is self.up and self._up_rank is not None:
            self.heard[self._up_rank] = now
            if message["kind"] == PULSE:
                return
        else:
            return  # from a dropped connection
        self._route(message, link)

    def _on_leave(self, rank: int, link: Transport) -> None:
        """Handle the orderly leave of ``rank``, directly below this node: its last message."""
        self._mark_gone(rank, "")
        self._forward_down(self._gone_message(rank, "", ALL))  # this node may go, too, before the root sends the news
        if not self._departing:  # else the next root must receive the leave, too
            self._drop_link(link)
            link.send({"to": rank, "from": self.rank, "kind": BYE})
            link.close()

    def _on_ages(self, ages: Any, now: float) -> None:
        if not isinstance(ages, dict):
            raise ValueError(f"no ages: {ages!r:.200}")
        ranks = {str(rank): rank for rank in self.topology.contacts}
        for name, age in ages.items():
            if name in ranks and isinstance(age, (int, float)) and 0 <= age < FOREVER:
                self.heard[ranks[name]] = now - age

    def ended(self, link: Transport, how: str) -> None:
        """Handle the end of a connection."""
        if link is self.up:
            rank, self.up, self._up_rank = self._up_rank, None, None
            assert rank is not None
            self._declare_lost(rank, how)
        elif (below := self._drop_link(link)) is not None:
            self._declare_lost(below, how)

    def _drop_link(self, link: Transport) -> int | None:
        """Remove a connection from below and its routes; the ranks behind it reconnect elsewhere."""
        for rank in [rank for rank, route in self._routes.items() if route is link]:
            del self._routes[rank]
        return self._down.pop(link, None)

    def _declare_lost(self, rank: int, how: str) -> None:
        """Declare ``rank`` lost on this node's own evidence, and send the loss to the other ranks."""
        if rank in self.gone:
            return
        message = self._gone_message(rank, how, ROOT)
        self._mark_gone(rank, how)
        self._forward_down(message)
        if not self.is_root:
            self._route(message, None)

    def fence(self, why: str) -> None:
        """Cut this rank off: the other ranks have declared it lost, and continue without it."""
        self.fenced = self.fenced or why or "the others have given it up"
        for link in self.links:
            link.close()
        self.up = self._up_rank = None
        self._down.clear()
        self._routes.clear()
        for other in self.topology.contacts:
            if other != self.rank:
                self._mark_gone(other, f"it goes on without rank {self.rank}: {why}")

    def give_up(self, rank: int, how: str) -> None:
        """Declare ``rank`` lost though its connection is open, because it does not answer any more."""
        self._declare_lost(rank, how)

    def give_up_silent(self, seconds: float) -> None:
        """Declare the rank above lost if its last message is more than ``seconds`` old."""
        rank = self._up_rank
        if rank is not None and (silence := self.silence(rank)) is not None and silence > seconds:
            self._declare_lost(rank, f"it was silent for {silence:.1f} s, and others go on without it")

    def depart(self) -> None:
        """Announce this rank's orderly leave; :attr:`departed` turns true with the last acknowledgement."""
        self._departing = True
        message = self._gone_message(self.rank, "", ALL)
        for link in self.links:
            link.send(message)

    @property
    def departed(self) -> bool:
        """Whether all ranks that are, or would now be, connected to this node have acknowledged its leave."""
        if not self._departing:
            return False
        others = [rank for rank in self.topology.contacts if rank not in self.gone and rank not in self._acknowledged]
        below = [rank for rank in others if self.topology.above(rank, self.gone) == self.rank]
        return not below and self.above is None

    def _on_bye(self, link: Transport) -> None:
        """Handle an acknowledgement of our leave: the peer on ``link`` needs this node no longer."""
        if link is self.up and self._up_rank is not None:
            self._acknowledged.add(self._up_rank)
            self._acknowledged_above = True
            self.up = self._up_rank = None
        elif link in self._down:
            self._acknowledged.add(self._down[link])
            self._drop_link(link)
        link.close()

    def _gone_message(self, rank: int, how: str, to: int | str) -> ControlMessage:
        kind = LOST if how else LEFT
        return {"to": to, "from": self.rank, "kind": kind, "rank": rank, "how": how}

    def _on_gone(self, message: ControlMessage) -> None:
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
        self._mark_gone(rank, how)
        if message["to"] == ROOT:
            self._forward_down(self._gone_message(rank, how, ALL))

    def _forward_down(self, message: ControlMessage) -> None:
        for link in list(self._down):
            link.send({**message, "to": ALL})

    def _mark_gone(self, rank: int, how: str) -> None:
        if rank in self.gone:
            return
        was_root = self.is_root
        self.gone[rank] = how
        self._routes.pop(rank, None)
        for link in [link for link, below in self._down.items() if below == rank and how]:
            self._drop_link(link)
            link.send(self._gone_message(rank, how, rank))  # the rank may not know of its loss
            link.close()
        if self._up_rank == rank and self.up is not None:
            self.up.send(self._gone_message(rank, how, rank) if how else {"to": rank, "from": self.rank, "kind": BYE})
            self.up.close()
            self.up = self._up_rank = None
        self._notify_gone(rank, how)
        if self.is_root and not was_root:
            now = time.monotonic()
            for other in self.topology.contacts:  # all connect here now; an absent rank is silent from now on
                if other != self.rank and other not in self.gone:
                    self.heard.setdefault(other, now)
            for other, why in self.gone.items():  # the last root may have reached some ranks only
                self._forward_down(self._gone_message(other, why, ALL))
            self._route_again()

    # -- heartbeats ---------------------------------------------------------------------------------------------------

    def pulse(self) -> None:
        """Send a heartbeat over each connection. The channel calls this every ``PULSE_SECONDS``."""
        now = time.monotonic()
        message: ControlMessage = {"to": ROOT, "from": self.rank, "kind": PULSE}
        if self.up is not None:
            below = {str(rank): round(now - self.heard[rank], 3) for rank in self._routes if rank in self.heard}
            self.up.send({**message, "ages": below} if below else message)
        for link in list(self._down):
            link.send(message)

    def listen_anew(self) -> None:
        """Measure the silence of all ranks from now on."""
        now = time.monotonic()
        self.heard = dict.fromkeys(self.heard, now)

    def silence(self, rank: int) -> float | None:
        """Seconds since the last message of ``rank``, as far as this node can tell; None: unknown."""
        heard = self.heard.get(rank)
        return None if heard is None else time.monotonic() - heard
