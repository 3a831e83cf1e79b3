"""One rank's node in the tree of the control channel: routes messages and records the ranks that are gone. No I/O.

A message is addressed to a rank, to ``"root"``, or to ``"all"``. A message to all goes up to the root, which sends it
down the whole tree, so all ranks receive such messages in the same order. Each node learns the routes to the ranks
below it from their Presence messages.

While ranks go, a node may be without a route until it reconnects. Messages to all are therefore numbered, recorded and
repeated (``broadcast_log``). The messages of ranks that leave may wait at the root for each other (``patient``).

The end of a connection is the end of the rank behind it, unless the rank has announced its orderly leave before. A loss
is final: the others have gone on without the lost rank, and do not let it in again. A leaving rank waits until all
ranks connected to it have acknowledged the leave; without that, a peer could take it for lost.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final, Protocol, final

from msgspec.structs import replace

from asynccomm.control.batches import batches
from asynccomm.control.broadcast_log import BroadcastLog
from asynccomm.control.messages import (
    ALL,
    ROOT,
    Address,
    Body,
    Departure,
    DepartureAck,
    Heartbeat,
    MessageBatch,
    Presence,
    RoutedMessage,
)
from asynccomm.control.patient import EntrustedMessages, PatientMessages
from asynccomm.control.runs import compact_ranks, distinct_ranks, expand_ranks
from asynccomm.control.transport.schema import JsonObject, MessageError, decode, shown
from asynccomm.control.transport.topology import Topology

LATER: Final = 32  # ranks that are gone, or messages to all, for which no list of missed news is made anew
FENCED: Final = "it was given up itself"
SILENT: Final = "it was silent for {:.1f} s, and others go on without it"
KEPT: Final = 4096  # messages that wait for a connection to the rank above


class Transport(Protocol):
    """A connection to another rank."""

    def send(self, message: object) -> None:
        """Queue ``message`` for sending."""

    def close(self) -> None:
        """Close the connection after the queued messages."""


@final
class Router:
    """Routes messages for rank ``rank``.

    Args:
        topology: of the job.
        deliver: called with the source and the body of each message for this rank.
        gone: called once with each rank that is gone, among others that are gone for the same reason; an empty reason
            means an orderly leave.
        later: of ``PatientMessages``.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        deliver: Callable[[int, Body], object],
        gone: Callable[[Sequence[int], str], object],
        later: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        self.rank = rank
        self.topology = topology
        self.up: Transport | None = None  #: the connection to the rank above
        self.gone: dict[int, str] = {}  #: by rank, the reason; empty: an orderly leave
        self.last_heard: dict[int, float] = {}  #: time of the last message of each rank, as far as this node can tell
        self.fenced: str = ""  #: why the others continue without this rank; empty: not fenced
        self._deliver = deliver
        self._notify_gone = gone
        self._root = self._heir = -1  # the root, and this rank's heir, as of the last look
        self._patient = PatientMessages(self._send_down, self._entrust, later)
        self._entrusted = EntrustedMessages(self._is_known)
        self._returned: list[RoutedMessage] = []  # messages to all that came again, to be returned to their senders
        self._up_rank: int | None = None
        self._left_above: set[Transport] = set()  # connections to ranks above that left, until those close them
        self._down: dict[Transport, int] = {}  # connections from ranks below
        self._links: dict[int, Transport] = {}  # the same by rank
        self._routes: dict[int, Transport] = {}  # towards each rank below
        self._behind: dict[Transport, set[int]] = {}  # ranks that had their route by each connection
        self._departures: dict[Address, list[RoutedMessage]] = {}  # messages about all ranks that are gone
        #: the last long list of missed news, and the number of ranks that were gone and of messages in the log then
        self._missed: tuple[int, int, list[RoutedMessage | MessageBatch]] = (0, 0, [])
        self._untold: set[int] = set()  # ranks that are gone, which no root has sent to this node
        self._waiting: deque[RoutedMessage] = deque(maxlen=KEPT)
        self._log = BroadcastLog()
        self._leaving = False
        self._acknowledged: set[int] = set()  # ranks that have acknowledged the leave
        self._acknowledged_above = False  # whether the rank above has acknowledged the leave

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root of the tree."""
        if self._root < 0 or self._root in self.gone:
            self._root = self.topology.root(self.gone, self._root)
        return self._root == self.rank

    @property
    def above(self) -> int | None:
        """The rank to connect to; None: this rank is the root, or its leave is acknowledged from above."""
        if self._acknowledged_above or self.is_root:
            return None
        return self.topology.above(self.rank, self.gone, self._root)

    @property
    def links(self) -> list[Transport]:
        """All connections."""
        return [*self._down, *self._left_above, *([] if self.up is None else [self.up])]

    @property
    def absent(self) -> list[int]:
        """At the root: the ranks that are not gone, as far as this node can tell, and not connected."""
        if not self.is_root or self._leaving or 1 + len(self._routes) + len(self.gone) == len(self.topology.contacts):
            return []
        return [r for r in self.topology.contacts if r != self.rank and r not in self.gone and r not in self._routes]

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, to: Address, body: Body, *, patient: bool = False) -> None:
        """Send a message; without a route, it waits for a connection, or is dropped at the root.

        Args:
            patient: of a message to all: it may wait for others.
        """
        number = self._log.number() if to == ALL else None
        self._route(RoutedMessage(to, self.rank, body, number, patient), None)

    def _route(self, message: RoutedMessage, came_by: Transport | None, *, forwarded: bool = False) -> None:
        to = message.to
        if to == self.rank:
            self._handle(message, came_by)
        elif to == ALL and self.is_root:
            if not self._leaving:  # else the next root sends the message: some ranks are already connected there
                self._broadcast(message, came_by)
        elif to == ALL and came_by is not None and came_by is self.up:
            if not forwarded:
                self._forward_down(message)
            if (fresh := self._log.add(message)) is not None:
                self._handle(fresh, came_by)
        elif to == ROOT and (self.is_root or self._loses_above(message.body)):
            self._handle(message, came_by)
        elif came_by is not None and self._has_passed(message):
            if to == ALL:
                self._returned.append(message)
        elif isinstance(to, int) and to in self._routes:
            self._patient.flush()
            self._routes[to].send(message)
        elif to == ALL and message.number is not None:
            self._log.repeat(message, message.number)
            if self.up is not None:
                self.up.send(message)
        elif self.up is not None:
            if came_by is not self.up:
                self.up.send(message)
        elif not self.is_root:
            self._waiting.append(message)

    def _has_passed(self, message: RoutedMessage) -> bool:
        """Whether a message from below is known here: a root has sent it, or this node sends it to the next root."""
        if message.to == ROOT:
            return isinstance(message.body, Departure) and distinct_ranks(message.body.ranks) <= self.gone.keys()
        return message.to == ALL and self._log.knows(message)

    def _loses_above(self, body: Body) -> bool:
        """Whether ``body`` says that the rank above is lost: then the message cannot pass over that rank."""
        return isinstance(body, Departure) and bool(body.reason) and self._up_rank in distinct_ranks(body.ranks)

    def _broadcast(self, message: RoutedMessage, came_by: Transport | None) -> None:
        """Send a message to all ranks, at the root."""
        fresh = self._log.add(message)
        if fresh is not None:
            self._spread(fresh)
            self._handle(fresh, came_by)
        if fresh is not message and came_by is not None:  # so that the senders see their message return
            known = message.sources if fresh is None else [s for s in message.sources if s not in set(fresh.sources)]
            self._returned.append(message.of(known))

    def _spread(self, message: RoutedMessage) -> None:
        """Send a message to all ranks below, at the root; a patient message may wait."""
        if message.patient:
            self._patient.add(message)
        else:
            self._forward_down(message)

    def _entrust(self, messages: Sequence[RoutedMessage]) -> None:
        """Give messages that wait here, at the root, to the heir, which is directly below."""
        link = self._links.get(self._next_root())
        if link is not None:
            self._send_together(link, [replace(message, held=True) for message in messages])

    def _next_root(self) -> int:
        """The heir of this rank; -1: there is none."""
        if self._heir < 0 or self._heir in self.gone:
            try:
                self._heir = self.topology.root(self.gone, max(self.rank, self._heir))
            except ValueError:
                return -1
        return self._heir

    def _is_known(self, message: RoutedMessage) -> bool:
        if isinstance(message.body, Departure):
            return distinct_ranks(message.body.ranks) <= self.gone.keys()
        return self._has_passed(message)

    def _inherit(self) -> None:
        """Send the messages that the lost root has not sent."""
        left: set[int] = set()
        for message in self._entrusted.take():
            if isinstance(message.body, Departure):
                left |= {*expand_ranks(message.body.ranks)} - self.gone.keys() - {self.rank}
            elif not self._is_known(message):
                send = self._spread if self.is_root and self._leaving else partial(self._route, came_by=None)
                send(replace(message, held=False))
        if left:
            self._mark_gone(left, "")
            (self._spread if self.is_root else self._forward_down)(self._gone_message(sorted(left), "", ALL))

    def _route_again(self) -> None:
        """Send all messages that had no route, or that may have been lost with a connection."""
        waiting = [*self._log.repeated, *self._waiting]
        self._waiting.clear()
        for message in waiting:
            self._route(message, None)

    def _handle(self, message: RoutedMessage, came_by: Transport | None) -> None:
        match message.body:
            case Departure():
                self._on_departure(message.to, message.body)
            case Heartbeat():
                pass
            case body:
                for source in message.sources:
                    self._deliver(source, body)

    # -- connections --------------------------------------------------------------------------------------------------

    def refusal(self, rank: int) -> str:
        """Why ``rank`` may not connect to this node; empty: it may."""
        if self.fenced:  # it knows nothing of the other ranks, and cannot give them up
            return FENCED
        if rank == self.rank or rank not in self.topology.contacts:
            return f"the job has no other rank {rank}"
        # a rank that leaves together with this one may connect: the next root may learn of its leave from no other rank
        if rank in self.gone and (self.gone[rank] or not self._leaving):
            return f"rank {rank} was given up: {self.gone[rank] or 'it has left'}"
        if rank in self._links:
            return f"rank {rank} is connected already"
        return ""

    def accept(self, rank: int, link: Transport) -> None:
        """Add the connection of ``rank``, below this node."""
        self._down[link], self._links[rank] = rank, link
        self._set_route(rank, link)
        self.last_heard[rank] = time.monotonic()
        self.send(ROOT, Presence())
        for frame in self._missed_news():  # by the rank, or by ranks below it
            link.send(frame)
        if self._leaving:
            link.send(self._gone_message([self.rank], "", ALL))
        if self._patient.waiting and rank == self._heir:
            self._entrust(self._patient.waiting)

    def _missed_news(self) -> list[RoutedMessage | MessageBatch]:
        """The news that a rank may have missed. All ranks connect to a new root, so they are not made anew for each."""
        gone, added, frames = self._missed
        recent, later = self._log.added - added, [*itertools.islice(self.gone, gone, None)]
        if len(later) > LATER or recent > LATER:
            frames = list(batches([*self._all_gone(ALL), *self._log.recent]))
            self._missed = len(self.gone), self._log.added, frames
            return frames
        messages = [*self._log.recent][-recent:] if recent else []
        return [*frames, *batches([*self._departures_of(later, ALL), *messages])]

    def _set_route(self, rank: int, link: Transport) -> None:
        self._routes[rank] = link
        self._behind.setdefault(link, set()).add(rank)

    def attach(self, rank: int, link: Transport) -> None:
        """Add the connection to ``rank``, above this node."""
        self.up, self._up_rank = link, rank
        self.last_heard[rank] = time.monotonic()
        self.send(ROOT, Presence())
        present = [RoutedMessage(ROOT, below, Presence()) for below in self._routes]
        # a lost root may have reached some ranks only
        self._send_together(link, [*present, *self._all_gone(ROOT), *self._log.recent])
        self._route_again()
        if self._leaving:
            link.send(self._gone_message([self.rank], "", ALL))

    def received(self, link: Transport, data: JsonObject) -> None:
        """Handle a message, or a batch, from ``link``. Raises: MessageError."""
        if "messages" in data:
            batch: MessageBatch = decode(MessageBatch, data)
            forwarded = link is self.up and all(message.to == ALL and not message.held for message in batch.messages)
            if forwarded:
                self._forward_down(batch)
            for message in batch.messages:
                self._take(link, message, forwarded=forwarded)
        else:
            self._take(link, decode(RoutedMessage, data))
        returned, self._returned = self._returned, []
        self._send_together(link, returned)

    def _take(self, link: Transport, message: RoutedMessage, *, forwarded: bool = False) -> None:
        source, body = message.source, message.body
        if source not in self.topology.contacts or not distinct_ranks(message.also) <= self.topology.contacts.keys():
            raise MessageError(f"source {source} is no rank of the job, got {shown(message)}")
        if isinstance(body, Departure) and not distinct_ranks(body.ranks) <= self.topology.contacts.keys():
            raise MessageError(f"a departure is of ranks of the job, got {shown(message)}")
        if isinstance(body, DepartureAck):
            self._on_departure_ack(link)
            return
        now = time.monotonic()
        below = self._down.get(link)
        if below is not None:
            if message.held:
                raise MessageError(f"only the root entrusts messages to a rank, got {shown(message)}")
            self.last_heard[below] = now
            if source in self.gone:
                if message.to != ALL:
                    return  # sent before the rank was gone
            elif isinstance(body, Presence):  # no other message: a repeated message may come from any rank
                self._set_route(source, link)
                self.last_heard.setdefault(source, now)  # it may stop before the first heartbeat
            if isinstance(body, Heartbeat):
                self.last_heard.update(
                    (rank, now - age) for rank, age in body.ages.items() if rank in self.topology.contacts
                )
                return
            if source == below and isinstance(body, Departure) and body == Departure((below,), ""):
                self._route(message, link)  # first: the acknowledged leave must not end with this node
                self._on_leave(below, link)
                return
        elif link is self.up and self._up_rank is not None:
            self.last_heard[self._up_rank] = now
            if isinstance(body, Heartbeat):
                return
            if message.held:
                self._entrusted.add(message)
                return
        elif link in self._left_above:
            if message.held:
                self._entrusted.add(message)
                self._inherit()
                return
            if not isinstance(message.to, int) or isinstance(body, Heartbeat):
                return  # messages to all come from the ranks that told of the leave
        else:
            return  # from a dropped connection
        self._route(message, link, forwarded=forwarded)
        if below is not None and isinstance(body, Departure) and not self.is_root:
            # the root may leave before it has read this: the next root learns of it from this node
            self._mark_gone([rank for rank in distinct_ranks(body.ranks) if rank != self.rank], body.reason)

    def _on_leave(self, rank: int, link: Transport) -> None:
        """Handle the orderly leave of ``rank``, directly below this node: its last message."""
        if self._leaving or not self.is_root:  # this node may go, too, before the root sends the news
            (self._spread if self.is_root else self._forward_down)(self._gone_message([rank], "", ALL))
        self._mark_gone([rank], "")
        if not self._leaving:  # else the next root must receive the leave, too
            self._drop_link(link)
            link.send(RoutedMessage(rank, self.rank, DepartureAck()))
            link.close()

    def ended(self, link: Transport, how: str) -> None:
        """Handle the end of a connection."""
        if link is self.up:
            rank, self.up, self._up_rank = self._up_rank, None, None
            assert rank is not None
            self.declare_lost(rank, how)
        elif link in self._left_above:
            self._left_above.remove(link)
        elif (below := self._drop_link(link)) is not None:
            self.declare_lost(below, how)

    def _drop_link(self, link: Transport) -> int | None:
        """Remove a connection from below and its routes; the ranks behind it reconnect elsewhere."""
        for rank in self._behind.pop(link, ()):
            if self._routes.get(rank) is link:
                del self._routes[rank]
        below = self._down.pop(link, None)
        if below is not None:
            del self._links[below]
        return below

    def declare_lost(self, rank: int, how: str) -> None:
        """Declare ``rank`` lost, even if its connection is open, and send the loss to the other ranks."""
        if rank in self.gone:
            return
        self._mark_gone([rank], how)
        self._forward_down(self._gone_message([rank], how, ALL))
        if not self.is_root:
            self._route(self._gone_message([rank], how, ROOT), None)

    def loss_message(self, rank: int) -> RoutedMessage | None:
        """The message to a rank that was declared lost: it may not know; None: it was not."""
        how = self.gone.get(rank)
        return self._gone_message([rank], how, rank) if how else None

    def fence(self, why: str) -> None:
        """Cut this rank off: the other ranks have declared it lost, and continue without it."""
        self.fenced = self.fenced or why or "the others have given it up"
        for link in self.links:
            link.close()
        self.up = self._up_rank = None
        self._left_above.clear()
        self._down.clear()
        self._links.clear()
        self._routes.clear()
        self._behind.clear()
        others = [other for other in self.topology.contacts if other != self.rank]
        self._mark_gone(others, f"it goes on without rank {self.rank}: {why}")

    def expire_silent(self, seconds: float) -> None:
        """Declare the rank above lost if its last message is more than ``seconds`` old."""
        rank = self._up_rank
        if rank is not None and (silence := self.silence(rank)) is not None and silence > seconds:
            self.declare_lost(rank, SILENT.format(silence))

    def leave(self) -> None:
        """Announce this rank's orderly leave; :attr:`leave_acknowledged` turns true with the last acknowledgement."""
        self._leaving = True
        self._patient.flush()
        message = self._gone_message([self.rank], "", ALL)
        for link in self.links:
            if link not in self._left_above:
                link.send(message)

    @property
    def leave_acknowledged(self) -> bool:
        """Whether all ranks that are, or would now be, connected to this node have acknowledged its leave."""
        if not self._leaving:
            return False
        if self.above is not None:
            return False
        return all(rank in self._acknowledged for rank in self.topology.below(self.rank, self.gone))

    def _on_departure_ack(self, link: Transport) -> None:
        """Handle an acknowledgement of our leave: the peer on ``link`` needs this node no longer."""
        if link is self.up and self._up_rank is not None:
            self._acknowledged.add(self._up_rank)
            self._acknowledged_above = True
            self.up = self._up_rank = None
        elif link in self._down:
            self._acknowledged.add(self._down[link])
            self._drop_link(link)
        link.close()

    def _gone_message(self, ranks: Sequence[int], how: str, to: Address) -> RoutedMessage:
        return RoutedMessage(to, self.rank, Departure(compact_ranks(ranks), how), patient=to == ALL and not how)

    def _all_gone(self, to: Address) -> list[RoutedMessage]:
        if to not in self._departures:
            # many ranks that a root has sent are a list of their own for the next root, which is equal from all nodes
            untold = self._untold if to == ROOT and len(self.gone) > LATER else set()
            told = self.gone.keys() - untold
            self._departures[to] = [*self._departures_of(told, to), *self._departures_of(untold, to)]
        return self._departures[to]

    def _departures_of(self, gone: Iterable[int], to: Address) -> list[RoutedMessage]:
        reasons: dict[str, list[int]] = {}
        for rank in sorted(gone):
            reasons.setdefault(self.gone[rank], []).append(rank)
        return [self._gone_message(ranks, how, to) for how, ranks in reasons.items()]

    def _on_departure(self, to: Address, departure: Departure) -> None:
        ranks, how = distinct_ranks(departure.ranks), departure.reason
        if how and to != ROOT and self.rank in ranks:
            self.fence(how)
        new = sorted(rank for rank in ranks if rank not in self.gone and rank != self.rank)
        if new:
            message = self._gone_message(new, how, ALL)
            if to == ROOT and not how:
                (self._spread if self.is_root else self._forward_down)(message)
            self._mark_gone(new, how)
            if to == ROOT and how:
                self._forward_down(message)
        if to == ALL and not self._untold.isdisjoint(ranks):
            self._untold -= ranks
            self._departures.pop(ROOT, None)

    def _forward_down(self, message: RoutedMessage | MessageBatch) -> None:
        self._patient.flush()
        self._send_down(message)

    def _send_down(self, message: RoutedMessage | MessageBatch) -> None:
        for link in list(self._down):
            link.send(message)

    def _send_together(self, link: Transport, messages: Sequence[RoutedMessage]) -> None:
        for frame in batches(messages):
            link.send(frame)

    def _mark_gone(self, ranks: Collection[int], how: str) -> None:
        """Record that ``ranks`` are gone, but those that were before."""
        ranks = [rank for rank in ranks if rank not in self.gone]
        if not ranks:
            return
        was_root, root = self.is_root, self._root
        heirs = {self._next_root(), self.topology.next_leader(self.rank, self.gone)} if self._patient.waiting else set()
        self._departures.clear()
        self._untold.update(ranks)
        for rank in ranks:
            self.gone[rank] = how
            self._routes.pop(rank, None)
            if how and (link := self._links.get(rank)) is not None:
                self._drop_link(link)
                link.send(self._gone_message([rank], how, rank))  # the rank may not know of its loss
                link.close()
        if (above := self._up_rank) is not None and above in ranks and self.up is not None:
            if how:
                self.up.send(self._gone_message([above], how, above))
                self.up.close()
            else:
                self.up.send(RoutedMessage(above, self.rank, DepartureAck()))
                self._left_above.add(self.up)  # not closed: another rank may have told of the leave before
            self.up = self._up_rank = None
        self._notify_gone(ranks, how)
        if not heirs.isdisjoint(ranks):  # others look for that rank when this one is lost, and must know that it left
            self._patient.flush()
        if self.is_root and not was_root:
            now = time.monotonic()
            for other in self.topology.contacts:  # all connect here now; an absent rank is silent from now on
                if other != self.rank and other not in self.gone:
                    self.last_heard.setdefault(other, now)
            for frame in batches(self._all_gone(ALL)):  # the last root may have reached some ranks only
                self._forward_down(frame)
            self._route_again()
        if root in self.gone:
            self._inherit()

    # -- heartbeats ---------------------------------------------------------------------------------------------------

    def send_heartbeats(self) -> None:
        """Send a heartbeat over each connection. The channel calls this every ``HEARTBEAT_SECONDS``."""
        now = time.monotonic()
        if self.up is not None:
            ages = {rank: round(now - self.last_heard[rank], 3) for rank in self._routes if rank in self.last_heard}
            self.up.send(RoutedMessage(ROOT, self.rank, Heartbeat(ages)))
        for link in list(self._down):
            link.send(RoutedMessage(ROOT, self.rank, Heartbeat()))

    def reset_heartbeats(self) -> None:
        """Measure the silence of all ranks from now on."""
        now = time.monotonic()
        self.last_heard = dict.fromkeys(self.last_heard, now)

    def silence(self, rank: int) -> float | None:
        """Seconds since the last message of ``rank``, as far as this node can tell; None: unknown."""
        last_heard = self.last_heard.get(rank)
        return None if last_heard is None else time.monotonic() - last_heard
