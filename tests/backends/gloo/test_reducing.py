"""What goes before and after a reduction."""

import pytest
import torch

from asynccomm import ReduceOp
from asynccomm.backends.gloo.reducing import (
    as_it_is,
    brought,
    fill_rows,
    narrow_all,
    row_bytes,
    rows_of,
    sum_up,
    wide_dtype,
    widen_all,
    widened_bytes,
)
from asynccomm.backends.gloo.staging import room
from asynccomm.backends.regions import bytes_of
from asynccomm.testing.conformance.data import DTYPES, sample, sentinel, strided

PREMUL = ReduceOp.PREMUL_SUM(3)


def test_what_gloo_can_do_alone() -> None:
    assert as_it_is(torch.float32, ReduceOp.SUM)
    assert not as_it_is(torch.float32, ReduceOp.AVG)
    assert not as_it_is(torch.float32, PREMUL)
    assert not as_it_is(torch.bfloat16, ReduceOp.SUM)


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


@pytest.mark.parametrize("kind", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, PREMUL], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
    fill_rows(again, ranks[0], kind)
    assert torch.equal(again, rows[0])
    outputs = [torch.zeros(3, dtype=dtype), strided(torch.zeros(2, 2, dtype=dtype))]
    sum_up(torch.cat(rows), outputs, kind, 3)
    factor = 3 if kind is PREMUL else 1
    for i, output in enumerate(outputs):
        expected = sum(tensors[i].to(torch.complex64) for tensors in ranks) * factor
        assert torch.equal(output.to(torch.complex64), expected)


def test_rows_that_lie_side_by_side_are_not_copied() -> None:
    source = torch.arange(6, dtype=torch.bfloat16)
    assert rows_of(source.split(2), ReduceOp.SUM).data_ptr() == source.data_ptr()
    assert rows_of([source], ReduceOp.SUM).data_ptr() == source.data_ptr()
