"""Ranks that may share memory are found by facts, and those that do by trying; all ranks find the same."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import pytest
import torch

from asynccomm import BackendError, MemoryStore
from asynccomm.backends.base import BackendContext, RankInfo
from asynccomm.backends.hierarchical import locality
from asynccomm.backends.hierarchical.locality import agreed, candidates, place_of
from asynccomm.control.transport.tables import pack_table
from asynccomm.core.mailbox import Mailbox
from asynccomm.ops.validation import CommInfo
from asynccomm.store.base import Store


def contexts(hosts: Sequence[str]) -> list[BackendContext]:
    store = MemoryStore()
    return [
        BackendContext(
            group=CommInfo("t", rank, len(hosts), torch.device("cpu")),
            members=[RankInfo(each, host, each) for each, host in enumerate(hosts)],
            store=store,
            mailbox=Mailbox(asyncio.get_running_loop()),
            timeout=5.0,
            on_error=lambda error: None,
        )
        for rank in range(len(hosts))
    ]


async def test_ranks_with_equal_facts_are_candidates() -> None:
    found = await asyncio.gather(*map(candidates, contexts("abcab")))
    assert found == [[[0, 3], [1, 4], [2]]] * 5


async def test_the_published_hosts_have_no_entry_for_each_rank() -> None:
    """Each rank reads them."""
    all_contexts = contexts([f"node-{rank // 4}" for rank in range(120)])
    found = await asyncio.gather(*map(candidates, all_contexts))
    assert found == [[list(range(first, first + 4)) for first in range(0, 120, 4)]] * 120
    assert len(await all_contexts[0].store.get("candidates")) < 100


async def test_the_namespace_and_the_user_are_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place_of("host")
    assert here == place_of("host") != place_of("other")
    monkeypatch.setattr(locality.os, "getuid", lambda: 54321)
    assert place_of("host") != here


@pytest.mark.parametrize(
    ("problems", "hosts"),
    [
        ({}, ((0, 3), (1, 4), (2,))),
        ({0: "no memory", 3: "no memory"}, ((0,), (1, 4), (2,), (3,))),
        ({1: "no memory", 4: "no memory"}, ((0, 3), (1,), (2,), (4,))),
    ],
)
async def test_ranks_that_cannot_share_memory_are_hosts_of_their_own(
    problems: dict[int, str], hosts: tuple[tuple[int, ...], ...]
) -> None:
    tried = [[0, 3], [1, 4], [2]]
    asked = [agreed(context, tried, problems.get(rank, "")) for rank, context in enumerate(contexts("abcab"))]
    assert await asyncio.gather(*asked) == [hosts] * 5


async def test_without_candidates_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Store, "set", never)
    assert await agreed(contexts("ab")[1], [[0], [1]], "") == ((0,), (1,))


@pytest.mark.parametrize("table", [b"", b"{}", zlib.compress(b"{}"), pack_table([(0,)]), pack_table([("a",), ("b",)])])
async def test_hosts_that_cannot_be_are_an_error(table: bytes) -> None:
    context = contexts("ab")[1]
    await context.store.set("candidates", table)
    with pytest.raises(BackendError, match="the hosts that rank 0 has published cannot be read: "):
        await candidates(context)
