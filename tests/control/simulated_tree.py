"""The ranks of a job without sockets: nodes, and links that carry messages one after the other, in any interleaving."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import to_builtins

from asynccomm.control.messages import ALL, Address, Body, MessageBatch, News, Presence, Request, RoutedMessage
from asynccomm.control.router import FENCED, Router
from asynccomm.control.transport.framing import encode
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.topology import RankAddress, Topology


class End:
    """One end of a connection."""

    def __init__(self, owner: Place) -> None:
        self.owner = owner
        self.other: End | None = None
        self.coming: deque[JsonObject | None] = deque()  # None: it has ended
        self.open = True  # on this side
        self.ended = False

    def send(self, message: object) -> None:
        encode(message)  # it can be
        assert self.other is not None
        assert isinstance(message, (RoutedMessage, MessageBatch))
        if self.open:
            self.other.coming.append(to_builtins(message))

    def close(self) -> None:
        assert self.other is not None
        if self.open:
            self.open = False
            self.other.coming.append(None)


class Place:
    """One rank."""

    def __init__(self, tree: Tree, rank: int) -> None:
        self.tree = tree
        self.rank = rank
        self.listens = True
        self.runs = True
        self.leaving = False
        self.heard: list[tuple[int, Body]] = []
        self.gone: list[tuple[int, str]] = []
        self.ends: list[End] = []
        self.waiting: list[Callable[[], object]] = []  # calls that come later
        self.router = Router(
            rank,
            tree.topology,
            self._hear,
            lambda ranks, how: self.gone.extend((rank, how) for rank in ranks),
            self.waiting.append,
        )

    def _hear(self, source: int, body: Body) -> None:
        if not isinstance(body, Presence):
            self.heard.append((source, body))

    def news(self) -> list[Any]:
        return [body.item["what"] for _, body in self.heard if isinstance(body, News)]

    def asked(self) -> list[Any]:
        return [body.question["what"] for _, body in self.heard if isinstance(body, Request)]

    def ask(self, to: Address, what: Any) -> None:
        self.router.send(to, Request("comm", {"what": what}, 0))

    def kill(self) -> None:
        self.runs = self.listens = False
        for end in self.ends:
            end.close()
            end.coming.clear()

    def leave(self) -> None:
        self.leaving = True
        self.router.leave()

    def receive(self, end: End) -> None:
        message = end.coming.popleft()
        if message is None:
            end.ended = True
            if end.open:
                end.open = False
                assert end.other is not None
                end.other.coming.append(None)
                self.router.ended(end, "its connection ended")
        elif end.open:
            self.router.received(end, message)

    def resume(self) -> None:
        self.waiting.pop(0)()

    def climb(self) -> None:
        above = self.router.above
        assert above is not None
        there = self.tree.places[above]
        if problem := there.router.refusal(self.rank):
            if problem == FENCED:
                self.router.declare_lost(above, problem)
            else:
                self.router.fence(problem)
            return
        mine, theirs = End(self), End(there)
        mine.other, theirs.other = theirs, mine
        self.ends.append(mine)
        there.ends.append(theirs)
        there.router.accept(self.rank, theirs)
        self.router.attach(above, mine)


class Tree:
    """All of them. ``hosts`` has a letter for each rank."""

    def __init__(self, hosts: str, seed: int = 0) -> None:
        self.topology = Topology(RankAddress(rank, host, rank, local="x") for rank, host in enumerate(hosts))
        self.places = [Place(self, rank) for rank in range(len(hosts))]
        self.choice = random.Random(seed)

    @property
    def running(self) -> list[Place]:
        return [place for place in self.places if place.runs]

    def steps(self) -> list[Callable[[], object]]:
        """What can happen next."""
        found: list[Callable[[], object]] = []
        for place in self.running:
            above = place.router.above
            if place.leaving and place.router.leave_acknowledged:
                found.append(partial(self._gone, place))
            if place.router.up is None and above is not None and self.places[above].listens:
                found.append(place.climb)
            found += [partial(place.receive, end) for end in place.ends if end.coming]
            found += [partial(place.resume) for _ in place.waiting[:1]]
        return found or self.late_steps()

    def late_steps(self) -> list[Callable[[], object]]:
        """What happens only after some time in which nothing else did."""
        found: list[Callable[[], object]] = []
        for place in self.running:
            missed = place.router.absent if place.router.above is None else [place.router.above]
            for rank in missed:
                if not self.places[rank].listens:
                    found.append(partial(place.router.declare_lost, rank, "it does not listen"))
        return found or [partial(self._gone, place) for place in self.running if place.leaving]

    def _gone(self, place: Place) -> None:
        place.runs = place.listens = False
        for end in place.ends:
            end.close()

    def settle(self, steps: int | None = None) -> None:
        """Let happen what can, or so much of it."""
        done = 0
        while (steps is None or done < steps) and (possible := self.steps()):
            self.choice.choice(possible)()
            done += 1
            assert done < 100_000, "it does not come to rest"

    def tell(self, rank: int, what: Any) -> None:
        self.places[rank].router.send(ALL, News("comm", {"what": what}))
