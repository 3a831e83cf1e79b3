"""Checks of tensors that share memory: results must be as if the tensors were copies.

Inputs have their values as of the time when the operation takes effect. Outputs are written in order, so where two
overlap, the values of the later output stay.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import everyones, expect_equal, reduced, sample, sentinel

LENGTHS = [5, 20_011, 300_007]  # elements: one message or a fused one, several steps, never fused


async def one_tensor_twice_in_a_list(comm: Comm) -> None:
    for n in LENGTHS:
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            tensor = sample(comm.rank, (n,))
            await comm.all_reduce_coalesced([tensor, torch.ones(3), tensor], op)
            expect_equal(
                tensor, reduced(everyones(comm.size, (n,)), op), f"{op} of a tensor of {n} that is there twice"
            )
        tensor = sample(comm.rank, (n,))
        await comm.broadcast_coalesced([tensor, tensor], 0)
        expect_equal(tensor, sample(0, (n,)), f"broadcast of a tensor of {n} that is there twice")


async def views_that_overlap_in_a_list(comm: Comm) -> None:
    for n in LENGTHS:
        whole = sample(comm.rank, (n,))
        third = n // 3
        await comm.all_reduce_coalesced([whole[: 2 * third], whole[third:]])
        expect_equal(whole, reduced(everyones(comm.size, (n,)), ReduceOp.SUM), f"sums of views of {n} that overlap")


async def views_that_overlap_on_one_rank(comm: Comm) -> None:
    for n in LENGTHS:
        first, second = sample(comm.rank, (n,)), sample(comm.rank, (n,), salt=7)
        if comm.rank == 0:  # the second output is the first, shifted by one element
            whole = sample(comm.rank, (n + 1,), salt=9)
            first, second = whole[:n], whole[1:]
        shares = await comm.all_gather_coalesced(None, [first, second])
        await comm.all_reduce_coalesced([first, second])
        sums = [reduced([share[i] for share in shares], ReduceOp.SUM) for i in range(2)]
        expect_equal(second, sums[1], f"the later of two views of {n} that overlap on rank 0")
        expect_equal(first[:1] if comm.rank == 0 else first, sums[0][: 1 if comm.rank == 0 else n], "the earlier one")


async def outputs_that_are_one(comm: Comm) -> None:
    size, last = comm.size, comm.size - 1
    for n in LENGTHS:
        output = sentinel((n,))
        await comm.all_gather([output] * size, sample(comm.rank, (n,)))
        expect_equal(output, sample(last, (n,)), f"all_gather of {n} into one tensor")
        output = sample(comm.rank, (n,))
        await comm.all_gather([output] * size, output)
        expect_equal(output, sample(last, (n,)), f"all_gather of {n} into the input, {size} times")
        whole = sentinel((n + size,))
        await comm.all_gather([whole[r : r + n] for r in range(size)], sample(comm.rank, (n,)))
        expected = sentinel((n + size,))
        for r in range(size):
            expected[r : r + n] = sample(r, (n,))
        expect_equal(whole, expected, f"all_gather of {n} into views that overlap")
        output = sentinel((n,))
        root = min(1, last)
        await comm.gather([output] * size if comm.rank == root else None, sample(comm.rank, (n,)), root)
        expect_equal(output, sample(last, (n,)) if comm.rank == root else sentinel((n,)), f"gather of {n} into one")
        await comm.all_to_all([output] * size, [sample(comm.rank, (n,), salt=r) for r in range(size)])
        expect_equal(output, sample(last, (n,), salt=comm.rank), f"all_to_all of {n} into one tensor")


async def a_root_s_output_in_another_rank_s_input(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for n in LENGTHS:
        for root in range(size):
            for form in ("scatter", "scatter_v", "scatter_single"):
                whole = sample(root, (size * n,))
                chunk = whole.chunk(size)
                output = chunk[(root + 1) % size] if rank == root else sentinel((n,))
                if form == "scatter_single":
                    await comm.scatter_single(output, whole if rank == root else None, root)
                else:
                    await getattr(comm, form)(output, chunk if rank == root else None, root)
                expected = sample(root, (size * n,)).chunk(size)[rank]
                expect_equal(output, expected, f"{form} of {n} from {root} into its own input")


async def sizes_exchanged_within_one_tensor(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for n in LENGTHS:
        sends = [n + k for k in range(size)]
        for given in ([n + rank] * size, None):
            whole = torch.cat([*_rows(rank, sends), torch.zeros(size * size)])
            await comm.all_to_all_v_single(whole, whole, given, sends)
            expected = torch.cat([_rows(peer, sends)[rank] for peer in range(size)])
            expect_equal(whole[: len(expected)], expected, f"all_to_all_v_single of {n} in place, sizes {given}")
        for given in (sends, None):
            for start in (0, min(1, size - 1), sum(sends[:rank])):
                whole = sentinel((sum(sends),))
                part = whole[start : start + sends[rank]]
                part.copy_(sample(rank, (sends[rank],)))
                await comm.all_gather_v(whole, part, given)
                expected = torch.cat([sample(r, (sends[r],)) for r in range(size)])
                expect_equal(whole, expected, f"all_gather_v of {n} from {start} in the output, sizes {given}")
                wholes = [sentinel((sum(sends),)) for _ in range(2)]
                parts = [wholes[1 - i][start : start + sends[rank]] for i in range(2)]
                for i, one in enumerate(parts):
                    one.copy_(sample(rank, (sends[rank],), salt=i))
                await comm.all_gather_v_coalesced(wholes, parts, given)
                for i, one in enumerate(wholes):
                    expected = torch.cat([sample(r, (sends[r],), salt=i) for r in range(size)])
                    expect_equal(one, expected, f"all_gather_v_coalesced of {n}, each from the other's output")


def _rows(rank: int, sizes: list[int]) -> list[Tensor]:
    return [sample(rank, (n,), salt=peer) for peer, n in enumerate(sizes)]


async def an_input_between_two_operations_that_write_it(comm: Comm) -> None:
    """An input whose shares are no views must be copied: neither before nor after its place in the order."""
    size, rank = comm.size, comm.rank
    for n in LENGTHS:
        shape = (size * (n // size + 1), size + 1)
        for dtypes in ([torch.float32], [torch.float32, torch.int64]):
            for scope in (False, True):
                wholes = [sample(rank, shape, dtype) for dtype in dtypes]
                outputs = [sentinel((shape[0] // size, shape[1]), dtype) for dtype in dtypes]
                async with comm.coalesce() if scope else nullcontext():
                    before = [comm.all_reduce(whole) for whole in wholes]
                    between = comm.reduce_scatter_coalesced(outputs, [whole.t() for whole in wholes], ReduceOp.MAX)
                    after = [comm.all_reduce(whole) for whole in wholes]
                await between
                for work in (*before, *after):
                    await work
                for whole, output, dtype in zip(wholes, outputs, dtypes, strict=True):
                    total = reduced(everyones(size, shape, dtype), ReduceOp.SUM)
                    expected = total.t().reshape(size, -1)[rank].view(output.shape)
                    expect_equal(output, expected, f"share of a transposed sum, {dtype}, of {n}, scope: {scope}")
                    expect_equal(whole, total * size, f"sum of sums, {dtype}, of {n}, scope: {scope}")


async def messages_that_share_memory_are_refused(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    for n in LENGTHS:
        tensor = sample(rank, (n,))
        for scope in (False, True):
            batch = comm.batch_op_create()
            try:
                if scope:
                    async with comm.coalesce():
                        comm.send(tensor, following)
                        comm.recv(tensor[:], previous)
                else:
                    batch.send(tensor, following)
                    batch.recv(tensor[:], previous)
                    await batch.issue()
            except ValueError as exc:
                assert "shares memory with" in str(exc), exc
            else:
                raise AssertionError(f"a batch sends and receives one tensor of {n}, scope: {scope}")
        pairs = torch.stack([sample(rank, (n,)), sentinel((n,))], 1)  # columns interleave, without shared elements
        batch = comm.batch_op_create()
        batch.send(pairs[:, 0], following)
        batch.recv(pairs[:, 1], previous)
        await batch.issue()
        expect_equal(pairs[:, 1], sample(previous, (n,)), f"messages of {n} in one matrix")


async def one_list_of_several_dtypes_in_one_memory_is_refused(comm: Comm) -> None:
    tensor = torch.ones(4)
    try:
        comm.all_reduce_coalesced([tensor, tensor.view(torch.int32)])
    except ValueError as exc:
        assert "shares memory with" in str(exc), exc
    else:
        raise AssertionError("one memory is reduced as numbers of two kinds")
    whole = torch.ones(comm.size, comm.size + 1).t()  # its shares are no views
    outputs = [whole.t().view(torch.int32)[0, :1], sentinel((comm.size + 1,))]
    try:
        comm.reduce_scatter_coalesced(outputs, [torch.ones(comm.size, dtype=torch.int32), whole])
    except ValueError as exc:
        assert "shares memory with" in str(exc), exc
    else:
        raise AssertionError("one memory is read as numbers of one kind and written as those of another")
