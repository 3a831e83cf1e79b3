"""Groups that are split off others."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccomm.compat.c10d as dist
from asynccomm import BackendError, ClosedError, Comm, CommOptions
from asynccomm.compat.c10d.process_group import ProcessGroup
from tests.compat.c10d.worlds import alone, run_ranks


@given(st.lists(st.integers(0, 10_000), unique=True, min_size=1))
def test_a_colour_is_a_c_int(ranks: list[int]) -> None:
    colour = dist._process_group_color(ranks)
    assert 0 <= colour < 2**31
    assert colour == dist._process_group_color(tuple(ranks))


def test_a_colour_is_the_same_in_every_process() -> None:
    assert dist._process_group_color([0, 1]) == 552790934
    assert dist._process_group_color([1, 0]) != dist._process_group_color([0, 1])


async def test_groups_of_the_parent_s_ranks() -> None:
    async def body(rank: int) -> None:
        parent = await dist.new_group([1, 2, 3], group_desc="parent")
        if rank == 0:
            return
        split = await dist.split_group(parent, [[2, 0]], timedelta(seconds=40))
        if rank == 2:
            assert split == dist.GroupMember.NON_GROUP_MEMBER
        else:
            assert isinstance(split, dist.ProcessGroup)
            assert split.global_ranks == (1, 3)
            assert split.rank() == (rank == 3)
            assert (split.timeout, split.group_desc) == (timedelta(seconds=40), "parent:split:0")
            assert len(split.group_name) == 40
            assert dist.get_backend(split) == "loopback"
            assert dist._world.tags_to_pg[f"ptd:{split.group_name}"] == [split]
            assert split not in dist._world.tags_to_pg[""]
            tensor = torch.tensor([rank])
            await dist.all_reduce(tensor, group=split)
            assert tensor.item() == 4
        again = await dist.split_group(parent, [[0], [1, 2]])
        assert isinstance(again, dist.ProcessGroup)
        assert again.group_desc == "parent:split:1"  # also where the first split gave no group
        assert again.timeout == timedelta(minutes=30)

    await run_ranks(4, body)


async def test_names_differ_by_parent() -> None:
    async def body(rank: int) -> None:
        names = set()
        for _ in range(2):
            parent = await dist.new_group([0, 1])
            for _ in range(2):
                split = await dist.split_group(parent, [[0, 1]])
                names.add(split.group_name)  # type: ignore[union-attr]
        assert len(names) == 4

    await run_ranks(2, body)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (None, "at least one list"),
        ([], "at least one list"),
        ([[0], []], "at least one rank"),
        ([[0], [1, 1]], "no rank twice, got 1"),
        ([[0], [1, 0]], "no rank twice, got 0"),
        ([[0], [2]], r"in \[0, 2\), got 2"),
        ([[0], [-1]], r"in \[0, 2\), got -1"),
        ([[0], [0, 1, 2]], "at most the 2 ranks"),
        ([[0], ["1"]], r"in \[0, 2\), got '1'"),
        ([[0], 1], "at least one rank"),
    ],
    ids=str,
)
async def test_all_lists_are_checked_on_all_ranks(lists: Any, message: str) -> None:
    async def body(rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            await dist.split_group(None, lists)

    await run_ranks(2, body)


async def test_parents_that_are_none() -> None:
    with dist.use_world(dist.World()), pytest.raises(ValueError, match="await init_process_group"):
        await dist.split_group(None, [[0]])
    async with alone():
        with pytest.warns(UserWarning, match="split_group"), pytest.raises(ValueError, match="not in parent_pg"):
            await dist.split_group(-100, [[0]])
        pg = await dist.new_group([0])
        await dist.destroy_process_group(pg)
        with pytest.raises(ValueError, match="not registered"):
            await dist.split_group(pg, [[0]])


async def test_on_an_accelerator_a_device_is_to_be_bound() -> None:
    async with alone() as pg:
        assert not dist._is_safe_to_split()

        class Elsewhere:
            device = torch.device("cuda:0")

        gpu = ProcessGroup("gpu", "", [0], 0, "nccl", pg.config, {"cuda": Elsewhere()}, pg.timeout)  # type: ignore[dict-item]
        dist._world.pg_map[gpu] = dist._world.pg_map[pg]
        with pytest.raises(RuntimeError, match="no device is bound to the default group"):
            await dist.split_group(gpu, [[0]])
        del dist._world.pg_map[gpu]
        pg.bound_device_id = torch.device("cuda:0")
        assert dist._is_safe_to_split()
        split = await dist.split_group(None, [[0]])
        assert split.bound_device_id == pg.bound_device_id  # type: ignore[union-attr]


async def test_options(caplog: pytest.LogCaptureFixture) -> None:
    async with alone(pg_options=CommOptions(max_ops=3)):
        split = await dist.split_group(None, [[0]], pg_options=CommOptions(hints={"unheard": "on"}))
        assert split.comm().options.max_ops == 3  # type: ignore[union-attr]
        assert "hint 'unheard' is unknown to backend 'loopback'" in caplog.text
        with pytest.raises(TypeError, match="pg_options must be"):
            await dist.split_group(None, [[0]], pg_options=3)
        with pytest.raises(TypeError, match="timeout must be"):
            await dist.split_group(None, [[0]], timeout=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["split", "shrink"])
async def test_of_several_backends_all_or_none(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first backend has made ends if the second one fails."""
    made: list[Comm] = []
    over = asyncio.Barrier(2)

    async def body(rank: int) -> None:
        one, other = await dist.new_group([0, 1]), await dist.new_group([0, 1])
        assert isinstance(one, ProcessGroup)
        assert isinstance(other, ProcessGroup)
        comms = {"cuda": one.comm(), "cpu": other.comm()}
        pg = ProcessGroup("both", "", [0, 1], rank, "cuda:a,cpu:b", one.config, comms, one.timeout, torch.device("cpu"))
        dist._world.add(pg, dist._get_default_store(), None)
        dist._get_default_group().bound_device_id = torch.device("cpu")
        method = getattr(Comm, how)

        async def fail(self: Comm, *args: Any, **kwargs: Any) -> Any:
            if self is comms["cpu"]:
                raise BackendError("no")
            made.append(await method(self, *args, **kwargs))
            return made[-1]

        if rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(Comm, how, fail)
                with pytest.raises(BackendError, match="no"):
                    await (dist.split_group(pg, [[0]]) if how == "split" else dist.shrink_group([1], pg))
        await over.wait()

    await run_ranks(2, body)
    (comm,) = made
    with pytest.raises(ClosedError):
        comm.barrier()
