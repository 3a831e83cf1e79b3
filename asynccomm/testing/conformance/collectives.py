"""Checks of the results of collectives, and of the memory that they must not change."""

from __future__ import annotations

import asyncio
import math

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import (
    DTYPES,
    FLOAT8,
    FLOATS,
    SHAPES,
    combinations,
    expect_equal,
    layouts,
    reduced,
    sample,
    sentinel,
)

MATRIX = (3, 4)


async def all_reduce_every_dtype_and_op(comm: Comm) -> None:
    for dtype, op in combinations():
        tensor = sample(comm.rank, MATRIX, dtype)
        out = await comm.all_reduce(tensor, op)
        assert out is tensor, "all_reduce must return the tensor it was given"
        expected = reduced([sample(r, MATRIX, dtype) for r in range(comm.size)], op)
        expect_equal(tensor, expected, f"all_reduce {dtype} {op}")


async def all_reduce_every_shape_and_layout(comm: Comm) -> None:
    for shape in SHAPES:
        expected = reduced([sample(r, shape) for r in range(comm.size)], ReduceOp.SUM)
        for layout, tensor in layouts(sample(comm.rank, shape)):
            await comm.all_reduce(tensor)
            expect_equal(tensor, expected, f"all_reduce {shape} {layout}")
    shape = (2, 3)
    expected = reduced([sample(r, shape, torch.complex64) for r in range(comm.size)], ReduceOp.SUM)
    for layout, tensor in layouts(sample(comm.rank, shape, torch.complex64)):
        await comm.all_reduce(tensor)
        expect_equal(tensor, expected, f"all_reduce complex {layout}")


async def all_reduce_is_bitwise_identical(comm: Comm) -> None:
    generator = torch.Generator(comm.device).manual_seed(comm.rank)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        tensor = torch.randn(10_007, generator=generator, dtype=torch.float64).mul(1e3).to(dtype)
        await comm.all_reduce(tensor)
        for rank, theirs in enumerate(await comm.all_gather(None, tensor)):
            assert torch.equal(theirs.view(torch.uint8), tensor.view(torch.uint8)), f"{dtype}: rank {rank} differs"


async def halves_accumulate_in_fp32(comm: Comm) -> None:
    if comm.backend == "nccl":
        return  # NCCL rounds after each step of a ring
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        # one large number and many ones: accumulated in half precision, each addition would be rounded away
        value = large if comm.rank == 0 else 1.0
        expected = torch.tensor(large + (comm.size - 1), dtype=torch.float32).to(dtype).expand(5)
        tensor = torch.full((5,), value, dtype=dtype)
        await comm.all_reduce(tensor)
        assert torch.equal(tensor, expected), f"all_reduce accumulates in {dtype}: {tensor} instead of {expected}"
        out = await comm.reduce_scatter_single(None, torch.full((5 * comm.size,), value, dtype=dtype))
        assert torch.equal(out, expected), f"reduce_scatter accumulates in {dtype}: {out} instead of {expected}"


async def nan_wins_in_min_and_max(comm: Comm) -> None:
    if comm.device.type != "cpu":
        return  # a GPU library may treat NaN differently
    for dtype in (*FLOATS, *FLOAT8):
        for n in (1, 5, 67, 1031, 70_001):
            place = torch.arange(n * comm.size)
            rows = [sample(rank, (n * comm.size,)) for rank in range(comm.size)]
            for rank, row in enumerate(rows):
                row[(place * 7 + rank) % 5 == 0] = math.nan
            for kind in (ReduceOp.MIN, ReduceOp.MAX):
                together = torch.stack(rows)
                expected = together.amin(0) if kind is ReduceOp.MIN else together.amax(0)
                mine = rows[comm.rank].to(dtype)
                await _expect_with_nan(comm, mine, kind, expected)


