"""Collectives that move tensors, and barriers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import asynccomm.compat.c10d as dist
from asynccomm import CollectiveMismatchError, CollectiveTimeoutError, Comm, MonitoredBarrierError
from asynccomm.compat.c10d import collectives
from asynccomm.compat.c10d.process_group import ProcessGroup
from tests.compat.c10d.test_reductions import Mine
from tests.compat.c10d.worlds import alone, run_ranks

ARGUMENTS = {
    "broadcast": "tensor src group async_op group_src",
    "all_gather": "tensor_list tensor group async_op",
    "all_gather_into_tensor": "output_tensor input_tensor group async_op",
    "_all_gather_base": "output_tensor input_tensor group async_op",
    "all_gather_coalesced": "output_tensor_lists input_tensor_list group async_op",
    "gather": "tensor gather_list dst group async_op group_dst",
    "scatter": "tensor scatter_list src group async_op group_src",
    "all_to_all_single": "output input output_split_sizes input_split_sizes group async_op",
    "all_to_all": "output_tensor_list input_tensor_list group async_op",
}
ONE = torch.ones(1)
INT = torch.ones(1, dtype=torch.int8)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(dist, name)).parameters
    assert list(parameters) == ARGUMENTS[name].split()
    assert parameters["async_op"].default is False


async def test_broadcast() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank == 0:
            return
        for where in ({"src": 2}, {"group_src": 1}):
            tensor = torch.full((2,), float(rank))
            work = dist.broadcast(tensor, group=pg, async_op=True, **where)
            assert await work is tensor
            assert tensor.tolist() == [2.0, 2.0]
        with pytest.raises(ValueError, match="src or group_src must be given"):
            dist.broadcast(ONE, group=pg)
        with pytest.raises(ValueError, match="global rank 0 is not in group"):
            dist.broadcast(ONE, 0, pg)

    await run_ranks(3, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128, torch.bool])
async def test_moving_of_any_dtype(dtype: torch.dtype) -> None:
    async def body(rank: int) -> None:
        values = [torch.tensor([1, 0]).to(dtype), torch.tensor([0, 1]).to(dtype)]
        mine = values[rank].clone()
        if dtype.is_complex:
            values = [value * 1j for value in values]
            mine = values[rank].clone()
        outputs = [torch.empty_like(mine) for _ in range(2)]
        await dist.all_gather(outputs, mine)
        assert all(map(torch.equal, outputs, values))
        whole = torch.empty(4, dtype=dtype)
        await dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole, torch.cat(values))
        await dist.all_to_all(outputs, values)
        assert all(torch.equal(output, values[rank]) for output in outputs)
        await dist.all_to_all_single(whole, torch.cat(values))
        assert torch.equal(whole, torch.cat([values[rank]] * 2))
        await dist.scatter(outputs[0], values if rank == 1 else None, 1)
        assert torch.equal(outputs[0], mine)
        await dist.gather(mine, outputs if rank == 0 else None)
        assert rank == 1 or all(map(torch.equal, outputs, values))
        await dist.broadcast(mine, 0)
        assert torch.equal(mine, values[0])

    await run_ranks(2, body)


@pytest.mark.parametrize("paired", [0, 1], ids=["the first is complex", "the second is complex"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
async def test_complex_on_one_rank_and_its_parts_on_another(dtype: torch.dtype, paired: int) -> None:
    async def body(rank: int) -> None:
        values = [torch.tensor([1 + 2j, 3j], dtype=dtype), torch.tensor([4j, 5 - 1j], dtype=dtype)]

        def form(tensor: torch.Tensor) -> torch.Tensor:
            """As this rank has it."""
            return tensor.clone() if rank == paired else torch.view_as_real(tensor).clone()

        def check(output: torch.Tensor, expected: torch.Tensor) -> None:
            assert output.dtype == (dtype if rank == paired else torch.view_as_real(expected).dtype)
            assert torch.equal(output, form(expected))

        mine = form(values[rank])
        for root in range(2):
            tensor = form(values[rank])
            await dist.broadcast(tensor, root)
            check(tensor, values[root])
        outputs = [torch.empty_like(mine) for _ in range(2)]
        await dist.all_gather(outputs, mine)
        for output, value in zip(outputs, values, strict=True):
            check(output, value)
        whole = form(torch.zeros(4, dtype=dtype))
        await dist.all_gather_into_tensor(whole, mine)
        check(whole, torch.cat(values))
        lists = [[torch.empty_like(mine)] for _ in range(2)]
        with pytest.warns(FutureWarning):
            await dist.all_gather_coalesced(lists, [mine])
        for (output,), value in zip(lists, values, strict=True):
            check(output, value)
        for root in range(2):
            await dist.scatter(tensor.zero_(), [form(value) for value in values] if rank == root else None, root)
            check(tensor, values[rank])
        await dist.all_to_all(outputs, [form(value * 2) for value in values])
        for output in outputs:
            check(output, values[rank] * 2)
        await dist.all_to_all_single(tensor.zero_(), mine)
        check(tensor, torch.stack([value[rank] for value in values]))
        splits = [1, 2] if rank == 0 else [2, 1]  # of rows, which are as many either way
        room, rows = form(torch.zeros(3, dtype=dtype)), torch.cat(values)[:3]
        await dist.all_to_all_single(room, form(rows), splits, [1, 2] if rank == 0 else [2, 1])
        check(room, torch.cat([rows[:1], rows[:2]]) if rank == 0 else torch.cat([rows[1:], rows[2:]]))
        if rank == 0:
            await dist.send(mine, 1)
            receive = dist.irecv(tensor.zero_(), 1)
            assert receive is not None
            await receive
        else:
            await dist.recv(tensor.zero_(), 0)
            sent = dist.isend(mine, 0)
            assert sent is not None
            await sent
        check(tensor, values[1 - rank])

    await run_ranks(2, body)


@pytest.mark.parametrize("pair", [(torch.complex64, torch.float32), (torch.complex128, torch.float64)])
async def test_complex_and_its_parts_in_one_call(pair: tuple[torch.dtype, torch.dtype]) -> None:
    async with alone():
        output, real = torch.empty(1, dtype=pair[0]), torch.tensor([1, 2], dtype=pair[1])
        await dist.all_gather([output], real)
        assert output.item() == 1 + 2j
        output.zero_()
        await dist.all_gather_into_tensor(output, real)
        assert output.item() == 1 + 2j
        back = torch.empty(2, dtype=pair[1])
        await dist.all_to_all([back], [output])
        assert back.tolist() == [1, 2]


async def test_a_complex_number_by_itself() -> None:
    async with alone():
        output = torch.empty((), dtype=torch.complex64)
        await dist.all_to_all_single(output, torch.tensor(1 + 2j))
        assert output.item() == 1 + 2j


async def test_uneven_all_gather() -> None:
    async def body(rank: int) -> None:
        outputs = [torch.empty(1), torch.empty(2)]
        work = dist.all_gather(outputs, torch.full((rank + 1,), float(rank)), async_op=True)
        assert isinstance(work, dist.Work)
        await work
        assert [output.tolist() for output in outputs] == [[0.0], [1.0, 1.0]]

    await run_ranks(2, body)


async def test_all_gather_concatenated_or_stacked() -> None:
    async def body(rank: int) -> None:
        for shape in ((4,), (2, 2)):
            output = torch.empty(shape)
            await dist.all_gather_into_tensor(output, torch.full((2,), float(rank)))
            assert output.flatten().tolist() == [0, 0, 1, 1]
        with pytest.warns(FutureWarning, match="use all_gather_into_tensor"):
            await dist._all_gather_base(output, torch.ones(2))
        assert output.tolist() == [[1.0, 1.0]] * 2

    await run_ranks(2, body)


async def test_all_gather_coalesced() -> None:
    async def body(rank: int) -> None:
        outputs = [[torch.empty(1), torch.empty(2)] for _ in range(2)]
        inputs = [torch.full((1,), float(rank)), torch.full((2,), rank + 10.0)]
        with pytest.warns(FutureWarning, match="all_gather_coalesced is deprecated"):
            future = dist.all_gather_coalesced(outputs, inputs, async_op=True)
        await future
        assert [[each.tolist() for each in output] for output in outputs] == [[[0], [10, 10]], [[1], [11, 11]]]
        with pytest.warns(FutureWarning):
            await dist.all_gather_coalesced(outputs, inputs)
        with pytest.warns(FutureWarning), pytest.raises(TypeError, match="list of lists"):
            dist.all_gather_coalesced(tuple(outputs), inputs)  # type: ignore[arg-type]
        with pytest.warns(FutureWarning), pytest.raises(ValueError, match="one dtype"):
            dist.all_gather_coalesced(outputs, [ONE, INT])

    await run_ranks(2, body)


async def test_gather() -> None:
    async def body(rank: int) -> None:
        room = [torch.empty(1) for _ in range(2)]
        mine = torch.tensor([float(rank)])
        await dist.gather(mine, room if rank == 0 else None)  # to global rank 0
        assert rank == 1 or [each.item() for each in room] == [0.0, 1.0]
        work = dist.gather(mine, room if rank == 1 else [], group_dst=1, async_op=True)
        await work
        assert [each.item() for each in room] == [0.0, 1.0]
        with pytest.raises(ValueError, match="gather_list must be given"):
            dist.gather(mine, None if rank == 0 else room)
        if rank == 0:
            with pytest.raises(ValueError, match="one dtype"):
                dist.gather(mine, [torch.empty(1), INT])

    await run_ranks(2, body)


async def test_scatter() -> None:
    async def body(rank: int) -> None:
        tensors = [torch.tensor([1.0]), torch.tensor([2.0])]
        output = torch.empty(1)
        await dist.scatter(output, tensors if rank == 0 else None)  # from global rank 0
        assert output.item() == rank + 1
        work = dist.scatter(output.zero_(), tensors if rank == 1 else [], group_src=1, async_op=True)
        await work
        assert output.item() == rank + 1
        with pytest.raises(ValueError, match="scatter_list must be given"):
            dist.scatter(output, None if rank == 0 else tensors)

    await run_ranks(2, body)


async def test_defaults_are_global_rank_0() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank == 0:
            return
        calls: list[Any] = [
            lambda: dist.gather(ONE, [ONE, ONE], group=pg),
            lambda: dist.scatter(ONE, [ONE, ONE], group=pg),
            lambda: dist.gather_object(1, [1, 2], group=pg),
            lambda: dist.broadcast_object_list([1], group=pg),
            lambda: dist.scatter_object_list([1], [1, 2], group=pg),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="global rank 0 is not in group '1'"):
                call()

    await run_ranks(3, body)


async def test_all_to_all() -> None:
    async def body(rank: int) -> None:
        outputs = [torch.empty(s + rank) for s in range(2)]  # also of no elements
        await dist.all_to_all(outputs, [torch.full((rank + r,), float(rank)) for r in range(2)])
        assert [output.tolist() for output in outputs] == [[0.0] * rank, [1.0] * (1 + rank)]
        with pytest.raises(ValueError, match="one dtype"):
            dist.all_to_all([ONE, ONE], [ONE, INT])

    await run_ranks(2, body)


async def test_all_to_all_single_by_rows() -> None:
    async def body(rank: int) -> None:
        for splits in (None, []):
            output = torch.empty(4, 2)
            await dist.all_to_all_single(output, torch.full((4, 2), float(rank)), splits, splits)
            assert output[:, 0].tolist() == [0, 0, 1, 1]
        mine = [1, 2] if rank == 0 else [3, 0]
        theirs = [1, 3] if rank == 0 else [2, 0]
        output = torch.empty(sum(theirs), 2)
        work = dist.all_to_all_single(output, torch.full((3, 2), float(rank)), theirs, mine, async_op=True)
        await work
        assert output[:, 1].tolist() == [0.0] * theirs[0] + [1.0] * theirs[1]
        output = torch.empty(2)
        await dist.all_to_all_single(output, torch.full((2,), float(rank)), None, [1, 1])
        assert output.tolist() == [0.0, 1.0]
        for sizes in (None, [1, 2]):
            with pytest.raises(ValueError, match=r"dim 0 of \w+ is 3, which the 2 ranks do not divide"):
                dist.all_to_all_single(torch.empty(3), torch.ones(3), None, sizes)
        with pytest.raises(ValueError, match=r"output_split_sizes must add up to the 4 rows of output, got \[1, 1\]"):
            dist.all_to_all_single(torch.empty(4), torch.ones(2), [1, 1])
        with pytest.raises(ValueError, match=r"input_split_sizes must add up to the 4 rows of input, got \[1, 1\]"):
            dist.all_to_all_single(torch.empty(2), torch.ones(4), None, [1, 1])

    await run_ranks(2, body)


async def test_a_group_of_one() -> None:
    async with alone():
        for call in (
            lambda out: dist.all_gather_into_tensor(out, torch.tensor([5.0])),
            lambda out: dist.all_gather([out], torch.tensor([5.0])),
            lambda out: dist.all_to_all_single(out, torch.tensor([5.0])),
            lambda out: dist.all_to_all([out], [torch.tensor([5.0])]),
            lambda out: dist.gather(torch.tensor([5.0]), [out]),
            lambda out: dist.scatter(out, [torch.tensor([5.0])]),
        ):
            output = torch.zeros(1)
            await call(output)
            assert output.item() == 5


async def test_ranks_that_disagree_are_told() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1])
        with pytest.raises(CollectiveMismatchError, match="differs"):
            await (dist.all_reduce(torch.ones(2), group=pg) if rank else dist.broadcast(torch.ones(2), 0, pg))
        await dist.barrier()

    await run_ranks(2, body)


async def test_tensors_may_take_over() -> None:
    mine, one = torch.ones(1).as_subclass(Mine), torch.ones(1)
    none = {"group": None, "async_op": False}
    assert dist.all_gather([one], mine) == ("all_gather", ([one], mine), none)
    assert dist.all_gather_into_tensor(mine, one) == ("all_gather_into_tensor", (mine, one), none)
    splits = {"output_split_sizes": [1], "input_split_sizes": None}
    assert dist.all_to_all_single(one, mine, [1]) == ("all_to_all_single", (one, mine), {**splits, **none})


async def test_modes_may_take_over() -> None:
    """Also where the tensors are plain: torch's exporters rely on it."""
    seen: list[str] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in calls:
                seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    calls: dict[Any, Callable[[], Any]] = {
        dist.all_reduce: lambda: dist.all_reduce(torch.ones(1)),
        dist.all_gather: lambda: dist.all_gather([torch.ones(1)], torch.ones(1)),
        dist.all_gather_into_tensor: lambda: dist.all_gather_into_tensor(torch.ones(1), torch.ones(1)),
        dist.reduce_scatter_tensor: lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(1)),
        dist.all_to_all_single: lambda: dist.all_to_all_single(torch.ones(1), torch.ones(1)),
    }
    async with alone():
        for call in calls.values():
            with Watching():
                work = call()
            await work
    assert seen == [function.__name__ for function in calls]


