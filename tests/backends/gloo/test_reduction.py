"""What goes before and after a reduction."""

import itertools
import math

import pytest
import torch

from asynccomm import Comm, ReduceOp
from asynccomm.backends.gloo.reduction import (
    brought,
    gather_rows,
    in_order,
    is_native,
    narrow_all,
    reduce_rows,
    row_bytes,
    rows_of,
    wide_dtype,
    widen_all,
    widened_bytes,
)
from asynccomm.backends.gloo.staging import room
from asynccomm.backends.regions import bytes_of
from asynccomm.testing.conformance.data import DTYPES, sample, sentinel, strided
from tests.cases import cases
from tests.sampling import some

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
PREMUL = ReduceOp.PREMUL_SUM(3)


def test_what_gloo_can_do_alone() -> None:
    assert is_native(torch.float32, ReduceOp.SUM)
    assert not is_native(torch.float32, ReduceOp.AVG)
    assert not is_native(torch.float32, PREMUL)
    assert not is_native(torch.bfloat16, ReduceOp.SUM)


def test_brought_in_the_memory_that_will_do() -> None:
    source, plain, gaps = torch.arange(4.0), torch.zeros(4), torch.zeros(8)[::2]
    assert brought(source, source, ReduceOp.SUM).data_ptr() == source.data_ptr()
    assert brought(source, plain, ReduceOp.SUM).data_ptr() == plain.data_ptr()
    for output in (gaps, None, source.view(4)):
        found = brought(source, output, ReduceOp.SUM)
        assert found.data_ptr() != source.data_ptr()
        assert found.tolist() == [0, 1, 2, 3]
    assert brought(source, plain, PREMUL).tolist() == [0, 3, 6, 9]
    assert source.tolist() == [0, 1, 2, 3]


def test_brought_into_what_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        output = torch.zeros(3)
    assert brought(torch.ones(3), output, ReduceOp.SUM).tolist() == [1, 1, 1]


@cases("kind", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, PREMUL], ids=str)
@cases("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype, kind: ReduceOp) -> None:
    try:
        kind.check(dtype)
    except (TypeError, ValueError):
        return
    tensors = [strided(sample(0, (3, 2), dtype)), sample(1, (4,), dtype), sample(0, (0,), dtype)]
    memory = room(widened_bytes(dtype, kind, 10))
    widen_all(memory, tensors, kind)
    outputs = [sentinel(tensor.shape, dtype) for tensor in tensors]
    narrow_all(memory.view(wide_dtype(dtype, kind)), outputs, kind, 1)
    for output, tensor in zip(outputs, tensors, strict=True):
        expected = tensor
        if kind is PREMUL:
            wide = tensor.to(torch.float32) if dtype.is_floating_point and dtype.itemsize == 1 else tensor
            expected = (wide * 3).to(dtype)
        assert torch.equal(bytes_of(output), bytes_of(expected))


@pytest.mark.parametrize("kind", [ReduceOp.SUM, PREMUL], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex32], ids=str)
def test_rows_are_summed_up(dtype: torch.dtype, kind: ReduceOp) -> None:
    ranks = [[sample(rank, (3,), dtype), sample(rank, (2, 2), dtype, 1)] for rank in range(3)]
    rows = [rows_of(tensors, kind) for tensors in ranks]
    assert all(row.numel() == row_bytes(dtype, kind, 7) for row in rows)
    again = room(rows[0].numel())
    gather_rows(again, ranks[0], kind)
    assert torch.equal(again, rows[0])
    outputs = [torch.zeros(3, dtype=dtype), strided(torch.zeros(2, 2, dtype=dtype))]
    reduce_rows(torch.cat(rows), outputs, kind, 3)
    factor = 3 if kind is PREMUL else 1
    for i, output in enumerate(outputs):
        expected = sum(tensors[i].to(torch.complex64) for tensors in ranks) * factor
        assert torch.equal(output.to(torch.complex64), expected)


def test_rows_that_lie_side_by_side_are_not_copied() -> None:
    source = torch.arange(6, dtype=torch.bfloat16)
    assert rows_of(source.split(2), ReduceOp.SUM).data_ptr() == source.data_ptr()
    assert rows_of([source], ReduceOp.SUM).data_ptr() == source.data_ptr()