async def _expect_with_nan(comm: Comm, mine: Tensor, kind: ReduceOp, expected: Tensor) -> None:
    rank, n = comm.rank, len(mine) // comm.size
    what = f"{kind} with nan of {mine.dtype}[{n}]"
    everywhere = await comm.all_reduce(mine.clone(), kind)
    _expect_same(everywhere, expected, what)
    bits = everywhere.view(torch.uint8)
    first = await comm.broadcast(bits.clone(), 0)
    assert torch.equal(bits, first), f"{what}: the ranks have different bits"
    at_root = await comm.reduce(mine.clone(), comm.size - 1, kind)
    if at_root is not None:
        _expect_same(at_root, expected, what)
    part = await comm.reduce_scatter_single(None, mine, kind)
    _expect_same(part, expected[rank * n : rank * n + n], what)


def _expect_same(found: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(found.float().isnan(), expected.isnan()), f"{what}: nan was lost, or spread"
    assert torch.equal(found.float().nan_to_num(), expected.nan_to_num()), what


async def nan_and_infinity_travel(comm: Comm) -> None:
    tensor = torch.tensor([float("nan") if comm.rank == 0 else 1.0, float("inf"), 1.0])
    await comm.all_reduce(tensor)
    assert torch.isnan(tensor[0]), "nan was lost in a sum"
    assert torch.isinf(tensor[1]), "inf was lost in a sum"
    assert tensor[2] == comm.size, "nan or inf spread to another element"


async def premul_sum_uses_each_ranks_factor(comm: Comm) -> None:
    factors: list[float | Tensor]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        total = sum(sample(r, (6,), dtype).to(torch.complex128) * (r + 0.5) for r in range(comm.size))
        assert isinstance(total, Tensor)
        expected = total.to(dtype) if dtype.is_complex else total.real.to(dtype)
        factors = [comm.rank + 0.5, torch.tensor(comm.rank + 0.5), torch.tensor([comm.rank + 0.5])]
        for factor in factors:
            tensor = sample(comm.rank, (6,), dtype)
            await comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(factor))
            expect_equal(tensor, expected, f"PREMUL_SUM {dtype} {factor!r}")
    source = sample(comm.rank, (2 * comm.size,))
    out = await comm.reduce_scatter_single(None, source, ReduceOp.PREMUL_SUM(comm.rank + 0.5))
    rows = torch.stack([sample(r, (2 * comm.size,)).double() * (r + 0.5) for r in range(comm.size)])
    expect_equal(out, rows.sum(0).view(comm.size, 2)[comm.rank].float(), "reduce_scatter_single PREMUL_SUM")
    expect_equal(source, sample(comm.rank, (2 * comm.size,)), "reduce_scatter_single's input after PREMUL_SUM")
    ints = sample(comm.rank, (3,), torch.int32)
    await comm.all_reduce(ints, ReduceOp.PREMUL_SUM(comm.rank + 2))
    expect_equal(
        ints,
        reduced([sample(r, (3,), torch.int32) * (r + 2) for r in range(comm.size)], ReduceOp.SUM),
        "PREMUL_SUM int32",
    )


async def broadcast_every_root_dtype_and_layout(comm: Comm) -> None:
    for root in range(comm.size):
        for dtype in DTYPES:
            tensor = sample(comm.rank, MATRIX, dtype) if comm.rank == root else sentinel(MATRIX, dtype)
            assert await comm.broadcast(tensor, root) is tensor
            expect_equal(tensor, sample(root, MATRIX, dtype), f"broadcast {dtype} from {root}")
        for shape in SHAPES:
            for layout, tensor in layouts(sample(comm.rank, shape)):
                await comm.broadcast(tensor, root)
                expect_equal(tensor, sample(root, shape), f"broadcast {shape} {layout} from {root}")


async def reduce_every_root_leaves_others_alone(comm: Comm) -> None:
    for i, (dtype, op) in enumerate(combinations()):
        root = i % comm.size
        tensor = sample(comm.rank, MATRIX, dtype)
        out = await comm.reduce(tensor, root, op)
        if comm.rank == root:
            assert out is tensor
            expected = reduced([sample(r, MATRIX, dtype) for r in range(comm.size)], op)
            expect_equal(tensor, expected, f"reduce {dtype} {op} to {root}")
        else:
            assert out is None
            expect_equal(tensor, sample(comm.rank, MATRIX, dtype), f"reduce {dtype} {op}: tensor off the root")
    for root in range(comm.size):
        for layout, tensor in layouts(sample(comm.rank, MATRIX)):
            await comm.reduce(tensor, root)
            mine = [sample(r, MATRIX) for r in range(comm.size)]
            expected = reduced(mine, ReduceOp.SUM) if comm.rank == root else mine[comm.rank]
            expect_equal(tensor, expected, f"reduce {layout} to {root}")


