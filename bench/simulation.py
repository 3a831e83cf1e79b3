"""A network in one process, in virtual time: for the protocols of many ranks.

The protocols are the package's own code. Virtual are the time (``run`` jumps to the next timer when nothing is ready),
the network, and the time that a node takes for a message. A node handles one message after the other; a message takes
``message_us`` and its bytes' time at both ends, and ``remote_us`` or ``local_us`` on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import selectors
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar, final
from unittest import mock

import msgspec

from asynccomm.control import router, runs
from asynccomm.control.channel import LEAVE_ACK_SECONDS
from asynccomm.control.patient import PATIENT_SECONDS
from asynccomm.control.router import Router
from asynccomm.control.transport import schema
from asynccomm.control.transport.topology import RankAddress, Topology
from asynccomm.control.uplink import NOT_THERE, REFUSED_SECONDS
from asynccomm.store.base import Store
from asynccomm.store.memory import MemoryStore

REMEMBERED: Final = 4096  # messages, and lists of ranks, that the simulation has once for all ranks

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Ranks on hosts, in the order of the hosts. Times are in microseconds."""

    ranks: int
    per_host: int
    local_us: float  #: from rank to rank of one host
    remote_us: float  #: from host to host
    message_us: float  #: that a node takes for a message, at either end
    gbit: float  #: per second, of a node

    def host(self, rank: int) -> int:
        return rank // self.per_host

    def latency(self, one: int, other: int) -> float:
        return self.local_us if self.host(one) == self.host(other) else self.remote_us

    def cost(self, nbytes: int) -> float:
        """Microseconds that a node takes for a message of ``nbytes``."""
        return self.message_us + nbytes * 8 / (self.gbit * 1000)

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.per_host)


# -- asyncio in virtual time -------------------------------------------------------------------------------------------


class _Clock(selectors.SelectSelector):
    """In place of waiting, the time advances."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("all ranks wait for each other")
        self.now += timeout
        return []


@final
class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result of ``main``, and the virtual seconds that it took."""
    loop = _VirtualLoop()
    try:
        return loop.run_until_complete(main), loop.time()
    finally:
        loop.close()


# -- the store ---------------------------------------------------------------------------------------------------------


@final
class StoreServer:
    """The store, on the host of rank 0."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.contents = MemoryStore()
        self.requests = 0
        self.nbytes = 0  #: of requests and replies
        self._free = 0.0  # time from which the server has nothing to do

    async def handle(self, nbytes: int) -> None:
        """Wait until the server has handled a message."""
        self.nbytes += nbytes
        now = asyncio.get_running_loop().time()
        self._free = max(now, self._free) + self.network.cost(nbytes) * 1e-6
        await asyncio.sleep(self._free - now)


@final
class SimulatedStore(Store):
    """The client of one rank."""

    def __init__(self, server: StoreServer, rank: int) -> None:
        self._server = server
        self._latency = server.network.latency(rank, 0) * 1e-6
        self._last: asyncio.Future[None] | None = None  # a client's requests arrive in order

    async def _request(self, nbytes: int, action: Callable[[], Awaitable[T]], reply: Callable[[T], int]) -> T:
        before, arrived = self._last, asyncio.get_running_loop().create_future()
        self._last = arrived
        self._server.requests += 1
        try:
            await asyncio.sleep(self._latency)
            if before is not None:
                await before
            await self._server.handle(nbytes)
        finally:
            if not arrived.done():
                arrived.set_result(None)
        result = await action()
        size = reply(result)
        if size:
            await self._server.handle(size)
            await asyncio.sleep(self._latency)
        return result

    async def set(self, key: str, value: bytes | str) -> None:
        await self._request(len(key) + len(value), lambda: self._server.contents.set(key, value), lambda _: 0)

    async def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        return await self._request(len(key), lambda: self._server.contents.get(key, timeout), lambda found: len(found))

    async def add(self, key: str, amount: int) -> int:
        return await self._request(len(key) + 8, lambda: self._server.contents.add(key, amount), lambda _: 8)

    async def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        size = len(key) + len(expected) + len(desired)
        action = lambda: self._server.contents.compare_set(key, expected, desired)  # noqa: E731
        return await self._request(size, action, lambda found: len(found))

    async def check(self, keys: Sequence[str]) -> bool:
        return await self._request(sum(map(len, keys)), lambda: self._server.contents.check(keys), lambda _: 1)

    async def wait(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> None:
        await self._request(sum(map(len, keys)), lambda: self._server.contents.wait(keys, timeout), lambda _: 1)

    async def delete(self, key: str) -> bool:
        return await self._request(len(key), lambda: self._server.contents.delete(key), lambda _: 1)

    async def append(self, key: str, value: bytes | str) -> None:
        await self._request(len(key) + len(value), lambda: self._server.contents.append(key, value), lambda _: 0)

    async def multi_get(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> list[bytes]:
        await self.wait(keys, timeout)
        action = lambda: self._server.contents.multi_get(keys, timeout)  # noqa: E731
        return await self._request(sum(map(len, keys)), action, lambda found: sum(map(len, found)))

    async def multi_set(self, items: Mapping[str, bytes | str]) -> None:
        size = sum(len(key) + len(value) for key, value in items.items())
        await self._request(size, lambda: self._server.contents.multi_set(items), lambda _: 0)

    async def num_keys(self) -> int:
        return await self._request(1, self._server.contents.num_keys, lambda _: 8)


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Have all ranks share the messages that they get, and the lists in them, as if each had decoded its own."""
    decoded: OrderedDict[int, tuple[object, Any]] = OrderedDict()

    def decode(kind: Any, data: object) -> Any:
        found = decoded.get(id(data))
        if found is None:
            found = decoded[id(data)] = data, schema.decode(kind, data)
            if len(decoded) > REMEMBERED:
                decoded.popitem(last=False)
        return found[1]

    read = functools.lru_cache(REMEMBERED)(runs._read.__wrapped__)
    with mock.patch.object(router, "decode", decode), mock.patch.object(runs, "_read", read):
        yield


