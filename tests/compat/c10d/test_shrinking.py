"""Groups that go on without some ranks."""

from __future__ import annotations

import asyncio
import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import AbortedError, BrokenError, Comm
from tests.compat.c10d.worlds import alone, run_ranks


def test_arguments() -> None:
    names = ["ranks_to_exclude", "group", "shrink_flags", "pg_options"]
    assert list(inspect.signature(dist.shrink_group).parameters) == names


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (((1,),), TypeError, "must be a list"),
        ((["1"],), TypeError, "must be integers, got '1' at index 0"),
        (([],), ValueError, "at least one rank"),
        (([2],), ValueError, r"in \[0, 2\), got 2 at index 0"),
        (([-1],), ValueError, r"in \[0, 2\), got -1"),
        (([1, 1],), ValueError, "got 1 again at index 1"),
        (([0, 1],), ValueError, "must leave at least one of the 2 ranks"),
        (([0], None, 2), ValueError, "SHRINK_DEFAULT or SHRINK_ABORT, got 2"),
        (([0], None, True), ValueError, "got True"),
        (([0], -100), ValueError, "not in the group"),
    ],
    ids=str,
)
async def test_what_cannot_be_left_out(arguments: Any, kind: type[Exception], message: str) -> None:
    async def body(rank: int) -> None:
        with pytest.raises(kind, match=message):
            await dist.shrink_group(*arguments)

    await run_ranks(2, body)


async def test_who_is_left_out_does_not_call_it() -> None:
    async def body(rank: int) -> None:
        with pytest.raises(RuntimeError, match="is among ranks_to_exclude"):
            await dist.shrink_group([rank])

    await run_ranks(2, body)


async def test_a_group_of_one_cannot_be_shrunk() -> None:
    async with alone():
        with pytest.raises(ValueError, match="at least 2 ranks"):
            await dist.shrink_group([0])


async def test_a_group_of_some() -> None:
    called = asyncio.Barrier(3)

    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2, 3], timedelta(seconds=60))
        if rank == 0:
            return
        assert isinstance(pg, dist.ProcessGroup)
        if rank == 2:
            work = dist.irecv(torch.ones(1), 1, pg)
            await called.wait()
            assert work is not None
            with pytest.raises(BrokenError):
                await work
            await dist._abort_process_group(pg)
            return
        await called.wait()
        left = await dist.shrink_group([1], pg, pg_options=object())  # rank 2 of the world; options are not looked at
        assert left.global_ranks == left.former_ranks == (1, 3)
        assert left.rank() == (rank == 3)
        assert left.group_desc == "1:shrunk"
        assert len(left.group_name) == 40
        assert left.timeout == pg.timeout
        assert dist._get_process_group_name(pg) == "None"
        assert dist._find_pg_by_ranks_and_tag("", [1, 2, 3]) is None
        assert dist._find_pg_by_ranks_and_tag("", [1, 3]) is left
        assert dist.get_group_rank(left, 3) == 1
        assert dist.get_backend_config(left) == "cpu:loopback"
        tensor = torch.tensor([rank])
        await dist.all_reduce(tensor, group=left)
        assert tensor.item() == 4

    await run_ranks(4, body)


async def test_step_by_step() -> None:
    """The steps are those of torch's ``shrink_group``, and give its result."""
    called = asyncio.Barrier(3)

    async def body(rank: int) -> None:
        other = await dist.new_group([0, 1])
        await called.wait()
        if rank == 2:
            await called.wait()
            return
        dist._validate_shrink_inputs([2], dist.SHRINK_DEFAULT)
        info = dist._prepare_shrink_target_group(None)
        assert (info["is_default_group"], info["group_size"], info["current_rank"]) == (True, 3, rank)
        assert info["process_group"] is dist._get_default_group()
        comms = dist._validate_shrink_backend_requirements(info)
        excluded = dist._validate_and_process_excluded_ranks([2], info)
        assert excluded == {2}
        made = [await comm.shrink(sorted(excluded)) for comm in comms]
        with pytest.raises(ValueError, match=r"ranks of new_backend, got \[1\]"):
            await dist._finalize_shrunk_group(info, {1}, made)
        left = await dist._finalize_shrunk_group(info, excluded, made)
        assert dist.group.WORLD is left
        assert other not in dist._world.pg_map
        assert left.group_desc == "default:shrunken"
        tensor = torch.tensor([rank + 1])
        await dist.all_reduce(tensor)
        assert tensor.item() == 3
        metadata = dist._extract_group_metadata(left)
        assert metadata["original_group_name"] == left.group_name != metadata["new_group_name"]
        pair = await dist.new_group([0, 1])
        assert isinstance(pair, dist.ProcessGroup)
        await dist._destroy_all_other_groups(left)
        assert list(dist._world.pg_map) == [left]
        await dist._cleanup_original_group(left, True)
        assert not dist.is_initialized()
        dist._cleanup_process_group_global_state(left)
        await called.wait()

    await run_ranks(3, body)


