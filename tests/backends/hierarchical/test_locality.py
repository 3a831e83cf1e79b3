"""Ranks that may share memory are found by facts, and those that do by trying; all ranks find the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from asynccomm import BackendError, MemoryStore
from asynccomm.backends.base import BackendContext, RankInfo
from asynccomm.backends.hierarchical import locality
from asynccomm.backends.hierarchical.locality import agreed, candidates, place_of
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
    all_contexts = contexts("a" * 100 + "b" * 100)
    await asyncio.gather(*map(candidates, all_contexts))
    assert await all_contexts[0].store.get("candidates") == b'{"ranks":[[[0,100,1]],[[100,100,1]]]}'


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


@pytest.mark.parametrize("text", ["", "{}", '{"ranks": [[0], [0]]}', '{"ranks": [[0, 1], []]}', '{"ranks": [[0]]}'])
async def test_hosts_that_cannot_be_are_an_error(text: str) -> None:
    context = contexts("ab")[1]
    await context.store.set("candidates", text)
    with pytest.raises(BackendError, match="rank 0 has published hosts that cannot be"):
        await candidates(context)
