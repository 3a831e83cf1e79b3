"""Groups of some of the ranks, made anew or split off another group."""

from __future__ import annotations

import asyncio
import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccomm.compat.c10d as dist
from asynccomm import BackendError, ClosedError, Comm, CommOptions, MemoryStore, RendezvousError
from asynccomm.compat.c10d import groups
from asynccomm.compat.c10d.process_group import ProcessGroup
from tests.compat.c10d.worlds import alone, run_ranks

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


def test_arguments() -> None:
    names = "ranks timeout backend pg_options use_local_synchronization group_desc device_id sort_ranks"
    assert list(inspect.signature(dist.new_group).parameters) == names.split()


async def test_ranks_are_sorted_and_others_are_outside() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([3, 0, 2], timedelta(seconds=50), group_desc="three")
        if rank == 1:
            assert pg == OUTSIDE
            return
        assert isinstance(pg, dist.ProcessGroup)
        assert pg.rank() == [0, 2, 3].index(rank)
        assert (pg.timeout, pg.group_desc) == (timedelta(seconds=50), "three")
        gathered = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
        await dist.all_gather(gathered, torch.tensor([rank]), pg)
        assert [each.item() for each in gathered] == [0, 2, 3]

    await run_ranks(4, body)


async def test_defaults() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group()
        assert isinstance(pg, dist.ProcessGroup)
        assert pg.global_ranks == (0, 1)
        assert dist.get_backend(pg) == "cpu:loopback"
        assert pg.timeout == timedelta(minutes=30)  # the backend's, not the default group's
        assert pg.group_desc == "undefined"

    await run_ranks(2, body, backend="cpu:loopback", timeout=timedelta(seconds=40))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "at least one rank"),
        ([0, 0], "ranks must be different, got 0 twice"),
        ([0, 2], r"ranks must be in \[0, 2\), got 2"),
        ([-1], r"ranks must be in \[0, 2\), got -1"),
        ([0, 1, 2], r"ranks must be in \[0, 2\)"),
        ([0.5], r"ranks must be in \[0, 2\), got 0.5"),
        (3, "must be a list"),
        ("01", "must be a list"),
    ],
    ids=str,
)
async def test_ranks_that_are_no_group(ranks: Any, message: str) -> None:
    async def body(rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            await dist.new_group(ranks)

    await run_ranks(2, body)


async def test_timeouts_are_timedeltas() -> None:
    async with alone():
        with pytest.raises(TypeError, match="timeout must be"):
            await dist.new_group([0], 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("local", "wrong"), [(False, {"ranks": [5]}), (False, {"timeout": 3}), (True, {"timeout": 3})], ids=str
)
async def test_a_refused_call_counts(local: bool, wrong: dict[str, Any]) -> None:
    async def body(rank: int) -> None:
        right: dict[str, Any] = {"ranks": [0, 1], "use_local_synchronization": local}
        if rank == 0:
            with pytest.raises((ValueError, TypeError)):
                await dist.new_group(**(right | wrong))
        else:
            with pytest.raises(RendezvousError):
                await dist.new_group(**right, timeout=timedelta(seconds=0.1))
        pg = await dist.new_group(**right)
        tensor = torch.ones(1)
        await dist.all_reduce(tensor, group=pg)
        assert tensor.item() == 2

    await run_ranks(2, body)


async def test_only_members_call_with_local_synchronization() -> None:
    async def body(rank: int) -> None:
        if rank == 0:  # has made another group, which the others do not know
            await dist.new_group([0], use_local_synchronization=True)
            outside = await dist.new_group([1, 2], use_local_synchronization=True)
            assert outside == OUTSIDE  # not None, which would be the default group
            assert dist.get_pg_count() == 1
        if rank < 2:
            pg = await dist.new_group([1, 0], use_local_synchronization=True)
            assert isinstance(pg, dist.ProcessGroup)
            assert len(pg.group_name) == 40
            tensor = torch.ones(1)
            await dist.all_reduce(tensor, group=pg)
            assert tensor.item() == 2

    await run_ranks(3, body)


async def test_who_is_outside_does_not_touch_the_store() -> None:
    async with alone():
        store = dist._get_default_store()
        before = await store.num_keys()
        with pytest.raises(ValueError, match="ranks must be in"):
            await dist.new_group([1], use_local_synchronization=True)
        assert await store.num_keys() == before
    async with alone():
        with pytest.raises(ValueError, match="'mpi' cannot make groups with use_local_synchronization"):
            await dist.new_group([0], backend="mpi", use_local_synchronization=True)


async def test_overlapping_groups_in_one_order() -> None:
    async def body(rank: int) -> None:
        for ranks in ([0, 1], [1, 2], [0, 2]):
            if rank in ranks:
                pg = await dist.new_group(ranks, use_local_synchronization=True)
                tensor = torch.tensor([rank])
                await dist.all_reduce(tensor, group=pg)
                assert tensor.item() == sum(ranks)

    await run_ranks(3, body)


async def test_groups_made_at_once() -> None:
    async def body(rank: int) -> None:
        first, second = await asyncio.gather(dist.new_group([0, 1]), dist.new_group([1, 0]))
        assert [first.group_name, second.group_name] == ["1", "2"]  # type: ignore[union-attr]
        await asyncio.gather(dist.barrier(second), dist.barrier(first))

    await run_ranks(2, body)


async def test_subgroups() -> None:
    async def body(rank: int) -> None:
        mine, groups = await dist.new_subgroups(2, group_desc="pair")
        assert groups[rank // 2] is mine
        assert groups[1 - rank // 2] == OUTSIDE
        assert isinstance(mine, dist.ProcessGroup)
        assert mine.global_ranks == ((0, 1) if rank < 2 else (2, 3))
        assert mine.group_desc == "pair"

    await run_ranks(4, body)


async def test_subgroups_of_a_group() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 3])
        if rank in (1, 3):
            # the lists are the world's business, so ranks that are not in the group name them
            mine, _ = await dist.new_subgroups(1, pg)
            assert mine.global_ranks == (rank,)  # type: ignore[union-attr]
        else:
            await dist.new_subgroups_by_enumeration([[1], [3]])

    await run_ranks(4, body)


async def test_sizes_of_subgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    async def body(rank: int) -> None:
        for size, message in (
            (None, "where there is no CUDA device"),
            (0, "must be positive"),
            (-1, "must be positive"),
            (5, "at most the 3 ranks"),
            (2, "must divide the 3 ranks"),
        ):
            with pytest.raises(ValueError, match=message):
                await dist.new_subgroups(size)

    await run_ranks(3, body)


async def test_subgroups_by_device_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    async def body(rank: int) -> None:
        mine, groups = await dist.new_subgroups()
        assert mine.global_ranks == (rank,)  # type: ignore[union-attr]
        assert len(groups) == 2

    await run_ranks(2, body)


async def test_subgroups_by_enumeration() -> None:
    async def body(rank: int) -> None:
        mine, groups = await dist.new_subgroups_by_enumeration([[2, 0], [3]])
        assert len(groups) == 2
        assert mine == (OUTSIDE if rank == 1 else groups[rank == 3])
        if rank == 2:
            assert mine.rank() == 1  # type: ignore[union-attr]

    await run_ranks(4, body)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([], "at least one list"),
        (None, "at least one list"),
        ([[0], [1, 0]], "rank 0 is both in subgroup"),
        ([[0], []], "at least one rank"),
        ([[0], [2]], r"must be in \[0, 2\)"),
    ],
    ids=str,
)
async def test_subgroups_that_are_none(lists: Any, message: str) -> None:
    async def body(rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            await dist.new_subgroups_by_enumeration(lists)
        assert dist.get_pg_count() == 1  # before anything was made

    await run_ranks(2, body)


async def test_find_or_create() -> None:
    async def body(rank: int) -> None:
        find = dist._find_or_create_pg_by_ranks_and_tag
        pairs = await dist._new_group_with_tag([0, 1], pg_tag="pair"), await dist._new_group_with_tag([2, 3])
        if rank < 2:
            assert await find("pair", [3, 2, 1, 0], 2) is pairs[0]
        assert await find("", [0, 1, 2, 3], 4) is dist.group.WORLD
        made = await find("all", [0, 1, 2, 3], 4)
        assert await find("all", [3, 2, 1, 0], 4) is made
        assert dist._get_group_tag(made) == "all"
        with pytest.raises(ValueError, match="stride must divide the 4 ranks, got 3"):
            await find("", [0, 1, 2, 3], 3)
        if rank == 0:
            with pytest.raises(AssertionError, match="must have this rank, 0"):
                await find("", [1, 2], 1)
            with pytest.raises(ValueError, match="none can be made without a tag"):
                await find("", [0, 2], 2)

    await run_ranks(4, body)


async def test_find_or_create_in_strides() -> None:
    """Each stride makes its own group at the same time, so they must not meet under one name."""

    async def body(rank: int) -> None:
        count = dist.get_pg_count()
        made = await dist._find_or_create_pg_by_ranks_and_tag("halves", [0, 1, 2, 3], 2)
        assert made.global_ranks == ((0, 1) if rank < 2 else (2, 3))
        tensor = torch.tensor([rank])
        await dist.all_reduce(tensor, group=made)
        assert tensor.item() == (1 if rank < 2 else 5)
        names: list[str | None] = [None] * 4
        await dist.all_gather_object(names, made.group_name)
        assert names[0] == names[1] != names[2] == names[3]
        assert dist.get_pg_count() == count

    await run_ranks(4, body, backend="gloo")


async def test_a_barrier_that_fails_leaves_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise dist.DistStoreError("nobody came")

    closed: list[str] = []
    close = Comm.aclose

    async def aclose(self: Comm) -> None:
        await close(self)
        closed.append(self.name)

    async def body(rank: int) -> None:
        await dist.barrier()
        monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        monkeypatch.setattr(groups, "store_based_barrier", fail)
        monkeypatch.setattr(Comm, "aclose", aclose)
        with pytest.raises(dist.DistStoreError, match="nobody came"):
            await dist.new_group([0, 1])
        assert "1" in closed
        assert list(dist._world.pg_map) == [dist.group.WORLD]
        tensor = torch.ones(1)
        await dist.all_reduce(tensor)
        assert tensor.item() == 2

    await run_ranks(2, body)
    assert closed == ["1", "1", "0", "0"]


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
            assert dist.get_backend(split) == dist.get_backend(parent)
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


async def test_options_of_a_split(caplog: pytest.LogCaptureFixture) -> None:
    async with alone(pg_options=CommOptions(max_ops=3)):
        split = await dist.split_group(None, [[0]], pg_options=CommOptions(hints={"unheard": "on"}))
        assert split.comm().options.max_ops == 3  # type: ignore[union-attr]
        assert "hint 'unheard' is unknown to backend 'loopback'" in caplog.text
        with pytest.raises(TypeError, match="pg_options must be"):
            await dist.split_group(None, [[0]], pg_options=3)
        with pytest.raises(TypeError, match="timeout must be"):
            await dist.split_group(None, [[0]], timeout=3)  # type: ignore[arg-type]


async def test_a_refused_split_counts() -> None:
    async def body(rank: int) -> None:
        if rank == 0:
            with pytest.raises(TypeError, match="timeout must be"):
                await dist.split_group(None, [[0, 1]], timeout=3)  # type: ignore[arg-type]
        else:
            with pytest.raises(BackendError):
                await dist.split_group(None, [[0, 1]], timeout=timedelta(seconds=0.1))
        split = await dist.split_group(None, [[0, 1]])
        assert isinstance(split, ProcessGroup)
        assert split.group_desc.endswith(":split:1")
        tensor = torch.ones(1)
        await dist.all_reduce(tensor, group=split)
        assert tensor.item() == 2

    await run_ranks(2, body)


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


async def test_a_group_in_the_order_of_its_ranks() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([2, 0, 1], sort_ranks=False)
        assert dist.get_process_group_ranks(pg) == [2, 0, 1]
        assert dist.get_rank(pg) == {2: 0, 0: 1, 1: 2}[rank]
        whole = torch.empty(3)
        await dist.all_gather_single(whole, torch.tensor([float(rank)]), pg)
        assert whole.tolist() == [2, 0, 1]
        tensor = torch.tensor([rank])
        await dist.broadcast(tensor, 1, pg)
        assert tensor.tolist() == [1]

    await run_ranks(3, body)


async def test_a_split_has_the_backend_of_its_parent() -> None:
    async def body(rank: int) -> None:
        with pytest.raises(ValueError, match="backend must be that of the parent, 'loopback', or None, got 'gloo'"):
            await dist.split_group(split_ranks=[[0, 1]], backend="gloo")
        pg = await dist.split_group(split_ranks=[[0, 1]], backend="loopback")
        assert dist.get_world_size(pg) == 2

    await run_ranks(2, body)


async def test_a_second_world_in_a_store() -> None:
    """As programs make it that have trainers and servers: with or without a default group."""
    store = MemoryStore()

    async def one(rank: int) -> None:
        with dist.use_world(dist.World()):
            pg, own = await dist._new_process_group_helper(2, rank, [], "loopback", store, "trainers and servers")
            dist._world.pg_group_ranks[pg] = {0: 0, 1: 1}
            tensor = torch.tensor([rank + 1])
            await dist.all_reduce(tensor, group=pg)
            assert tensor.tolist() == [3]
            await dist.broadcast(tensor.fill_(rank), 1, pg)
            assert tensor.tolist() == [1]
            await own.set(f"here {rank}", b"1")
            with pytest.raises(ValueError, match="there is a group of the name 'trainers and servers' already"):
                await dist._new_process_group_helper(2, rank, [], "loopback", store, "trainers and servers")
            await asyncio.gather(*(comm.aclose() for comm in pg.comms))

    await asyncio.gather(one(0), one(1))
    with dist.use_world(dist.World()):
        for size, rank, ranks, text in (
            (2, 2, [], r"group_rank must be in \[0, 2\), got 2"),
            (2, 0, [5], r"global_ranks_in_group must have 2 ranks or none, got \[5\]"),
        ):
            with pytest.raises(ValueError, match=text):
                await dist._new_process_group_helper(size, rank, ranks, "loopback", store, "x")
        with pytest.raises(NotImplementedError, match="enable_reconfigure is not supported"):
            await dist._new_process_group_helper(1, 0, [], "loopback", store, "x", enable_reconfigure=True)
        with pytest.raises(NotImplementedError, match=r"use Comm.reconfigure or Comm.shrink"):
            await dist.init_process_group("loopback", store=store, rank=0, world_size=1, enable_reconfigure=True)


async def test_arguments_of_a_wrong_kind() -> None:
    async with alone():
        for wrong in (5, True):
            with pytest.raises(ValueError, match="must be a list of at least one list of ranks, got"):
                await dist.split_group(None, wrong)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="must be a list of at least one list of ranks, got"):
                await dist.new_subgroups_by_enumeration(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="group_size must be an integer, got 'x'"):
            await dist.new_subgroups("x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"device_id must be a torch.device, got 0"):
            await dist.new_group([0], device_id=0)  # type: ignore[arg-type]
