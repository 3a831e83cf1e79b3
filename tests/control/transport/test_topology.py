"""Who connects to whom, and what a contact is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from asynccomm.control.transport.schema import decode, dumps, loads
from asynccomm.control.transport.topology import RankAddress, Topology
from tests.cases import cases


def contact(rank: int, host: str = "a") -> RankAddress:
    return RankAddress(rank, host, 100 + rank, local=f"name {rank}")


def topology(hosts: str, without: str = "") -> Topology:
    """Ranks on hosts of one letter each; ``without`` a channel where that has an x."""
    contacts = [contact(rank, host) for rank, host in enumerate(hosts)]
    return Topology(replace(c, local="") if without[c.rank : c.rank + 1] == "x" else c for c in contacts)


def test_a_tree_over_three_hosts() -> None:
    tree = topology("abcabc")
    assert tree.root(()) == 0
    assert [tree.above(rank, ()) for rank in range(6)] == [None, 0, 0, 0, 1, 2]


def test_the_next_lowest_takes_over() -> None:
    tree = topology("aabb")
    assert [tree.above(rank, {0}) for rank in (1, 2, 3)] == [None, 1, 2]
    assert [tree.above(rank, {2}) for rank in (0, 1, 3)] == [None, 0, 0]
    assert [tree.above(rank, {0, 1}) for rank in (2, 3)] == [None, 2]
    assert tree.root({0, 1, 2}) == 3


def test_ranks_without_a_channel_are_not_in_it() -> None:
    tree = topology("aaab", "x  x")
    assert sorted(tree.contacts) == [1, 2]
    assert tree.root(()) == 1
    assert tree.above(2, ()) == 1


@given(st.text("abc", min_size=1, max_size=10), st.sets(st.integers(0, 9)))
def test_all_lead_to_the_root_over_lower_ranks(hosts: str, gone: set[int]) -> None:
    tree = topology(hosts)
    left = [rank for rank in tree.contacts if rank not in gone]
    for rank in left:
        steps = 0
        while (above := tree.above(rank, gone)) is not None:
            assert above < rank
            assert above not in gone
            rank, steps = above, steps + 1
        assert rank == min(left)
        assert steps <= 2


@given(st.text("abc", min_size=1, max_size=10), st.sets(st.integers(0, 9)))
def test_the_ranks_below_are_those_that_lead_here(hosts: str, gone: set[int]) -> None:
    tree = topology(hosts)
    left = [rank for rank in tree.contacts if rank not in gone]
    for rank in left:
        assert sorted(tree.below(rank, gone)) == [other for other in left if tree.above(other, gone) == rank]


@given(st.text("abc", min_size=1, max_size=8), st.sets(st.integers(0, 7)))
def test_messages_pass_over_the_ranks_between(hosts: str, gone: set[int]) -> None:
    tree = topology(hosts)
    left = [rank for rank in range(len(hosts)) if rank not in gone]
    for rank in left:
        for other in left:
            between = tree.between(rank, other, gone)
            way = list(dict.fromkeys([rank, *between, other]))
            assert len(way) == len(between) + 2 - (rank == other)
            for one, following in pairwise(way):
                assert one == tree.above(following, gone) or following == tree.above(one, gone)


def test_all_gone_has_no_root() -> None:
    with pytest.raises(ValueError):
        topology("aa").root({0, 1})


def test_a_contact_survives_json() -> None:
    one = RankAddress(3, "host", 77, "name", "fe80::1", 99)
    assert loads(RankAddress, dumps(one)) == one


def test_who_listens() -> None:
    assert contact(0).listens
    assert RankAddress(0, "a", 1, address="127.0.0.1", port=7).listens
    assert not RankAddress(0, "a", 1).listens


GOOD = to_builtins(contact(0))


@cases(
    "data",
    [
        None,
        3,
        "contact",
        [],
        {},
        {**GOOD, "more": 1},
        {**GOOD, "rank": "0"},
        {**GOOD, "rank": True},
        {**GOOD, "pid": 1.5},
        {**GOOD, "port": None},
        {**GOOD, "host": 1},
        {**GOOD, "local": None},
        {**GOOD, "address": ["127.0.0.1"]},
        {1: 2},
    ],
)
def test_what_is_no_contact(data: Any) -> None:
    with pytest.raises(ValueError, match="got "):
        decode(RankAddress, data)
