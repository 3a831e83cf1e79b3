"""One rank's node in the tree of the control channel: routes messages and records the ranks that are gone. No I/O.

A message is addressed to a rank, to ``"root"``, or to ``"all"``. A message to all goes up to the root, which sends it
down the whole tree, so all ranks receive such messages in the same order. Each node learns the routes to the ranks
below it from their Presence messages.

Each rank that leaves, a comm or the job, messages that to all, and usually all ranks leave at about the same time. Such
messages are *patient*: the root sends those that come within ``PATIENT_SECONDS`` as one batch, which travels as one
message. One message to each rank for each rank that leaves would be too many.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, final

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
from asynccomm.control.transport.schema import JsonObject, MessageError, decode, shown
from asynccomm.control.transport.topology import Topology

KEPT: Final = 4096  # messages that wait for a connection to the rank above
LOGGED: Final = 64  # messages to all that are kept for ranks that connect later
PATIENT_SECONDS: Final = 0.05  # between batches of patient messages
BATCHED: Final = 2048  # messages in a batch at most: some 400 KB


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
        gone: called once with each rank that is gone, and the reason; an empty reason means an orderly leave.
        later: calls its argument after ``PATIENT_SECONDS``; None: no message waits for others.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        deliver: Callable[[int, Body], object],
        gone: Callable[[int, str], object],
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
        self._later = later
        self._root = -1  # the root as of the last look
        self._patient: list[RoutedMessage] = []  # at the root: messages to all that wait for others
        self._returned: list[RoutedMessage] = []  # messages to all that came again, to be returned to their senders
        self._pausing = False  # a batch was sent less than PATIENT_SECONDS ago
        self._up_rank: int | None = None
        self._down: dict[Transport, int] = {}  # connections from ranks below
        self._routes: dict[int, Transport] = {}  # towards each rank below
        self._waiting: deque[RoutedMessage] = deque(maxlen=KEPT)
        self._sent = 0  # messages to all
        self._unacked: OrderedDict[tuple[int, int], RoutedMessage] = OrderedDict()  # sent up, not returned by the root
        self._log: deque[RoutedMessage] = deque(maxlen=LOGGED)  # the last messages to all
        self._last: dict[int, int] = {}  # by rank, the number of its last message to all
        self._leaving = False
        self._acknowledged: set[int] = set()  # ranks that have acknowledged the leave
        self._acknowledged_above = False  # whether the rank above has acknowledged the leave

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root of the tree."""
        if self._root < 0 or self._root in self.gone:
            self._root = self.topology.root(self.gone)
        return self._root == self.rank

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
        if not self.is_root or self._leaving:
            return []
        return [r for r in self.topology.contacts if r != self.rank and r not in self.gone and r not in self._routes]

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, to: Address, body: Body, *, patient: bool = False) -> None:
        """Send a message; without a route, it waits for a connection, or is dropped at the root.

        Args:
            patient: of a message to all: it may wait for others.
        """
        if to == ALL:
            self._sent += 1
        self._route(RoutedMessage(to, self.rank, body, self._sent if to == ALL else None, patient), None)

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
            if self._is_new(message):
                self._handle(message, came_by)
        elif to == ROOT and (self.is_root or self._loses_above(message.body)):
            self._handle(message, came_by)
        elif came_by is not None and self._has_passed(message):
            if to == ALL:
                self._returned.append(message)
        elif isinstance(to, int) and to in self._routes:
            self._send_patient()
            self._routes[to].send(message)
        elif to == ALL and message.number is not None:
            self._unacked[message.source, message.number] = message
            if len(self._unacked) > KEPT:
                self._unacked.popitem(last=False)
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
            return isinstance(message.body, Departure) and message.body.rank in self.gone
        return message.to == ALL and message.number is not None and message.number <= self._last.get(message.source, 0)

    def _loses_above(self, body: Body) -> bool:
        """Whether ``body`` says that the rank above is lost: then the message cannot pass over that rank."""
        return isinstance(body, Departure) and bool(body.reason) and body.rank == self._up_rank

    def _broadcast(self, message: RoutedMessage, came_by: Transport | None) -> None:
        """Send a message to all ranks, at the root."""
        if self._is_new(message):
            self._spread(message)
            self._handle(message, came_by)
        elif came_by is not None:
            self._returned.append(message)  # so that the sender sees its message return

    def _spread(self, message: RoutedMessage) -> None:
        """Send a message to all ranks below, at the root; a patient message may wait."""
        if not message.patient or self._later is None:
            self._forward_down(message)
            return
        self._patient.append(message)
        if not self._pausing:
            self._send_batch(self._later)

    def _send_batch(self, later: Callable[[Callable[[], object]], object]) -> None:
        """Send the patient messages, and none for some time after."""
        self._send_patient()
        self._pausing = True

        def resume() -> None:
            self._pausing = False
            if self._patient:
                self._send_batch(later)

        later(resume)

    def _send_patient(self) -> None:
        """Send the patient messages; also before any other message, so that messages stay in order."""
        messages, self._patient = self._patient, []
        for frame in _batches(messages):
            self._forward_down(frame)

    def _route_again(self) -> None:
        """Send all messages that had no route, or that may have been lost with a connection."""
        waiting = [*self._unacked.values(), *self._waiting]
        self._waiting.clear()
        for message in waiting:
            self._route(message, None)

    def _is_new(self, message: RoutedMessage) -> bool:
        number, source = message.number, message.source
        if number is None:
            return True
        self._unacked.pop((source, number), None)
        if number <= self._last.get(source, 0):
            return False
        self._last[source] = number
        self._log.append(message)
        return True

    def _handle(self, message: RoutedMessage, came_by: Transport | None) -> None:
        match message.body:
            case Departure():
                self._on_departure(message.to, message.body)
            case Heartbeat():
                pass
            case body:
                self._deliver(message.source, body)

    # -- connections --------------------------------------------------------------------------------------------------

    def refusal(self, rank: int) -> str:
        """Why ``rank`` may not connect to this node; empty: it may."""
        if rank == self.rank or rank not in self.topology.contacts:
            return f"the job has no other rank {rank}"
        # a rank that leaves together with this one may connect: the next root may learn of its leave from no other rank
        if rank in self.gone and (self.gone[rank] or not self._leaving):
            return f"rank {rank} was given up: {self.gone[rank] or 'it has left'}"
        if rank in self._down.values():
            return f"rank {rank} is connected already"
        return ""

    def accept(self, rank: int, link: Transport) -> None:
        """Add the connection of ``rank``, below this node."""
        self._down[link] = rank
        self._routes[rank] = link
        self.last_heard[rank] = time.monotonic()
        self.send(ROOT, Presence())
        # the rank, or ranks below it, may have missed the news
        self._send_together(link, [*self._all_gone(ALL), *self._log])
        if self._leaving:
            link.send(self._gone_message(self.rank, "", ALL))

    def attach(self, rank: int, link: Transport) -> None:
        """Add the connection to ``rank``, above this node."""
        self.up, self._up_rank = link, rank
        self.last_heard[rank] = time.monotonic()
        self.send(ROOT, Presence())
        present = [RoutedMessage(ROOT, below, Presence()) for below in self._routes]
        # a lost root may have reached some ranks only
        self._send_together(link, [*present, *self._all_gone(ROOT), *self._log])
        self._route_again()
        if self._leaving:
            link.send(self._gone_message(self.rank, "", ALL))

    def received(self, link: Transport, data: JsonObject) -> None:
        """Handle a message, or a batch, from ``link``. Raises: MessageError."""
        if "messages" in data:
            batch: MessageBatch = decode(MessageBatch, data)
            forwarded = link is self.up and all(message.to == ALL for message in batch.messages)
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
        if source not in self.topology.contacts:
            raise MessageError(f"source {source} is no rank of the job, got {shown(message)}")
        if isinstance(body, DepartureAck):
            self._on_departure_ack(link)
            return
        now = time.monotonic()
        below = self._down.get(link)
        if below is not None:
            self.last_heard[below] = now
            if source in self.gone:
                if message.to != ALL:
                    return  # sent before the rank was gone
            elif isinstance(body, Presence):  # no other message: a repeated message may come from any rank
                self._routes[source] = link
                self.last_heard.setdefault(source, now)  # it may stop before the first heartbeat
            if isinstance(body, Heartbeat):
                self.last_heard.update(
                    (rank, now - age) for rank, age in body.ages.items() if rank in self.topology.contacts
                )
                return
            if body == Departure(below, "") and source == below:
                self._on_leave(below, link)
        elif link is self.up and self._up_rank is not None:
            self.last_heard[self._up_rank] = now
            if isinstance(body, Heartbeat):
                return
        else:
            return  # from a dropped connection
        self._route(message, link, forwarded=forwarded)

    def _on_leave(self, rank: int, link: Transport) -> None:
        """Handle the orderly leave of ``rank``, directly below this node: its last message."""
        self._mark_gone(rank, "")
        if self._leaving or not self.is_root:  # this node may go, too, before the root sends the news
            (self._spread if self.is_root else self._forward_down)(self._gone_message(rank, "", ALL))
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
        elif (below := self._drop_link(link)) is not None:
            self.declare_lost(below, how)

    def _drop_link(self, link: Transport) -> int | None:
        """Remove a connection from below and its routes; the ranks behind it reconnect elsewhere."""
        for rank in [rank for rank, route in self._routes.items() if route is link]:
            del self._routes[rank]
        return self._down.pop(link, None)

    def declare_lost(self, rank: int, how: str) -> None:
        """Declare ``rank`` lost, even if its connection is open, and send the loss to the other ranks."""
        if rank in self.gone:
            return
        self._mark_gone(rank, how)
        self._forward_down(self._gone_message(rank, how, ALL))
        if not self.is_root:
            self._route(self._gone_message(rank, how, ROOT), None)

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

    def expire_silent(self, seconds: float) -> None:
        """Declare the rank above lost if its last message is more than ``seconds`` old."""
        rank = self._up_rank
        if rank is not None and (silence := self.silence(rank)) is not None and silence > seconds:
            self.declare_lost(rank, f"it was silent for {silence:.1f} s, and others go on without it")

    def leave(self) -> None:
        """Announce this rank's orderly leave; :attr:`leave_acknowledged` turns true with the last acknowledgement."""
        self._leaving = True
        self._send_patient()
        message = self._gone_message(self.rank, "", ALL)
        for link in self.links:
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

    def _gone_message(self, rank: int, how: str, to: Address) -> RoutedMessage:
        return RoutedMessage(to, self.rank, Departure(rank, how), patient=to == ALL and not how)

    def _all_gone(self, to: Address) -> list[RoutedMessage]:
        return [self._gone_message(rank, how, to) for rank, how in self.gone.items()]

    def _on_departure(self, to: Address, departure: Departure) -> None:
        rank, how = departure.rank, departure.reason
        if rank not in self.topology.contacts:
            raise MessageError(f"the departure of rank {rank}, which is no rank of the job")
        if rank == self.rank:
            if how and to != ROOT:
                self.fence(how)
        elif rank not in self.gone:
            self._mark_gone(rank, how)
            if to == ROOT:
                message = self._gone_message(rank, how, ALL)
                (self._spread if self.is_root else self._forward_down)(message)

    def _forward_down(self, message: RoutedMessage | MessageBatch) -> None:
        if self._patient:
            self._send_patient()
        for link in list(self._down):
            link.send(message)

    def _send_together(self, link: Transport, messages: Sequence[RoutedMessage]) -> None:
        for frame in _batches(messages):
            link.send(frame)

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
            self.up.send(self._gone_message(rank, how, rank) if how else RoutedMessage(rank, self.rank, DepartureAck()))
            self.up.close()
            self.up = self._up_rank = None
        self._notify_gone(rank, how)
        if self.is_root and not was_root:
            now = time.monotonic()
            for other in self.topology.contacts:  # all connect here now; an absent rank is silent from now on
                if other != self.rank and other not in self.gone:
                    self.last_heard.setdefault(other, now)
            for frame in _batches(self._all_gone(ALL)):  # the last root may have reached some ranks only
                self._forward_down(frame)
            self._route_again()

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


def _batches(messages: Sequence[RoutedMessage]) -> Iterator[RoutedMessage | MessageBatch]:
    """``messages`` in order, the short ones in batches."""
    some: list[RoutedMessage] = []
    for message in messages:
        short = message.patient or isinstance(message.body, Presence) or _is_leave(message.body)
        if some and not (short and len(some) < BATCHED):
            yield some[0] if len(some) == 1 else MessageBatch(some)
            some = []
        if short:
            some.append(message)
        else:
            yield message
    if some:
        yield some[0] if len(some) == 1 else MessageBatch(some)


def _is_leave(body: Body) -> bool:
    return isinstance(body, Departure) and not body.reason
