"""The arguments of dispatch and combine, and sums of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asynccomm.ops.experts import combine, dispatch, sum_rows
from asynccomm.ops.routing import Routing
from asynccomm.testing import loopback_world
from tests.cases import cases
from tests.comm.methods.argument_matrix import GROUP, t

IDS = torch.zeros(2, 1, dtype=torch.long)


@cases(
    "arguments, error, text",
    [
        ((None, None, (), None), TypeError, r"hidden must be a torch.Tensor, got None"),
        ((t(), None, (), None), ValueError, r"hidden must have a row \(of dim 0\) for each token, got a scalar"),
        ((t(2, 3), None, t(2), None), TypeError, r"extras must be a list or tuple of tensors, got Tensor"),
        ((t(2, 3), None, [t(2), 7], None), TypeError, r"extras\[1\] must be a torch.Tensor, got 7"),
        ((t(2, 3), None, [t(3)], None), ValueError, r"extras\[0\] must have a row for each of the 2 tokens, .*\(3,\)"),
        ((t(2, 3), None, [t()], None), ValueError, r"extras\[0\] must have a row for each of the 2 tokens"),
        ((t(2, 3), Routing(IDS, 4), (), [2, 2, 2]), ValueError, r"sizes must be None with a routing.* got \[2, 2, 2\]"),
        ((t(2, 3), None, (), [2, 2]), ValueError, r"sizes must have one number for each of the 3 ranks, got 2"),
        ((t(2, 3), None, (), [1, 1, 1]), ValueError, r"sizes\[1\] must be this rank's extent .* 2, got 1"),
        ((t(2, 3).to("meta"), None, (), None), ValueError, r"hidden is on meta, but comm"),
    ],
)
def test_dispatch_is_checked(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        dispatch(GROUP, *arguments)


async def test_combine_is_checked() -> None:
    async with loopback_world(1) as (comm,):
        sent = await comm.dispatch(t(2, 3), Routing(torch.tensor([[0, 1], [1, -1]]), 2))
        group = comm._group
        for rows, handle, error, text in [
            (t(3, 3), None, TypeError, r"sent must be the result of dispatch\(\), got None"),
            (None, sent, TypeError, r"rows must be a torch.Tensor, got None"),
            (t(3, 3).int(), sent, TypeError, r"rows must be floating-point or complex, got torch.int32"),
            (t(2, 3), sent, ValueError, r"rows must have one row for each of the 3 of sent.hidden, got \(2, 3\)"),
            (t(3, 3).to(torch.float8_e8m0fnu), sent, ValueError, r"op SUM cannot reduce torch.float8_e8m0fnu"),
            (t(), sent, ValueError, r"rows must have one row for each of the 3"),
        ]:
            with pytest.raises(error, match=text):
                combine(group, rows, handle)
        async with comm.dup() as other:
            with pytest.raises(
                ValueError, match=r"sent was dispatched on another comm, 'test', not on this one, 'test"
            ):
                other.combine(t(3, 3), sent)
        assert comm.statistics().submitted == 1, "nothing of that was sent"


@cases("dtype, count", [(torch.bfloat16, 4096), (torch.float8_e4m3fn, 256), (torch.float8_e5m2, 4096)])
def test_narrow_dtypes_are_summed_in_float32(dtype: torch.dtype, count: int) -> None:
    rows = torch.full((count, 1), 1.0).to(dtype)
    total = sum_rows(rows, torch.zeros(count, dtype=torch.long), 2)
    assert total.dtype == dtype
    assert total.float().tolist() == [[count], [0]]


def test_weights_may_be_wider_or_narrower_than_rows() -> None:
    index = torch.tensor([1, 1])
    for rows_dtype in (torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64, torch.complex64):
        for weights_dtype in (torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64):
            rows, weights = torch.ones(2, 2, 2).to(rows_dtype), torch.tensor([0.25, 2]).to(weights_dtype)
            total = sum_rows(rows, index, 2, weights)
            assert total.dtype == rows_dtype
            assert total.to(torch.complex64).equal(torch.tensor([0j, 2.25]).view(2, 1, 1).expand(2, 2, 2))
