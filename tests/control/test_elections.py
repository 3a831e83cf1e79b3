"""The agreement over a control channel, as far as it is not ``quorum``'s: what a root says to itself."""

import asyncio
from typing import Any, cast

from asynccomm.control.ballots import Again, Decided, Order
from asynccomm.control.elections import Elections
from asynccomm.control.node import Node


class Alone:
    """The node of a rank that has lost all others: what it sends to the root it hears at once."""

    rank = 0
    fenced = ""

    def __init__(self) -> None:
        self.roster = self
        self.gone = {1: "it died"}
        self.elections: Elections

    def root(self, gone: Any) -> int:
        return 0

    def send(self, to: Any, kind: str, **message: Any) -> None:
        handler = {"report": self.elections.hear_report, "order": self.elections.hear_order}[kind]
        handler({"from": 0, **message})


class NoGuests:
    def send(self, name: str, message: Any) -> None:
        raise AssertionError("there are none")


async def test_a_root_hears_its_own_orders_in_their_order() -> None:
    node = Alone()
    node.elections = elections = Elections(cast(Node, node), asyncio.get_running_loop(), NoGuests())
    heard: list[Order] = []
    elections.ask("key", [0, 1], None, 10.0, heard.append)
    (first,) = heard
    assert isinstance(first, Decided)
    elections.failed("key", first.decision.key, "no way")
    assert [type(order) for order in heard] == [Decided, Again, Decided]
    again, second = heard[1:]
    assert isinstance(again, Again)
    assert isinstance(second, Decided)
    assert again.key == first.decision.key != second.decision.key
    elections.close()