SPECIAL = [-math.inf, -3e38, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3e38, math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [ReduceOp.MIN, ReduceOp.MAX])
def test_floats_as_integers_in_their_order(dtype: torch.dtype, kind: ReduceOp) -> None:
    nans = torch.tensor([math.nan, -math.nan], dtype=dtype)
    values = torch.tensor(SPECIAL, dtype=dtype)
    bits = in_order(values.clone(), kind)
    assert bits.dtype is wide_dtype(dtype, kind)
    assert not bits.is_floating_point()
    assert bits.tolist() == sorted(set(bits.tolist()))
    end = in_order(nans.clone(), kind)
    assert (end > bits.max()).all() if kind is ReduceOp.MAX else (end < bits.min()).all()
    for tensor in (values, nans):
        output = torch.zeros_like(tensor)
        narrow_all(in_order(tensor.clone(), kind), (output,), kind, 2)
        assert torch.equal(output.isnan(), tensor.isnan())
        assert tensor.isnan().all() or torch.equal(bytes_of(output), bytes_of(tensor))


@pytest.mark.parametrize("n", [1, 7, 1 << 15, (1 << 17) + 3])
def test_it_happens_in_place(n: int) -> None:
    values = torch.randn(n)
    bits = in_order(values, ReduceOp.MIN)
    assert bits.data_ptr() == values.data_ptr()
    before = torch.randn(0)
    assert in_order(before, ReduceOp.MIN).numel() == 0
    narrow_all(bits, (values,), ReduceOp.MIN, 2)
    assert torch.isfinite(values).all()


def test_what_is_no_float_stays_as_it_is() -> None:
    integers, floats = torch.arange(3), torch.ones(3)
    assert in_order(integers, ReduceOp.MAX) is integers
    assert in_order(floats, ReduceOp.SUM) is floats
    assert not is_native(torch.float32, ReduceOp.MAX)
    assert is_native(torch.int32, ReduceOp.MAX)
    assert wide_dtype(torch.bfloat16, ReduceOp.MIN) is torch.int32


def test_in_inference_mode_and_back_without() -> None:
    with torch.inference_mode():
        values = torch.tensor([1.0, math.nan, -2.0])
    bits = in_order(values, ReduceOp.MAX)
    narrow_all(bits, (values,), ReduceOp.MAX, 2)
    assert values[::2].tolist() == [1, -2]
    assert values[1].isnan()


@pytest.mark.ranks(some([3, 2], 1), backend="gloo")
@pytest.mark.parametrize(
    ("dtype", "n"),
    some(
        list(
            itertools.product(
                [torch.float32, torch.float64, torch.float16, torch.bfloat16, *FLOAT8], [9, 1000, 1_500_000]
            )
        ),
        8,
    ),
)
async def test_nan_in_lists_of_tensors(comm: Comm, dtype: torch.dtype, n: int) -> None:
    for kind in (ReduceOp.MIN, ReduceOp.MAX):
        tensors = [torch.full((size,), 1.0 + comm.rank) for size in (n, 5, 0, n // 2)]
        for i, tensor in enumerate(tensors):
            tensor[i :: 3 + comm.rank] = math.nan
        mine = [tensor.to(dtype) for tensor in tensors]
        await comm.all_reduce_coalesced(mine, kind)
        for i, tensor in enumerate(mine):
            place = torch.arange(len(tensor)) - i
            lost = torch.stack([(place >= 0) & (place % (3 + rank) == 0) for rank in range(comm.size)]).any(0)
            assert torch.equal(tensor.float().isnan(), lost)
            assert tensor.float()[~lost].eq(1 if kind is ReduceOp.MIN else comm.size).all()


@pytest.mark.ranks(2, backend="gloo")
async def test_nan_in_every_reduction_of_one_tensor_at_every_length(comm: Comm) -> None:
    """Short tensors travel in frames, long ones by gloo, and reduce_scatter as an all_to_all."""
    for dtype in [torch.float32, torch.float64, torch.float16, torch.bfloat16, *FLOAT8]:
        for kind in (ReduceOp.MIN, ReduceOp.MAX):
            for n in (1, 5, 17, 300, 70_000):
                lost = torch.zeros(n, dtype=torch.bool)
                lost[[0, n // 2, n - 1]] = True
                mine = torch.ones(n)
                if comm.rank == 0:
                    mine[lost] = math.nan
                mine = mine.to(dtype)
                outputs = [
                    await comm.all_reduce(mine.clone(), kind),
                    await comm.reduce_scatter_single(torch.empty(n, dtype=dtype), torch.cat([mine, mine]), kind),
                ]
                reduced = await comm.reduce(mine.clone(), 0, kind)
                for output in [*outputs, *([reduced] if comm.rank == 0 else [])]:
                    assert torch.equal(output.float().isnan(), lost), f"{dtype}, {kind}, {n}"