async def all_gather_list_and_single(comm: Comm) -> None:
    for dtype in DTYPES:
        mine = sample(comm.rank, MATRIX, dtype)
        everyone = [sample(r, MATRIX, dtype) for r in range(comm.size)]
        outputs = [sentinel(MATRIX, dtype) for _ in range(comm.size)]
        assert await comm.all_gather(outputs, mine) is outputs
        for r in range(comm.size):
            expect_equal(outputs[r], everyone[r], f"all_gather {dtype} of {r}")
        forms: list[tuple[int, ...]] = [(comm.size * 3, 4), (comm.size, 3, 4), (comm.size * 12,)]
        for form in forms:
            output = sentinel(form, dtype)
            assert await comm.all_gather_single(output, mine) is output
            expect_equal(output, torch.stack(everyone).view(form), f"all_gather_single {dtype} {form}")
        expect_equal(mine, everyone[comm.rank], f"all_gather {dtype}: input")
    for shape in SHAPES:
        for layout, mine in layouts(sample(comm.rank, shape)):
            everyone = [sample(r, shape) for r in range(comm.size)]
            outputs = [next(t for name, t in layouts(sentinel(shape)) if name == layout) for _ in range(comm.size)]
            await comm.all_gather(outputs, mine)
            for r in range(comm.size):
                expect_equal(outputs[r], everyone[r], f"all_gather {shape} {layout} of {r}")
            made = await comm.all_gather_single(None, mine)
            flat = torch.stack(everyone)
            expect_equal(made, flat.view(made.shape), f"all_gather_single {shape} {layout}, allocated")


async def all_gather_may_alias(comm: Comm) -> None:
    buffer = sentinel((comm.size, 5))
    buffer[comm.rank] = sample(comm.rank, (5,))
    await comm.all_gather(list(buffer.unbind(0)), buffer[comm.rank])
    expect_equal(
        buffer, torch.stack([sample(r, (5,)) for r in range(comm.size)]), "all_gather into views of one buffer"
    )
    single = sentinel((comm.size * 5,))
    single.view(comm.size, 5)[comm.rank] = sample(comm.rank, (5,))
    await comm.all_gather_single(single, single.view(comm.size, 5)[comm.rank])
    expect_equal(single.view(comm.size, 5), buffer, "all_gather_single, its input in place")


async def all_gather_single_into_strides(comm: Comm) -> None:
    output = sentinel((4, comm.size)).t()
    await comm.all_gather_single(output, sample(comm.rank, (4,)))
    expect_equal(
        output, torch.stack([sample(r, (4,)) for r in range(comm.size)]), "all_gather_single, transposed output"
    )


async def reduce_scatter_list_and_single(comm: Comm) -> None:
    size = comm.size
    for dtype, op in combinations():
        whole = [sample(r, (size, 3, 2), dtype) for r in range(size)]
        expected = reduced(whole, op)[comm.rank]
        source = whole[comm.rank].clone()
        output = sentinel((3, 2), dtype)
        assert await comm.reduce_scatter_single(output, source, op) is output
        expect_equal(output, expected, f"reduce_scatter_single {dtype} {op}")
        inputs = [chunk.clone() for chunk in source.unbind(0)]
        output = sentinel((3, 2), dtype)
        assert await comm.reduce_scatter(output, inputs, op) is output
        expect_equal(output, expected, f"reduce_scatter {dtype} {op}")
        expect_equal(source, whole[comm.rank], f"reduce_scatter_single {dtype} {op}: input")
        expect_equal(torch.stack(inputs), whole[comm.rank], f"reduce_scatter {dtype} {op}: inputs")
    for shape in SHAPES:
        whole = [torch.stack([sample(r, shape, salt=s) for s in range(size)]) for r in range(size)]
        expected = reduced(whole, ReduceOp.SUM)[comm.rank]
        for layout, output in layouts(sentinel(shape)):
            inputs = [next(t for name, t in layouts(row) if name == layout) for row in whole[comm.rank]]
            await comm.reduce_scatter(output, inputs)
            expect_equal(output, expected, f"reduce_scatter {shape} {layout}")
            made = await comm.reduce_scatter_single(None, whole[comm.rank])
            expect_equal(made.view(shape), expected, f"reduce_scatter_single {shape}, allocated")


