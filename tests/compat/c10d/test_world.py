"""What a process knows of its groups."""

from __future__ import annotations

import asyncio

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm.compat.c10d import world
from tests.compat.c10d.worlds import alone, run_ranks


async def test_what_is_known_of_the_groups() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 2], group_desc="ends")
        known = dist._world
        assert known.default_pg is dist.group.WORLD
        assert known.group_count == dist.get_pg_count() == 2
        infos = [
            {
                "pg_name": "0",
                "pg_desc": "default_pg",
                "backend_config": "cpu:loopback",
                "ranks": [],
                "group_size": 3,
                "group_count": 2,
            }
        ]
        if rank != 1:
            assert isinstance(pg, dist.ProcessGroup)
            assert known.pg_map[pg][0] == "loopback"
            assert known.pg_names[pg] == "1"
            assert known.pg_group_ranks[pg] == {0: 0, 2: 1}
            assert known.pg_backend_config[pg] == "cpu:loopback"
            assert known.pg_to_tag[pg] == "ptd:1"
            assert known.tags_to_pg["ptd:1"] == [pg]
            assert known.tags_to_pg[""] == [dist.group.WORLD, pg]
            infos.append({**infos[0], "pg_name": "1", "pg_desc": "ends", "ranks": [0, 2], "group_size": 2})
        assert known.pg_config_info == infos

    await run_ranks(3, body)


async def test_nobody_is_registered_for_whom_is_not_in_a_group() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([0])
        assert (pg == -100) == (rank == 1)
        assert -100 not in dist._world.pg_group_ranks

    await run_ranks(2, body)


async def test_world_is_always_current() -> None:
    with dist.use_world(dist.World()):
        assert dist.group.WORLD is None
        async with alone() as pg:
            assert dist.group.WORLD is dist.GroupMember.WORLD is pg
        dist.group.WORLD = pg
        assert dist.is_initialized()
        assert dist._world.default_pg is pg


async def test_worlds_of_tasks() -> None:
    async with alone() as pg:

        async def look() -> object:
            return dist.group.WORLD

        with dist.use_world(dist.World()) as other:
            assert dist._world is other
            assert dist.group.WORLD is None
            assert await asyncio.create_task(look()) is None
        assert await asyncio.create_task(look()) is pg


def test_names() -> None:
    known = dist.World()
    assert [known.next_name(), known.next_name(), known.group_count] == ["0", "1", 2]
    first = known.hashed_name([0, 1])
    assert len(first) == 40
    assert known.group_count == 2
    assert known.hashed_name([0, 1]) != first
    assert known.hashed_name([0, 2]) != known.hashed_name([0, 1], "0") != known.hashed_name([0, 1], "1")


def test_hashed_names_do_not_count_other_groups() -> None:
    """Ranks may be in different numbers of groups, and find the same name."""
    one, other = dist.World(), dist.World()
    other.hashed_name([1, 2])
    other.next_name()
    assert one.hashed_name([0, 1]) == other.hashed_name([0, 1])
    other.hashed_name([1, 2], "3")  # of a group of that name
    assert one.hashed_name([1, 2, 3]) == other.hashed_name([1, 2, 3])


async def test_tags() -> None:
    async def body(rank: int) -> None:
        tagged = await dist._new_group_with_tag([0, 1], pg_tag="mine")
        again = await dist._new_group_with_tag([1, 0], pg_tag="mine")
        other = await dist._new_group_with_tag([0, 1], pg_tag="yours")
        plain = await dist.new_group([0, 1])
        assert tagged is again
        assert len({id(pg) for pg in (tagged, other, plain)}) == 3
        assert dist._world.tags_to_pg["user:mine"] == [tagged]
        assert dist._get_group_tag(tagged) == "mine"
        assert dist._get_group_tag(plain) == f"ptd:{plain.group_name}"
        find = dist._find_pg_by_ranks_and_tag
        assert find("mine", [1, 0]) is find("user:mine", [0, 1]) is tagged
        assert find("", [1, 0]) is dist.group.WORLD
        assert find(f"ptd:{plain.group_name}", [0, 1]) is plain
        assert find("mine", [0]) is None
        assert find("nobody's", [0, 1]) is None
        assert dist._resolve_group_name_by_ranks_and_tag([0, 1], "mine") == tagged.group_name
        with pytest.raises(ValueError, match="no group of ranks"):
            dist._resolve_group_name_by_ranks_and_tag([0], "mine")

    await run_ranks(2, body)


async def test_what_is_destroyed_is_forgotten() -> None:
    async with alone() as pg:
        tagged = await dist._new_group_with_tag([0], pg_tag="mine")
        plain = await dist.new_group([0])
        await dist.destroy_process_group(tagged)
        await dist.destroy_process_group(plain)
        assert dist._world.tags_to_pg == {"": [pg], "ptd:0": [pg]}
        assert list(dist._world.pg_map) == list(dist._world.pg_group_ranks) == [pg]
        assert dist.get_pg_count() == 3  # they count all the same
        with pytest.raises(ValueError, match="not registered"):
            dist.get_rank(plain)


async def test_groups_that_are_none() -> None:
    with dist.use_world(dist.World()):
        with pytest.raises(ValueError, match="await init_process_group"):
            dist._get_default_group()
        with pytest.raises(ValueError, match="await init_process_group"):
            dist.all_reduce(torch.ones(1))
    async with alone() as pg:
        assert dist._group_or_default_group(None) is dist._group_or_default_group(pg) is pg
        with pytest.raises(ValueError, match="not in the group"):
            dist._group_or_default_group(-100)
        with pytest.raises(TypeError, match="must be a ProcessGroup, got 'gloo'"):
            dist._group_or_default_group("gloo")


def test_clearing_begins_anew() -> None:
    known = dist.World()
    known.next_name()
    name = known.hashed_name([0])
    known.clear()
    assert known.next_name() == "0"
    assert known.hashed_name([0]) == name
    assert vars(known).keys() == vars(world.World()).keys()
