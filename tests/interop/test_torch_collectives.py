"""Every operation that torch calls, compared to gloo's result."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from asynccomm import CollectiveTimeoutError
from asynccomm.interop.torch_version import PYTHON_BACKENDS
from tests.interop.world import world
from tests.sampling import some

Results = dict[str, Any]
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different on each rank and at each place, and exact in every order of adding up."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) + 100 * (dist.get_rank() + 1)).to(dtype)


def of_torch(backend: str) -> Results:
    """What every function of torch.distributed gives."""
    n, rank = dist.get_world_size(), dist.get_rank()
    found: Results = {}

    def keep(name: str, *tensors: Any) -> None:
        found[name] = [tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in tensors]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
            tensor = torch.full((3, 2), rank + 1).to(dtype)
            dist.all_reduce(tensor, op)
            keep(f"all_reduce {op} {dtype}", tensor)
    for bits in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = mine(5, dtype=torch.int32)
        dist.all_reduce(tensor, bits)
        keep(f"all_reduce {bits}", tensor)
    tensor = torch.complex(mine(3), -mine(3))
    dist.all_reduce(tensor)
    keep("all_reduce complex", tensor)
    for root in range(n):
        tensor = mine(4)
        dist.broadcast(tensor, root)
        keep(f"broadcast {root}", tensor)
        tensor = mine(4)
        dist.reduce(tensor, root)
        keep(f"reduce {root}", *([tensor] if rank == root else []))
        outputs = [torch.zeros(4) for _ in range(n)] if rank == root else None
        dist.gather(mine(4), outputs, dst=root)
        keep(f"gather {root}", *(outputs or []))
        output = torch.zeros(4)
        dist.scatter(output, [mine(4) + i for i in range(n)] if rank == root else None, src=root)
        keep(f"scatter {root}", output)
    outputs = [torch.zeros(2, 3) for _ in range(n)]
    dist.all_gather(outputs, mine(2, 3))
    keep("all_gather", *outputs)
    output = torch.zeros(2 * n, 3)
    all_gather_single(output, mine(2, 3))
    keep("all_gather_single", output)
    output = torch.zeros(3)
    dist.reduce_scatter(output, [mine(3) * (i + 1) for i in range(n)])
    keep("reduce_scatter", output)
    output = torch.zeros(2, 3)
    reduce_scatter_single(output, mine(2 * n, 3))
    keep("reduce_scatter_single", output)
    if backend != "gloo":  # which has no list form
        outputs = [torch.zeros(r + 1) for r in range(n)]
        dist.all_to_all(outputs, [mine(rank + 1) + r for r in range(n)])
    else:
        outputs = [torch.arange(r + 1) + 100.0 * (r + 1) + rank for r in range(n)]
    keep("all_to_all", *outputs)
    output = torch.zeros(2 * n, 2)
    dist.all_to_all_single(output, mine(2 * n, 2))
    keep("all_to_all_single", output)
    output = torch.zeros(n * (rank + 1), 2)
    dist.all_to_all_single(output, mine(n * (n + 1) // 2, 2), [rank + 1] * n, [r + 1 for r in range(n)])
    keep("all_to_all_single uneven", output)
    output = mine(6)
    if rank == 0:
        dist.send(mine(6), 1, tag=3)
    elif rank == 1:
        dist.recv(output, 0, tag=3)
    keep("send", output)
    output = torch.zeros(2)
    reqs = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, output, (rank - 1) % n),
            dist.P2POp(dist.isend, mine(2), (rank + 1) % n),
        ]
    )
    for req in reqs:
        req.wait()
    keep("batch_isend_irecv", output)
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    keep("all_gather_object", *objects)
    objects = [{"rank": rank}] * 2
    dist.broadcast_object_list(objects, src=n - 1)
    keep("broadcast_object_list", *objects)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(n)] if rank == 0 else None, src=0)
    keep("scatter_object_list", *got)
    gathered: list[Any] | None = [None] * n if rank == 1 else None
    dist.gather_object(rank, gathered, dst=1)
    keep("gather_object", gathered)
    with quiet():  # some versions warn of what is checked here
        indices = torch.tensor([[rank, rank + 1, rank]])
        sparse = torch.sparse_coo_tensor(indices, torch.ones(3, 2) * (rank + 1), (n + 1, 2), check_invariants=True)
        dist.all_reduce(sparse)
    keep("all_reduce sparse", sparse.to_dense())
    tensors = [mine(2), mine(3)]
    with quiet():
        dist.all_reduce_coalesced(tensors)
        keep("all_reduce_coalesced", *tensors)
        lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(n)]
        dist.all_gather_coalesced(lists, [mine(2), mine(3)])
    keep("all_gather_coalesced", *[tensor for one in lists for tensor in one])
    group = dist.group.WORLD
    with dist.distributed_c10d._coalescing_manager(group):
        tensors = [mine(2), mine(3)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    keep("coalescing all_reduce", *tensors)
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        tensors = [torch.zeros(n * 2), torch.zeros(n * 3)]
        for tensor in tensors:
            all_gather_single(tensor, mine(tensor.numel() // n))
    manager.wait()
    keep("coalescing all_gather", *tensors)
    with dist.distributed_c10d._coalescing_manager(group):
        tensors = [torch.zeros(2), torch.zeros(3)]
        for tensor in tensors:
            reduce_scatter_single(tensor, mine(tensor.numel() * n))
    keep("coalescing reduce_scatter", *tensors)
    dist.barrier()
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, of deprecated names for example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.ranks(some([3, 2], 1))
async def test_everything_is_as_with_gloo() -> None:
    with world("gloo"):
        expected = of_torch("gloo")
    with world():
        found = of_torch("asynccomm")
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert len(found[name]) == len(wanted)
        for one, other in zip(found[name], wanted, strict=True):
            if isinstance(other, Tensor):
                assert one.dtype == other.dtype, name
                assert torch.equal(one, other), name
            else:
                assert one == other, name


@pytest.mark.ranks(2)
async def test_the_methods_of_the_group_itself() -> None:
    """In the forms without options, which C++ extensions and older programs use."""
    with world() as group:
        rank = group.rank()
        tensor = mine(3)
        group.allreduce(tensor).wait()
        assert tensor.tolist() == [300, 302, 304]
        tensor = mine(3)
        group.allreduce([tensor], dist.ReduceOp.MAX).wait()
        assert tensor.tolist() == [200, 201, 202]
        tensor = mine(3)
        group.broadcast(tensor, 1).wait()
        assert tensor.tolist() == [200, 201, 202]
        outputs = [torch.zeros(3), torch.zeros(3)]
        group.allgather(outputs, mine(3)).wait()
        assert outputs[1].tolist() == [200, 201, 202]
        outputs = [torch.zeros(3), torch.zeros(3)] if rank == 0 else []
        group.gather(outputs, mine(3), 0).wait()
        assert [tensor.tolist() for tensor in outputs] == [[100, 101, 102], [200, 201, 202]][: len(outputs)]
        output = torch.zeros(3)
        group.scatter(output, [mine(3), mine(3) + 5] if rank == 0 else [], 0).wait()
        assert output.tolist() == [100 + 5 * rank, 101 + 5 * rank, 102 + 5 * rank]
        output = torch.zeros(3)
        group.reduce_scatter(output, [mine(3), mine(3)]).wait()
        assert output.tolist() == [300, 302, 304]
        group.barrier().wait()
        assert group._get_sequence_number_for_group() == 8


@pytest.mark.ranks(2)
async def test_premultiplied_sums() -> None:
    with world():
        for factor in (2.0, torch.tensor([2.0])):
            tensor = torch.ones(3) * (dist.get_rank() + 1)
            dist.all_reduce(tensor, c10d._make_nccl_premul_sum(factor))
            assert tensor.tolist() == [6, 6, 6]


@pytest.mark.ranks(2)
async def test_a_receive_from_anybody_says_who_it_was() -> None:
    with world():
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
        else:
            work = dist.irecv(torch.zeros(2))
            work.wait()
            assert work._source_rank() == work.source_rank() == 0
            with pytest.raises(RuntimeError, match="source"):
                dist.isend(torch.ones(1), 0)._source_rank()
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(1), 1)


@pytest.mark.ranks(2)
async def test_a_device_given_to_the_coalescing_manager() -> None:
    """Everything leaves at its end, as one Work."""
    with world() as group:
        tensors = [mine(2), mine(3)]
        with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
            dist.broadcast(tensors[0], 1, async_op=True)
            dist.all_reduce(tensors[1])
            assert tensors[0].tolist() == [100 * (dist.get_rank() + 1), 100 * (dist.get_rank() + 1) + 1]
        [work] = manager.works if PYTHON_BACKENDS else manager.works[-1:]
        work.wait()
        assert tensors[0].tolist() == [200, 201]
        assert tensors[1].tolist() == [300, 302, 304]


@pytest.mark.ranks(2)
async def test_what_an_exception_left_held_back_is_dropped() -> None:
    with world() as group:
        with pytest.raises(ZeroDivisionError), dist.distributed_c10d._coalescing_manager(group, torch.device("cpu")):
            held = dist.all_reduce(torch.ones(1), async_op=True)
            raise ZeroDivisionError
        dist.distributed_c10d._world.pg_coalesce_state.clear()
        tensor = torch.ones(1)
        with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu")):
            pass
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        del held


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="this torch coalesces nothing")
@pytest.mark.ranks(2)
async def test_a_batch_with_a_call_that_is_refused() -> None:
    """torch does not stop coalescing if an error comes out of the middle, and then skips later collectives."""
    with world():
        peer = 1 - dist.get_rank()
        bad = torch.zeros(1).expand(3)
        with pytest.raises(ValueError, match="overlaps itself"):
            dist.batch_isend_irecv([dist.P2POp(dist.isend, mine(3), peer), dist.P2POp(dist.irecv, bad, peer)])
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        found = torch.zeros(3)
        works = [dist.P2POp(dist.isend, mine(3), peer), dist.P2POp(dist.irecv, found, peer)]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        assert found.tolist() == [100 * (peer + 1) + i for i in range(3)]


@pytest.mark.ranks(2)
async def test_a_call_that_is_refused_in_a_coalescing_manager() -> None:
    with world() as group:
        for splits in ([1, 2], None), ([1, 1], [1, 1]):
            output, tensor = torch.zeros(3), torch.ones(1)
            with (
                pytest.raises(ValueError, match=r"input must divide evenly|must add up to the 3 rows of output"),
                dist.distributed_c10d._coalescing_manager(group, torch.device("cpu")),
            ):
                dist.all_to_all_single(output, torch.ones(3), *splits)
            dist.all_reduce(tensor)
            assert tensor.item() == 2


@pytest.mark.ranks(2)
async def test_sparse_tensors_of_different_shapes() -> None:
    with world():
        rank = dist.get_rank()
        sparse = torch.sparse_coo_tensor([[5 * rank]], [1.0], (4 + 2 * rank,), check_invariants=True)
        work = dist.all_reduce(sparse, async_op=True)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"tensor must have the same shape .* on all ranks"):
                work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), ValueError)
        dense = torch.ones(1)
        dist.all_reduce(dense)
        assert dense.item() == 2


@pytest.mark.ranks(2)
async def test_time_limits() -> None:
    with world() as group:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.3)
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveTimeoutError, match="timeout") as caught:
                group.allreduce([torch.ones(1)], options).wait()
            assert caught.value.timeout == pytest.approx(0.3)
        else:
            with pytest.raises(RuntimeError):
                dist.recv(torch.zeros(1), 0)  # until the other has given up


@pytest.mark.ranks(2)
async def test_a_wait_may_have_a_limit_of_its_own() -> None:
    with world():
        tensor = torch.ones(1)
        if dist.get_rank() == 0:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(RuntimeError, match="Timed out"):
                work.wait(timedelta(milliseconds=20))
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.item() == 2


@pytest.mark.ranks(2)
async def test_the_limit_of_a_group_can_be_changed() -> None:
    with world() as group:
        group.set_timeout(timedelta(seconds=0.3))
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.barrier()
            assert caught.value.timeout == pytest.approx(0.3)
        else:
            group.set_timeout(timedelta(seconds=60))
            with pytest.raises(RuntimeError):
                dist.recv(torch.zeros(1), 0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("wait_all_ranks", [False, True])
async def test_a_monitored_barrier_names_who_is_missing(wait_all_ranks: bool) -> None:
    """In the words of gloo, to the letter but for the error that is its cause."""
    with world(label=str(wait_all_ranks)):
        rank, limit = dist.get_rank(), timedelta(seconds=0.3)
        found = {
            group: failure_of(group, limit, wait_all_ranks) if rank == 0 else None
            for group in (dist.new_group(backend="gloo", timeout=timedelta(seconds=2)), dist.new_group())
        }
        gloos, ours = found.values()
        dist.barrier()
        assert ours == gloos
        if rank == 0:
            ranks = "Ranks 1, 2" if wait_all_ranks else "Rank 1"
            assert ours == f"[Rank 0]: {ranks} failed to pass monitoredBarrier in 300 ms"


@pytest.mark.ranks(3)
async def test_a_monitored_barrier_that_one_rank_misses() -> None:
    with world() as group:
        group.monitored_barrier(timedelta(seconds=30))
        limit = timedelta(seconds=0.3)
        reached = (
            "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank "
            "0. Please check rank 0 logs for faulty rank."
        )
        words = {0: "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 300 ms", 2: reached}
        if (rank := dist.get_rank()) in words:
            assert failure_of(group, limit, wait_all_ranks=True) == words[rank]
        dist.barrier()


def failure_of(group: Any, limit: timedelta, wait_all_ranks: bool) -> str:
    """What a monitored barrier raises, without its cause."""
    with pytest.raises(RuntimeError) as caught:
        group.monitored_barrier(limit, wait_all_ranks)
    return str(caught.value).split("\n")[0]


@pytest.mark.ranks(2)
async def test_bad_arguments_raise_at_the_call() -> None:
    with world() as group:
        with pytest.raises(ValueError, match="one is expected"):
            group.broadcast([torch.ones(1), torch.ones(1)], broadcast_options())
        with pytest.raises(ValueError, match="divide evenly"):
            dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [])
        for rows, splits, words in (
            ((4, 4), ([1, 1], [1, 1]), "output_split_sizes must add up to the 4 rows of output, got [1, 1]"),
            ((4, 2), ([1, 1], None), "output_split_sizes must add up to the 4 rows of output, got [1, 1]"),
            ((2, 4), (None, [1, 1]), "input_split_sizes must add up to the 4 rows of input, got [1, 1]"),
        ):
            output = torch.zeros(rows[0])
            with pytest.raises(ValueError, match=re.escape(words)):
                dist.all_to_all_single(output, torch.ones(rows[1]), *splits)
            assert not output.any()
        sparse = torch.eye(2).to_sparse()
        with pytest.raises(ValueError, match="SUM or AVG"):
            dist.all_reduce(sparse, dist.ReduceOp.MAX)


@pytest.mark.ranks(2)
async def test_a_sparse_tensor_that_other_operations_write() -> None:
    with world():
        rank = dist.get_rank()
        indices, values = torch.tensor([[1, 2, 4]]) - rank, torch.full((2, 3), rank + 1.0)
        sparse = torch.sparse_coo_tensor(indices, values.t(), (5, 2), is_coalesced=True, check_invariants=True)
        works = [
            dist.broadcast(indices, 0, async_op=True),
            dist.all_reduce(values, async_op=True),
            dist.all_reduce(sparse, async_op=True),
        ]
        for work in works:
            work.wait()
        assert sparse.to_dense().tolist() == [[0, 0], [6, 6], [6, 6], [0, 0], [6, 6]]


@pytest.mark.ranks(2)
async def test_coalesced_sparse_tensors_belong_to_the_caller_after_the_wait() -> None:
    with world() as group:
        for _ in range(20):
            sparse = torch.eye(100).to_sparse()
            group._start_coalescing(torch.device("cpu"))
            group.allreduce([sparse])
            group._end_coalescing(torch.device("cpu")).wait()
            assert sparse.to_dense().sum().item() == 200
            sparse.zero_()
            dist.barrier()
            assert sparse.to_dense().count_nonzero().item() == 0


@pytest.mark.ranks(2)
async def test_coalesced_sparse_tensors_of_different_shapes() -> None:
    with world() as group:
        wrong, right = torch.eye(3 + group.rank()).to_sparse(), torch.eye(2).to_sparse()
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([wrong])
        group.allreduce([right])
        work = group._end_coalescing(torch.device("cpu"))
        for _ in range(2):
            with pytest.raises(ValueError, match="tensor must have the same shape"):
                work.wait()
        assert not work.is_success()
        assert right.to_dense().sum().item() == 4


def broadcast_options() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options
