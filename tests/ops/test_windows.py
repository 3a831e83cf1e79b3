"""The operations on windows: their texts and their positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm import SignalCmpOp
from asynccomm.ops import (
    MakeWindow,
    WindowAccumulate,
    WindowFence,
    WindowGet,
    WindowInfo,
    WindowPut,
    WindowSignal,
    WindowWait,
)
from asynccomm.ops.validation import CommInfo

INFO = WindowInfo(CommInfo("c", 0, 3, torch.device("cpu")), 4, (16, 0, 64), 8)


def test_errors_and_diagnoses_show_the_operation_as_a_call() -> None:
    tensor = torch.zeros(2, 3)
    ops = [
        WindowPut.of(INFO, tensor, 2, 1).op,
        WindowGet.of(INFO, tensor, 2, 1).op,
        WindowAccumulate.of(INFO, tensor, 2, 1).op,
        WindowSignal.of(INFO, 1, 2, 3, False).op,
        WindowSignal.of(INFO, 1, 2, 3, True).op,
        WindowWait.of(INFO, 5, 1, SignalCmpOp.LE).op,
        WindowFence.of(INFO, None).op,
        WindowFence.of(INFO, 1).op,
        MakeWindow(4, None),
    ]
    assert [str(op) for op in ops] == [
        "put(float32[6], rank=2, offset=1, window=4)",
        "get(float32[6], rank=2, offset=1, window=4)",
        "accumulate(float32[6], rank=2, offset=1, window=4)",
        "signal(rank=1, slot=2, value=3, window=4)",
        "signal(rank=1, slot=2, add=3, window=4)",
        "wait_signal(slot=5 <= 1, window=4)",
        "fence(all ranks, window=4)",
        "fence(rank=1, window=4)",
        "window(window=4)",
    ]
    assert all(op.p2p for op in ops)
    assert [op.kind for op in ops if op.open_ended] == ["wait_signal"]


@given(
    rank=st.integers(0, 2),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.complex128]),
    numel=st.integers(0, 80),
    offset=st.integers(-70, 80),
)
def test_a_position_is_accepted_exactly_if_it_lies_in_the_memory(
    rank: int, dtype: torch.dtype, numel: int, offset: int
) -> None:
    fits = offset >= 0 and (offset + numel) * dtype.itemsize <= INFO.sizes[rank]
    tensor = torch.zeros(numel, dtype=dtype)
    if fits:
        op = WindowPut.of(INFO, tensor, rank, offset).op
        assert isinstance(op, WindowPut)
        assert (op.start, op.nbytes) == (offset * dtype.itemsize, numel * dtype.itemsize)
    else:
        with pytest.raises(ValueError, match=rf"offset .* window 4 has {INFO.sizes[rank]} bytes on rank {rank}"):
            WindowPut.of(INFO, tensor, rank, offset)


def test_accumulate_takes_only_dtypes_that_have_a_sum() -> None:
    dtype = getattr(torch, "float8_e8m0fnu", None)
    if dtype is None:
        pytest.skip("this torch lacks the dtype")
    with pytest.raises(ValueError, match="cannot reduce"):
        WindowAccumulate.of(INFO, torch.zeros(1, dtype=torch.uint8).view(dtype), 0, 0)
