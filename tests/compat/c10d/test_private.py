"""State by group, and checks."""

from __future__ import annotations

import pytest
import torch

import asynccomm.compat.c10d as dist
from tests.compat.c10d.worlds import alone, run_ranks


async def test_what_is_known_of_a_group() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2], group_desc="pair")
        if rank == 0:
            return
        config = {
            "pg_name": "1",
            "pg_desc": "pair",
            "backend_config": "cpu:loopback",
            "pg_size": 2,
            "ranks": [1, 2],
        }
        assert dist._get_pg_config(pg) == config
        assert dist._get_pg_config()["ranks"] == [0, 1, 2]
        assert dist._get_all_pg_configs() == [dist._get_pg_config(), config]
        assert dist._get_process_group_name(pg) == "1"
        assert dist._get_process_group_name("nothing") == "None"
        assert dist._get_process_group_uid(pg) == -1
        assert dist._get_group_size(pg) == dist._get_group_size_by_name("1") == 2
        assert dist._get_group_size(None) == 3
        with pytest.raises(ValueError, match="no group of the name 'x'"):
            dist._get_group_size_by_name("x")
        assert dist._get_process_group_store(pg).name == "1/"  # type: ignore[attr-defined]
        assert dist._get_default_store().name == "0/"  # type: ignore[attr-defined]

    await run_ranks(3, body)


async def test_backends_by_name() -> None:
    async with alone("cpu:loopback"):
        assert dist._get_backend_from_str() == dist._get_backend_from_str("") == "cpu:loopback"
        assert dist._get_backend_from_str("GLOO") == "gloo"


async def test_names() -> None:
    async with alone():
        assert dist._process_group_name([0], use_hashed_name=False) == "1"
        names = {dist._process_group_name([0], use_hashed_name=True), dist._hash_ranks_to_str([0])}
        assert len(names) == 2
        assert {len(name) for name in names} == {40}


async def test_backends_behind_a_group() -> None:
    async with alone("cpu:loopback") as pg:
        for group in (None, pg, "0"):
            assert dist.get_backend_impl(group) is pg.comm().unsafe_get_backend()
        assert dist.get_backend_impl(pg, "cpu") is dist.get_backend_impl(device=torch.device("cpu"))
        assert dist._resolve_process_group("0") is pg
        with pytest.raises(ValueError, match="no group of the name 'x'"):
            dist.get_backend_impl("x")
        with pytest.raises(ValueError, match="not in the group"):
            dist.get_backend_impl(dist.GroupMember.NON_GROUP_MEMBER)
        with pytest.raises(RuntimeError, match=r"of a type in \['cpu'\]"):
            dist.get_backend_impl(pg, "xpu")
        assert dist._get_split_source(pg) is pg.comm()  # type: ignore[arg-type]
        assert dist._get_split_source(pg, "cpu:loopback") is pg.comm()  # type: ignore[arg-type]
        assert dist._get_split_source(pg, "cpu:gloo") is None  # a split has the backend of its parent
        other = await dist.new_group([0])
        assert isinstance(other, dist.ProcessGroup)
        assert dist._get_split_source(other) is None  # no device is bound to it
        wrap = dist._create_process_group_wrapper
        assert wrap(pg, "pg", dist._get_default_store(), 0, 1) is pg
        assert wrap(pg.comm(), "pg", None, rank=0, world_size=1) is pg.comm()
        with pytest.raises(ValueError, match="is rank 0 of 1, got rank 1 and world_size 2"):
            wrap(pg, "pg", None, 1, 2)
        with pytest.raises(TypeError, match="must be a ProcessGroup or a Comm"):
            wrap("gloo", "pg", None, 0, 1)  # type: ignore[arg-type]
    async with alone("cpu:loopback,cuda:fake") as pg:
        with pytest.raises(ValueError, match="device must be given"):
            dist.get_backend_impl()
        assert dist.get_backend_impl(device="cpu") is pg.comm("cpu").unsafe_get_backend()
    dist._export_c_types()
    assert dist.Store.__module__ == "torch.distributed.distributed_c10d"


async def test_the_old_name_of_get_global_rank() -> None:
    async with alone():
        with pytest.warns(FutureWarning, match="use get_global_rank"):
            assert dist._get_global_rank(None, 0) == 0


def test_a_warning_before_there_is_a_world() -> None:
    with dist.use_world(dist.World()), pytest.warns(UserWarning, match="all_reduce does nothing on global rank -1"):
        dist._warn_not_in_group("all_reduce")


def test_checks() -> None:
    one = torch.ones(1)
    assert dist._as_iterable([one]) == [one]
    assert dist._as_iterable(one) == (one,)
    assert dist._check_single_backend_availability("GLOO")
    assert not dist._check_single_backend_availability("carrier pigeons")
    dist._check_op(dist.isend)
    dist._check_op(dist.irecv)
    with pytest.raises(ValueError, match="op must be isend or irecv"):
        dist._check_op(dist.broadcast)


def test_names_that_there_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute '_nothing'"):
        dist._nothing  # noqa: B018
