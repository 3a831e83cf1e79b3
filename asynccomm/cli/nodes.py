"""The launchers of a run on several nodes: they agree on the ranks, and end together.

Node 0 hosts the store. Its launcher listens at a TCP port, which it writes to the store together with the tokens of the
run; the launchers of the other nodes connect there. They send NodeJoin, get the Plan once all have joined, and send
NodeDone when their ranks have succeeded. A node that fails, or gets a signal, sends NodeEnd, which reaches all nodes.
So does the end of a launcher: its connection ends with it, and a silent host's after some ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from asynccomm.control.transport.connection import Connection, Tokens, connect
from asynccomm.control.transport.listener import Listener
from asynccomm.control.transport.schema import JsonObject, Message, TaggedMessage, decode, dumps, loads
from asynccomm.control.transport.sockets import tcp_socket
from asynccomm.control.transport.topology import RankAddress, Text
from asynccomm.errors import RendezvousError, StoreError
from asynccomm.store.base import within
from asynccomm.store.client import StoreClient

JOIN_SECONDS: Final = 600.0  # for all nodes to come; torchrun's default, too
LOST_CODE: Final = 1  # exit code of a run that has lost a node
USAGE_CODE: Final = 2  # exit code of a run with different options on its nodes

_KEY: Final = "asynccomm/launchers"


@final
@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The place of this launcher among those of a run."""

    number: int
    count: int
    host: str  #: of the store, as the other nodes reach it
    port: int


@final
class Plan(TaggedMessage, frozen=True):
    """The ranks of all nodes."""

    run_id: Text
    sizes: list[int]  #: ranks, by node

    def first(self, node: int) -> int:
        """The first rank of a node."""
        return sum(self.sizes[:node])


@final
class NodeEnd(TaggedMessage, frozen=True):
    """The run has to end, for a reason on node ``node``."""

    node: int
    reason: Text
    code: int  #: for the shell
    signal: int = 0  #: to pass on to the ranks; 0: none


@final
class NodeJoin(TaggedMessage, frozen=True):
    """A node is there, with so many ranks."""

    node: int
    ranks: int
    nodes: int  #: ``--nodes`` of this node


@final
class NodeDone(TaggedMessage, frozen=True):
    """The ranks of a node have succeeded; from node 0: those of all nodes have."""

    node: int


@final
class _Meeting(Message, frozen=True):
    """The port of node 0's launcher, in the store."""

    port: int
    tokens: Tokens