async def test_split_sizes_are_given_on_all_ranks_or_none() -> None:
    """Equal ones do not pass for none: another rank's need not be equal, which this one cannot know."""

    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1])
        splits = ([1, 1], [1, 1]) if rank == 0 else ()
        with pytest.raises(CollectiveMismatchError, match="all_to_all_single"):
            await dist.all_to_all_single(torch.empty(2), torch.ones(2), *splits, group=pg)

    await run_ranks(2, body)


@pytest.mark.parametrize("given", [(None, [1, 1]), ([1, 1], None), ([], [1, 1])])
async def test_sizes_of_one_side_are_enough(given: Any) -> None:
    async def body(rank: int) -> None:
        output = torch.empty(2)
        await dist.all_to_all_single(output, torch.tensor([rank, rank + 10.0]), *(given if rank else ([1, 1], [1, 1])))
        assert output.tolist() == ([0.0, 1.0] if rank == 0 else [10.0, 11.0])

    await run_ranks(2, body)


def test_arguments_of_barriers() -> None:
    assert list(inspect.signature(dist.barrier).parameters) == ["group", "async_op", "device_ids", "timeout"]
    assert list(inspect.signature(dist.monitored_barrier).parameters) == ["group", "timeout", "wait_all_ranks"]


async def test_nobody_passes_before_all_have_come() -> None:
    here = []

    async def body(rank: int) -> None:
        for _ in range(rank):
            await asyncio.sleep(0)
        here.append(rank)
        await dist.barrier()
        assert sorted(here) == [0, 1, 2]
        work = dist.barrier(async_op=True)
        assert isinstance(work, dist.Work)
        await work

    await run_ranks(3, body)


