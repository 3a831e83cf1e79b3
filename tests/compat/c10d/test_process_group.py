"""What a group shows, and which of its comms serves which device."""

from __future__ import annotations

import pickle

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import Comm, CommOptions
from asynccomm.compat.c10d.process_group import ProcessGroup
from tests.compat.c10d.worlds import alone, run_ranks


async def test_what_it_shows() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2], group_desc="pair")
        if rank == 0:
            return
        assert isinstance(pg, dist.ProcessGroup)
        assert (pg.rank(), pg.size(), pg.name()) == (rank - 1, 2, "loopback")
        assert (pg.group_name, pg.group_desc, pg.bound_device_id) == ("1", "pair", None)
        assert pg.global_ranks == (1, 2)
        assert isinstance(pg.comm(), Comm)
        assert repr(pg) == f"<ProcessGroup '1' rank {rank - 1} of 2, cpu:loopback>"
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(pg)

    await run_ranks(3, body)


async def test_devices_of_one_backend_share_a_comm() -> None:
    async with alone("cpu:loopback,cuda:loopback") as pg:
        assert pg.device_types == ["cpu", "cuda"]
        assert len(pg.comms) == 1
        assert pg.comm("cpu") is pg.comm("cuda") is pg.comm(torch.device("cuda:0"))


async def test_a_device_picks_its_backend() -> None:
    async with alone("cpu:loopback") as one, alone("cpu:loopback") as other:
        comms = {"cuda": one.comm(), "cpu": other.comm()}
        pg = ProcessGroup("x", "", [0], 0, "cuda:a,cpu:b", one.config, comms, one.timeout)
        assert pg.comm("cuda:1") is one.comm()
        assert pg.comm(torch.device("cpu")) is other.comm()
        assert pg.comm() is other.comm()  # objects are on the CPU
        assert pg.object_device == "cpu"
        with pytest.raises(RuntimeError, match="no backend for device type 'xpu'"):
            pg.comm("xpu")
        without = ProcessGroup("x", "", [0], 0, "", one.config, {"cuda": one.comm(), "xpu": other.comm()}, one.timeout)
        assert without.object_device == "cuda"
        assert ProcessGroup("x", "", [0], 0, "", one.config, {}, one.timeout).object_device == "cpu"


async def test_tensors_of_several_devices_are_refused() -> None:
    async with alone():
        outputs = [torch.ones(1, device="meta")]
        with pytest.raises(ValueError, match="is on meta"):
            dist.all_gather(outputs, torch.ones(1))


async def test_what_it_supports() -> None:
    async with alone() as pg:
        assert pg.supports_splitting
        assert pg.supports_coalescing
        assert not pg.supports_time_estimate
        assert pg.supports_shrinking
        empty = ProcessGroup("x", "", [0], 0, "", pg.config, {}, pg.timeout)
        for what in ("splitting", "coalescing", "time_estimate", "shrinking"):
            assert not getattr(empty, f"supports_{what}")
    async with alone(pg_options=CommOptions(hints={"control": "off"})) as pg:
        assert not pg.supports_shrinking
        with pytest.raises(RuntimeError, match="no control channel"):
            pg.comm().shrink()
    with_peer = CommOptions(hints={"control": "off"})

    async def body(rank: int) -> None:
        with pytest.raises(TypeError, match="cannot be shrunk: comm '0' has no control channel"):
            await dist.shrink_group([1])

    await run_ranks(2, body, pg_options=with_peer)