@final
class Nodes:
    """This launcher's connections to the others. Runs on one event loop.

    Args:
        options: the place of this launcher.
        ranks: on this node.
        run_id: of the run; node 0's counts.
        on_end: called once, with the reason to end that another node sent, or with its loss.
    """

    def __init__(self, options: NodeOptions, ranks: int, run_id: str, on_end: Callable[[NodeEnd], object]) -> None:
        self._options = options
        self._ranks = ranks
        self._run_id = run_id
        self._on_end = on_end
        self._plan: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
        self._all_done = asyncio.Event()
        self._ended = False
        self._links: dict[int, Connection] = {}  # node 0's to all others; another node's to node 0
        self._sizes: dict[int, int] = {}
        self._done: set[int] = set()
        self._listener: Listener | None = None

    async def meet(self) -> Plan:
        """Wait for the other nodes. Cancelling is safe, if ``close`` follows.

        Raises: RendezvousError naming the missing nodes, or two nodes with one number.
        """
        options = self._options
        try:
            async with within(JOIN_SECONDS):
                store = await StoreClient.connect(options.host, options.port, timeout=JOIN_SECONDS)
                try:
                    await (self._listen(store) if options.number == 0 else self._connect(store))
                    return await self._plan
                finally:
                    await store.aclose()
        except TimeoutError:
            missing = [node for node in range(options.count) if node not in self._sizes]
            late = f"nodes {missing}" if options.number == 0 else "the other nodes"
            raise RendezvousError(f"{late} did not come within {JOIN_SECONDS:g} s") from None
        except RendezvousError:  # which is a StoreError
            raise
        except StoreError as exc:
            raise RendezvousError(f"the store of node 0 at {options.host}:{options.port} was lost: {exc}") from exc

    async def _listen(self, store: StoreClient) -> None:
        tokens = Tokens.random()
        self._listener = Listener(tokens, self._refusal, self._accept, _drop, self._options.count)
        sock = tcp_socket("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
        self._listener.listen(sock)
        self._add(0, self._ranks)
        await store.set(_KEY, dumps(_Meeting(sock.getsockname()[1], tokens)))

    async def _connect(self, store: StoreClient) -> None:
        options = self._options
        meeting: _Meeting = loads(_Meeting, await store.get(_KEY))
        contact = RankAddress(0, options.host, 0, address=options.host, port=meeting.port)
        try:
            link = await connect(contact, False, meeting.tokens, options.number, self._received, self._lost)
        except PermissionError as exc:
            raise RendezvousError(f"node 0 refuses this node: {exc.strerror}") from None
        except OSError as exc:
            raise RendezvousError(
                f"the launcher of node 0 cannot be reached at {options.host}:{meeting.port}: {exc}"
            ) from None
        self._links[0] = link
        link.send(NodeJoin(options.number, self._ranks, options.count))

    def _refusal(self, node: int | str) -> str:
        if not isinstance(node, int) or not 0 < node < self._options.count:
            return f"--node-rank must be in [0, {self._options.count}), as --nodes of node 0 says, got {node}"
        return f"node {node} is there already; each node needs its own --node-rank" if node in self._links else ""

    def _accept(self, node: int | str, link: Connection) -> None:
        assert isinstance(node, int)
        self._links[node] = link
        link.received, link.ended = self._received, self._lost

    def _received(self, link: Connection, data: JsonObject) -> None:
        message: NodeJoin | Plan | NodeDone | NodeEnd = decode(NodeJoin | Plan | NodeDone | NodeEnd, data)
        match message:
            case NodeJoin(nodes=count) if count != self._options.count:
                reason = f"--nodes differs: node 0 has {self._options.count}, node {message.node} has {count}"
                self._end(NodeEnd(message.node, reason, USAGE_CODE))
            case NodeJoin():
                self._add(message.node, message.ranks)
            case Plan():
                if not self._plan.done():
                    self._plan.set_result(message)
            case NodeDone():
                self._note_done(message.node)
            case NodeEnd():
                self._end(message)

    def _add(self, node: int, ranks: int) -> None:
        """Count a node's ranks, at node 0; the last one makes the plan."""
        self._sizes[node] = ranks
        if len(self._sizes) == self._options.count and not self._plan.done():
            plan = Plan(self._run_id, [self._sizes[node] for node in range(self._options.count)])
            self._plan.set_result(plan)
            self._send(plan)

    def _note_done(self, node: int) -> None:
        self._done.add(node)
        if self._options.number > 0 or len(self._done) == self._options.count:
            self._all_done.set()
            if self._options.number == 0:
                self._send(NodeDone(0))

    def _lost(self, link: Connection, how: str) -> None:
        node = next((node for node, each in self._links.items() if each is link), None)
        if node is not None and not self._all_done.is_set():
            del self._links[node]
            self._end(NodeEnd(node, f"the launcher of node {node} was lost: {how}", LOST_CODE))

    def _end(self, end: NodeEnd) -> None:
        """Handle the end that another node has sent, and pass it on from node 0."""
        if self._ended:
            return
        self._ended = True
        if not self._plan.done():
            self._plan.set_exception(RendezvousError(end.reason))
        self._send(end)
        self._on_end(end)

    def _send(self, message: object) -> None:
        for link in self._links.values():
            link.send(message)

    def end(self, reason: str, code: int, signal: int = 0) -> None:
        """Tell the other nodes that the run has to end, for a reason here. Idempotent."""
        if not self._ended:
            self._ended = True
            self._send(NodeEnd(self._options.number, reason, code, signal))

    async def finish(self) -> None:
        """Report that the ranks of this node have succeeded, and wait until those of all nodes have."""
        if self._options.number == 0:
            self._note_done(0)
        else:
            self._send(NodeDone(self._options.number))
        await self._all_done.wait()

    def close(self) -> None:
        """Close all connections, behind the messages sent before. Idempotent."""
        if self._plan.done() and not self._plan.cancelled():
            with contextlib.suppress(RendezvousError):
                self._plan.result()  # marks the exception as retrieved
        if self._listener is not None:
            self._listener.close()
        for link in self._links.values():
            link.close()
        self._links.clear()


def _drop(connection: Connection, look: object) -> None:
    """Refuse a diagnosis: this is no rank."""
    connection.close()