async def test_devices_of_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    async with alone() as pg:
        where = collectives._barrier_device
        assert where(pg, None) == torch.device("cpu")
        monkeypatch.setattr(collectives, "accelerator", lambda: "cuda")
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        assert where(pg, [2]) == torch.device("cuda:2")
        assert where(pg, []) == where(pg, None) == torch.device("cpu")  # objects are there, too
        gpu = await _on_a_gpu(pg)
        with pytest.warns(UserWarning, match="uses the current device: pass device_ids="):
            assert where(gpu, None) == torch.device("cuda:3")
        gpu._rank = 1
        assert where(gpu, None) == torch.device("cuda:3")  # only rank 0 says so
        gpu.bound_device_id = torch.device("cuda:1")
        assert where(gpu, None) == torch.device("cuda:1")
        await dist.barrier(device_ids=[0])
        await dist.barrier(device_ids=[])
        for wrong in (0, ["a"], [None], [True]):
            with pytest.raises(TypeError, match="device_ids must be a list of indices, got"):
                dist.barrier(device_ids=wrong)  # type: ignore[arg-type]
        for out_of_range in (-1, 128):
            with pytest.raises(ValueError, match=r"device_ids must be in \[0, 128\), got"):
                dist.barrier(device_ids=[out_of_range])