async def test_the_default_group(caplog: pytest.LogCaptureFixture) -> None:
    called = asyncio.Barrier(3)

    async def body(rank: int) -> None:
        await dist.new_group([0, 2])
        if rank == 1:
            work = dist.irecv(torch.ones(1), 0)
            await called.wait()
            assert work is not None
            with pytest.raises(BrokenError):
                await work
            return
        await called.wait()
        left = await dist.shrink_group([1])
        assert dist.group.WORLD is left
        assert (dist.get_rank(), dist.get_world_size()) == (rank // 2, 2)  # numbered anew
        assert left.global_ranks == (0, 1)
        assert left.former_ranks == (0, 2)
        assert left.group_desc == "default:shrunken"
        assert list(dist._world.pg_map) == [left]
        for group in (None, await dist.new_group([0, 1])):
            tensor = torch.tensor([rank])
            await dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2

    await run_ranks(3, body)
    assert "the default group is shrunk, which numbers the ranks anew: groups 1 are aborted" in caplog.text


async def test_names_after_numbering_anew() -> None:
    """Old numbers are other ranks: who has made groups under them finds the same names as who has not."""
    called = asyncio.Barrier(3)

    async def body(rank: int) -> None:
        if rank < 2:
            await dist.new_group([0, 1], use_local_synchronization=True)
        await called.wait()
        if rank == 0:
            await called.wait()
            return
        await dist.shrink_group([0])
        pair = await dist.new_group([0, 1], timedelta(seconds=20), use_local_synchronization=True)
        tensor = torch.tensor([rank])
        await dist.all_reduce(tensor, group=pair)
        assert tensor.item() == 3
        await called.wait()

    await run_ranks(3, body)


async def test_what_is_in_flight_may_be_aborted() -> None:
    called = asyncio.Barrier(3)

    async def body(rank: int) -> None:
        if rank == 2:
            work = dist.irecv(torch.ones(1), 0)
            await called.wait()
            assert work is not None
            with pytest.raises(BrokenError):
                await work
            return
        stuck = dist.irecv(torch.ones(1), 2)
        await called.wait()
        left = await dist.shrink_group([2], shrink_flags=dist.SHRINK_ABORT)
        assert stuck is not None
        with pytest.raises(AbortedError, match="SHRINK_ABORT"):
            await stuck
        await dist.all_reduce(torch.ones(1), group=left)

    await run_ranks(3, body)


async def test_groups_that_do_not_abort_well_are_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Comm.aclose

    async def aclose(self: Comm) -> None:
        await close(self)
        if self.name == "1":
            raise RuntimeError("no")

    monkeypatch.setattr(Comm, "aclose", aclose)
    called = asyncio.Barrier(2)

    async def body(rank: int) -> None:
        await dist.new_group([0, 1])
        if rank == 1:
            work = dist.irecv(torch.ones(1), 0)
            await called.wait()
            assert work is not None
            with pytest.raises(BrokenError):
                await work
            with pytest.raises(RuntimeError):
                await dist.destroy_process_group()
            return
        await called.wait()
        left = await dist.shrink_group([1])
        assert left.size() == 1

    await run_ranks(2, body)
    assert "not all groups could be aborted: no" in caplog.text


@pytest.mark.ranks(3)
async def test_after_a_loss_in_processes() -> None:
    await dist.init_process_group("auto", timeout=timedelta(seconds=40))
    rank = dist.get_rank()
    if rank == 2:
        await dist.barrier()
        dist._get_default_group().comm().abort("gone")
        await dist.destroy_process_group()
        return
    with pytest.raises(BrokenError):
        await dist.barrier()
        await dist.irecv(torch.ones(1), 2)  # type: ignore[misc]
    left = await dist.shrink_group([2])
    assert left.size() == 2
    pair = await dist.new_group([0, 1])
    tensor = torch.tensor([rank + 1])
    await dist.all_reduce(tensor, group=pair)
    assert tensor.item() == 3
    await dist.destroy_process_group()
