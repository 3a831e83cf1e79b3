"""Ranks in groups and in the world."""

from __future__ import annotations

import pytest

import asynccomm.compat.c10d as dist
from asynccomm.compat.c10d.ranks import root_rank
from tests.compat.c10d.worlds import alone, run_ranks


async def test_ranks_and_sizes() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([3, 1])
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 4)
        inside = rank in (1, 3)
        assert dist.get_rank(pg) == ([1, 3].index(rank) if inside else -1)
        assert dist.get_world_size(pg) == (2 if inside else -1)
        if inside:
            assert [dist.get_group_rank(pg, 1), dist.get_group_rank(pg, 3)] == [0, 1]
            assert [dist.get_global_rank(pg, 0), dist.get_global_rank(pg, 1)] == [1, 3]
            assert dist.get_process_group_ranks(pg) == [1, 3]
            with pytest.raises(ValueError, match="global rank 0 is not in group '1'"):
                dist.get_group_rank(pg, 0)
            for beyond in (2, -1):
                with pytest.raises(ValueError, match="is not in group '1' of 2 ranks"):
                    dist.get_global_rank(pg, beyond)
        assert dist.get_process_group_ranks(None) == [0, 1, 2, 3]

    await run_ranks(4, body)


def test_before_init() -> None:
    with dist.use_world(dist.World()):
        assert not dist.is_initialized()
        for call in (dist.get_rank, dist.get_world_size, dist.get_backend, dist.get_backend_config):
            with pytest.raises(ValueError, match="await init_process_group"):
                call()
        with pytest.raises(ValueError, match="await init_process_group"):
            dist.get_rank(-100)


async def test_world_takes_any_rank() -> None:
    async with alone() as pg:
        assert dist.get_group_rank(pg, 99) == dist.get_global_rank(None, 99) == 99


async def test_groups_that_are_gone() -> None:
    async with alone():
        pg = await dist.new_group([0])
        await dist.destroy_process_group(pg)
        for call in (dist.get_group_rank, dist.get_global_rank):
            with pytest.raises(ValueError, match="not registered"):
                call(pg, 0)


async def test_backend_and_config() -> None:
    async with alone("cpu:Loopback"):
        assert dist.get_backend() == "cpu:loopback"
        assert dist.get_backend_config() == "cpu:loopback"
        pg = await dist.new_group([0], backend="LOOPBACK")
        assert dist.get_backend(pg) == "loopback"
        for call in (dist.get_backend, dist.get_backend_config):
            with pytest.raises(ValueError, match="not in the group"):
                call(-100)
        await dist.destroy_process_group(pg)
        with pytest.raises(ValueError, match="not registered"):
            dist.get_backend(pg)


async def test_one_rank_given_either_way() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank == 0:
            return
        canonical = dist._canonicalize_group_rank
        assert canonical(pg, 2) == canonical(pg, group_rank=1) == 1
        assert canonical(pg, 2, return_global=True) == canonical(pg, group_rank=1, return_global=True) == 2
        with pytest.raises(ValueError, match="cannot both be given"):
            canonical(pg, 2, 1)
        with pytest.raises(ValueError, match="must be given"):
            canonical(pg)
        with pytest.raises(ValueError, match="global rank 0 is not in group"):  # and is not rank 0 of the group
            root_rank(pg, None, None, "dst")
        assert root_rank(pg, None, 0, "dst") == 0
        with pytest.raises(ValueError, match=r"^src must be in \[0, 3\), got 7"):
            canonical(None, 7, name="src")
        with pytest.raises(ValueError, match=r"^group_src must be in \[0, 2\), got 7"):
            canonical(pg, group_rank=7, name="src")
        with pytest.raises(TypeError, match=r"^src must be a rank \(an integer\), got 1.0"):
            canonical(None, 1.0, name="src")

    await run_ranks(3, body)


def test_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not set"):
        dist.get_node_local_rank()
    assert dist.get_node_local_rank(3) == 3
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert dist.get_node_local_rank(3) == 2


def test_torchelastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "")
    assert dist.is_torchelastic_launched()