async def _on_a_gpu(pg: dist.ProcessGroup) -> dist.ProcessGroup:
    class Elsewhere:
        device = torch.device("cuda:0")

    return ProcessGroup("gpu", "", [0], 0, "nccl", pg.config, {"cuda": Elsewhere()}, pg.timeout)  # type: ignore[dict-item]


async def test_a_monitored_barrier_names_who_is_missing() -> None:
    over = asyncio.Event()

    async def body(rank: int) -> None:
        await dist.monitored_barrier(timeout=timedelta(seconds=30))
        if rank < 2:
            for everybody, expected in ((False, (2,)), (True, (2, 3))):
                with pytest.raises(MonitoredBarrierError) as caught:  # all that have come
                    await dist.monitored_barrier(timeout=timedelta(seconds=0.1), wait_all_ranks=everybody)
                assert caught.value.missing == expected
            over.set()
        else:
            await over.wait()
            for _ in range(2):  # who comes too late does not pass, nor stand for the next round
                with pytest.raises(MonitoredBarrierError):
                    await dist.monitored_barrier(timeout=timedelta(seconds=30))
        await dist.monitored_barrier(timeout=timedelta(seconds=30))

    await run_ranks(4, body)


async def test_time_limits_of_a_monitored_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    ours = Comm.monitored_barrier

    def noted(self: Comm, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        limits.append(timeout)
        return ours(self, timeout, wait_all_ranks)

    monkeypatch.setattr(Comm, "monitored_barrier", noted)
    async with alone(timeout=timedelta(seconds=77)):
        await dist.monitored_barrier()
        with pytest.warns(UserWarning, match="2.5 counts as seconds"):
            await dist.monitored_barrier(timeout=2.5)
        with pytest.raises(TypeError, match="timeout must be a timedelta"):
            dist.monitored_barrier(timeout="3")  # type: ignore[arg-type]
    assert limits == [timedelta(seconds=77), timedelta(seconds=2.5)]


async def test_a_monitored_barrier_needs_the_cpu() -> None:
    async with alone("cpu:loopback") as pg:
        await dist.monitored_barrier()  # of pairs, and not only of gloo
        with pytest.raises(ValueError, match="needs a group with a backend for the CPU"):
            dist.monitored_barrier(await _on_a_gpu(pg))


async def test_single_tensors_under_newer_names() -> None:
    async def body(rank: int) -> None:
        part, whole = torch.full((2,), float(rank)), torch.empty(6)
        await dist.all_gather_single(whole, part)
        assert whole.tolist() == [0, 0, 1, 1, 2, 2]
        await dist.reduce_scatter_single(part, whole)
        assert part.tolist() == [3.0 * rank] * 2
        for call in (dist.gather_single, dist.gather_into_tensor):
            whole.zero_()
            await call(part, whole if rank == 1 else None, 1)
            assert whole.tolist() == ([0, 0, 3, 3, 6, 6] if rank == 1 else [0] * 6)
        if rank == 0:
            with pytest.raises(ValueError, match="gather_tensor must be given on the root, got None"):
                dist.gather_single(part)

    await run_ranks(3, body)


async def test_the_timeout_of_a_barrier() -> None:
    async def body(rank: int) -> None:
        await dist.barrier(timeout=timedelta(seconds=30))
        with pytest.raises(TypeError, match=r"timeout must be a datetime.timedelta, got 3"):
            dist.barrier(timeout=3)  # type: ignore[arg-type]
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"timeout 0.2 s.*not arrived: ranks \[1\]"):
                await dist.barrier(timeout=timedelta(seconds=0.2))
            with pytest.raises(CollectiveTimeoutError):
                dist.barrier()

    await run_ranks(2, body)