async def scatter_and_gather_every_root(comm: Comm) -> None:
    for root in range(comm.size):
        for dtype in DTYPES:
            inputs = [sample(r, MATRIX, dtype, salt=root) for r in range(comm.size)] if comm.rank == root else None
            output = sentinel(MATRIX, dtype)
            assert await comm.scatter(output, inputs, root) is output
            expect_equal(output, sample(comm.rank, MATRIX, dtype, salt=root), f"scatter {dtype} from {root}")
            outputs = [sentinel(MATRIX, dtype) for _ in range(comm.size)] if comm.rank == root else []
            got = await comm.gather(outputs, output, root)
            if comm.rank == root:
                assert got is outputs
                for r in range(comm.size):
                    expect_equal(outputs[r], sample(r, MATRIX, dtype, salt=root), f"gather {dtype} of {r} at {root}")
            else:
                assert got is None
        for shape in SHAPES:
            for layout, output in layouts(sentinel(shape)):
                inputs = None
                if comm.rank == root:
                    inputs = [
                        next(t for name, t in layouts(sample(r, shape)) if name == layout) for r in range(comm.size)
                    ]
                await comm.scatter(output, inputs, root)
                expect_equal(output, sample(comm.rank, shape), f"scatter {shape} {layout} from {root}")
                made = await comm.gather(None, output, root)
                for r, theirs in enumerate(made or []):
                    expect_equal(theirs, sample(r, shape), f"gather {shape} {layout} of {r} at {root}")


async def all_to_all_single_in_and_out_of_place(comm: Comm) -> None:
    size = comm.size
    for dtype in DTYPES:
        source = sample(comm.rank, (size, 3), dtype)
        expected = torch.stack([sample(r, (size, 3), dtype)[comm.rank] for r in range(size)])
        output = sentinel((size, 3), dtype)
        assert await comm.all_to_all_single(output, source) is output
        expect_equal(output, expected, f"all_to_all_single {dtype}")
        expect_equal(source, sample(comm.rank, (size, 3), dtype), f"all_to_all_single {dtype}: input")
        await comm.all_to_all_single(source, source)
        expect_equal(source, expected, f"all_to_all_single {dtype}, in place")
    for shape in ((0,), (size,), (size, 2, 2), (2 * size, 3)):
        for layout, source in layouts(sample(comm.rank, shape)):
            made = await comm.all_to_all_single(None, source)
            expected = torch.stack([sample(r, shape).reshape(size, -1)[comm.rank] for r in range(size)]).view(shape)
            expect_equal(made, expected, f"all_to_all_single {shape} {layout}")


async def barrier_waits_for_all(comm: Comm) -> None:
    for late in range(comm.size):
        if comm.rank == late:
            await asyncio.sleep(0)  # a point at which the other ranks may have called already
        await comm.barrier()


async def parameters_that_require_grad(comm: Comm) -> None:
    leaf = torch.full((4,), float(comm.rank), requires_grad=True)
    version = leaf.grad_fn
    await comm.broadcast(leaf, comm.size - 1)
    assert leaf.requires_grad
    assert leaf.grad_fn is version
    expect_equal(leaf.detach(), torch.full((4,), float(comm.size - 1)), "broadcast of a leaf that requires grad")
    graph = leaf * 2
    out = await comm.all_gather_single(None, graph)
    assert not out.requires_grad, "collectives are not differentiable: outputs must not look as if they were"
