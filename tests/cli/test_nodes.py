"""Launchers that agree, in one process; as commands on hosts of their own in tests/many_hosts/test_starting.py."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from asynccomm.cli import nodes as module
from asynccomm.cli.nodes import NodeEnd, NodeOptions, Nodes, Plan
from asynccomm.errors import RendezvousError
from asynccomm.store.server import StoreServer, listen, serve
from tests.waiting import until


class Run:
    """The launchers of one run."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.nodes: list[Nodes] = []
        self.ends: list[list[NodeEnd]] = []

    def add(self, number: int, count: int, ranks: int = 2) -> Nodes:
        ends: list[NodeEnd] = []
        options = NodeOptions(number, count, "127.0.0.1", self._port)
        node = Nodes(options, ranks, f"run {number}", ends.append)
        self.ends.append(ends)
        self.nodes.append(node)
        return node


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    server: StoreServer = serve("127.0.0.1", listen("127.0.0.1", 0))
    made = Run(server.port)
    yield made
    for node in made.nodes:
        node.close()
        node.close()
    await asyncio.sleep(0)
    server.release()


async def met(run: Run, *sizes: int) -> list[Plan]:
    nodes = [run.add(number, len(sizes), size) for number, size in enumerate(sizes)]
    async with asyncio.timeout(30):
        return list(await asyncio.gather(*(node.meet() for node in nodes)))


async def test_all_nodes_get_one_plan(run: Run) -> None:
    plans = await met(run, 2, 1, 3)
    assert plans == [Plan("run 0", [2, 1, 3])] * 3
    assert [plans[0].first(node) for node in range(3)] == [0, 2, 3]


async def test_a_run_is_over_when_all_nodes_have_finished(run: Run) -> None:
    await met(run, 1, 1, 1)
    first = [asyncio.create_task(node.finish()) for node in run.nodes[:2]]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in first)
    async with asyncio.timeout(20):
        await asyncio.gather(*first, run.nodes[2].finish())
    run.nodes[0].close()  # its end is no loss any more
    await asyncio.sleep(0.05)
    assert run.ends == [[], [], []]


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_the_end_of_one_node_reaches_all_others_once(run: Run, number: int) -> None:
    await met(run, 1, 1, 1)
    run.nodes[number].end("rank 7 ended with exit code 3", 3)
    run.nodes[number].end("again", 4)
    others = [ends for node, ends in enumerate(run.ends) if node != number]
    await until(lambda: all(others))
    assert others == [[NodeEnd(number, "rank 7 ended with exit code 3", 3)]] * 2
    assert run.ends[number] == []


@pytest.mark.parametrize("number", [0, 2])
async def test_a_launcher_that_is_lost_ends_the_run(run: Run, number: int) -> None:
    await met(run, 1, 1, 1)
    run.nodes[number].close()
    others = [ends for node, ends in enumerate(run.ends) if node != number]
    await until(lambda: all(others))
    assert all(end.node == number and end.code == 1 for (end,) in others)
    assert all(end.reason.startswith(f"the launcher of node {number} was lost") for (end,) in others)


async def test_two_nodes_with_one_number(run: Run) -> None:
    zero = asyncio.create_task(run.add(0, 3).meet())
    one = asyncio.create_task(run.add(1, 3).meet())
    await until(lambda: 1 in run.nodes[0]._links)
    with pytest.raises(RendezvousError, match="node 0 refuses this node: node 1 is there already; each node needs its"):
        await run.add(1, 3).meet()
    with pytest.raises(RendezvousError, match=r"--node-rank must be in \[0, 3\), as --nodes of node 0 says, got 7"):
        await run.add(7, 8).meet()
    for task in (zero, one):
        task.cancel()
    await asyncio.gather(zero, one, return_exceptions=True)


async def test_nodes_that_have_been_told_other_counts(run: Run) -> None:
    async with asyncio.timeout(30):
        results = await asyncio.gather(run.add(0, 2).meet(), run.add(1, 3).meet(), return_exceptions=True)
    assert [str(result) for result in results] == ["--nodes differs: node 0 has 2, node 1 has 3"] * 2
    assert all(isinstance(result, RendezvousError) for result in results)


async def test_a_node_that_does_not_come_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.5)
    results = await asyncio.gather(run.add(0, 3).meet(), run.add(1, 3).meet(), return_exceptions=True)
    assert str(results[0]) == "nodes [2] did not come within 0.5 s"
    assert str(results[1]) == "the other nodes did not come within 0.5 s"


async def test_a_launcher_that_is_lost_before_all_have_come_ends_the_meeting(run: Run) -> None:
    zero = asyncio.create_task(run.add(0, 3).meet())
    one = asyncio.create_task(run.add(1, 3).meet())
    await until(lambda: 1 in run.nodes[0]._sizes)
    run.nodes[1].close()
    with pytest.raises(RendezvousError, match="the launcher of node 1 was lost"):
        await zero
    one.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await one