# -- the control channel -----------------------------------------------------------------------------------------------


@final
class Tree:
    """The control channel of all ranks: their routers, on simulated connections."""

    def __init__(self, network: Network) -> None:
        self.network = network
        contacts = [
            RankAddress(rank, f"host{rank // network.per_host}", rank, "local") for rank in range(network.ranks)
        ]
        topology = Topology(contacts)
        self.now = 0.0  #: microseconds
        self.messages = 0
        self.handled = [0] * network.ranks  #: messages that each rank has received
        self._topology = topology
        self.routers = [self._router(rank) for rank in range(network.ranks)]
        self.suspicions = 0  #: ranks that ended with another rank taken for lost
        self.nbytes = 0  #: of all messages
        self.last = 0.0  #: time at which the last message was handled
        self.changed = 0.0  #: time of the last news of a lost rank, or of the last connection
        self.dead: set[int] = set()
        self.leaving: set[int] = set()
        #: the last messages, their data and bytes: many ranks get, and pass on, the same ones
        self._encoded: OrderedDict[int, tuple[object, Any, int]] = OrderedDict()
        self._probing: set[int] = set()
        self._free = [0.0] * network.ranks  # times from which the ranks have nothing to do
        self._inboxes: list[deque[tuple[_Link, Any]]] = [deque() for _ in range(network.ranks)]
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def _router(self, rank: int) -> Router:
        return Router(rank, self._topology, _ignore, self._gone, self._later)

    def _gone(self, ranks: Sequence[int], how: str) -> None:
        self.changed = self.now

    def _later(self, call: Callable[[], object]) -> None:
        self.at(self.now + PATIENT_SECONDS * 1e6, call)

    def at(self, when: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def run(self) -> float:
        """Until nothing is left to do. Returns the microseconds until the last news of a lost rank, or connection."""
        begin = self.now
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return max(0.0, self.changed - begin)

    def attach_all(self) -> None:
        """Each rank connects to the rank above it."""
        for rank in range(self.network.ranks):
            self._attach(rank)

    def _attach(self, rank: int) -> None:
        node = self.routers[rank]
        if rank in self.dead or node.up is not None or (above := node.above) is None:
            return
        if above in self.dead:  # it refuses connections
            self.at(self.now + REFUSED_SECONDS * 1e6, lambda: self._refused(rank, above))
            return
        one, other = _Link(self, rank, above), _Link(self, above, rank)
        one.peer, other.peer = other, one
        self.routers[above].accept(rank, other)
        node.attach(above, one)

    def _refused(self, rank: int, above: int) -> None:
        if rank not in self.dead and self.routers[rank].above == above:
            self.routers[rank].declare_lost(above, NOT_THERE)
            self._after(rank)

    def kill(self, rank: int) -> None:
        """End ``rank`` and its connections."""
        self.dead.add(rank)
        for link in self.routers[rank].links:
            assert isinstance(link, _Link)
            link.close()
        self.suspicions += any(self.routers[rank].gone.values())
        self.routers[rank] = self._router(rank)  # frees the memory of the other one

    def leave(self, rank: int) -> None:
        """Have ``rank`` leave in good order; its connections end once that is acknowledged, or after a while."""
        self.leaving.add(rank)
        self.routers[rank].leave()
        self.at(self.now + LEAVE_ACK_SECONDS * 1e6, lambda: None if rank in self.dead else self.kill(rank))
        self._after(rank)

    def send(self, link: _Link, message: object) -> None:
        """Deliver ``message`` at the other end of ``link``."""
        if (encoded := self._encoded.get(id(message))) is None:
            data = msgspec.to_builtins(message)
            encoded = self._encoded[id(message)] = message, data, len(msgspec.json.encode(data))
            if len(self._encoded) > REMEMBERED:
                self._encoded.popitem(last=False)
        _, data, nbytes = encoded
        self.messages += 1
        self.nbytes += nbytes
        when = self._arrival(link, nbytes)
        self.at(when, lambda: self._arrived(link, data))

    def end(self, link: _Link) -> None:
        self.at(self._arrival(link, 0), lambda: self._arrived(link, None))

    def _arrival(self, link: _Link, nbytes: int) -> float:
        source, to = link.rank, link.to
        cost = self.network.cost(nbytes)
        self._free[source] = max(self.now, self._free[source]) + cost
        link.last = max(self._free[source] + self.network.latency(source, to), link.last)
        return link.last

    def _arrived(self, link: _Link, data: Any) -> None:
        """Queue a message at its rank, or the end of a connection."""
        inbox = self._inboxes[link.to]
        inbox.append((link, data))
        if len(inbox) == 1:
            self.at(max(self.now, self._free[link.to]), lambda: self._handle_next(link.to))

    def _handle_next(self, rank: int) -> None:
        inbox = self._inboxes[rank]
        link, data = inbox[0]
        if rank not in self.dead:
            assert link.peer is not None
            if data is None:
                self.routers[rank].ended(link.peer, "its connection has ended")
            else:
                self._free[rank] = max(self.now, self._free[rank]) + self.network.message_us
                self.last = self._free[rank]
                if "body" in data and data["body"]["kind"] == "Presence":
                    self.changed = self.now
                self.handled[rank] += 1
                self.routers[rank].received(link.peer, data)
            self._after(rank)
        inbox.popleft()
        if inbox:
            self.at(max(self.now, self._free[rank]), lambda: self._handle_next(rank))

    def _after(self, rank: int) -> None:
        if rank in self.leaving and rank not in self.dead and self.routers[rank].leave_acknowledged:
            self.kill(rank)
            return
        self._attach(rank)
        if self.routers[rank].is_root and rank not in self._probing and self.routers[rank].absent:
            self._probing.add(rank)
            self.at(self.now + REFUSED_SECONDS * 1e6, lambda: self._probe(rank))

    def _probe(self, rank: int) -> None:
        """The root looks for the ranks that should be connected and are not."""
        self._probing.discard(rank)
        if rank not in self.dead:
            for absent in self.routers[rank].absent:
                if absent in self.dead:
                    self.routers[rank].declare_lost(absent, NOT_THERE)
            self._after(rank)


def _ignore(source: int, body: object) -> None:
    pass


@final
class _Link:
    """One end of a connection."""

    def __init__(self, tree: Tree, rank: int, to: int) -> None:
        self._tree = tree
        self.rank, self.to = rank, to
        self.peer: _Link | None = None
        self.last = 0.0  # arrival of the last message
        self._closed = False

    def send(self, message: object) -> None:
        if not self._closed:
            self._tree.send(self, message)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tree.end(self)
