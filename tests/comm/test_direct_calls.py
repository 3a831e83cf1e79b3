"""Calls that a fast path begins or holds, on a backend without one. ``tests/backends/shm`` has the fast path itself."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynccomm import Comm, ReduceOp
from asynccomm.comm.direct_calls import SubmitterCalls, fast_path
from asynccomm.comm.submission import Submitter
from asynccomm.ops import AllReduce, Barrier, Call, Gather, Send
from asynccomm.ops.validation import CommInfo
from asynccomm.testing.local import loopback_world

GROUP = CommInfo("test", 0, 2, torch.device("cpu"))


def reduced(n: int, dtype: torch.dtype = torch.float32, op: ReduceOp = ReduceOp.SUM) -> Call:
    return AllReduce.of(GROUP, torch.ones(n, dtype=dtype), op)


def held(tensor: torch.Tensor) -> Any:
    """An all_reduce, as the fast path holds a call."""
    place = tensor.untyped_storage(), 0, tensor.data_ptr(), tensor.shape, tensor.dtype
    return SimpleNamespace(arguments=(AllReduce.of, tensor, ReduceOp.SUM), places=[place])


def submitter_of(comm: Comm) -> Submitter:
    return comm._submitter


@pytest.fixture
async def pair() -> Iterator[tuple[Comm, Comm]]:
    async with loopback_world(2) as comms:
        yield tuple(comms)


async def test_operations_are_of_a_kind_if_they_are_fused(pair: tuple[Comm, Comm]) -> None:
    calls = SubmitterCalls(submitter_of(pair[0]))
    kinds = [calls.fusion_kind(reduced(n).op) for n in (1, 2, 3)]
    other = calls.fusion_kind(reduced(1, torch.float64).op)
    assert kinds == [kinds[0]] * 3
    assert len({kinds[0], other, calls.fusion_kind(reduced(1, op=ReduceOp.MAX).op), 0}) == 4
    assert calls.fusion_kind(Barrier.of(GROUP).op) == 0
    assert calls.fusion_kind(reduced(1 << 20).op) == 0, "too large to gain from being fused"
    assert calls.fusion_kind(Send.of(GROUP, torch.ones(1), 1, 0).op) is None
    assert calls.fusion_kind(Gather.of(GROUP, None, torch.ones(1), 1).op) is None


async def test_several_calls_as_one(pair: tuple[Comm, Comm]) -> None:
    tensors = torch.ones(2), torch.ones(3)
    call, arguments = SubmitterCalls(submitter_of(pair[0])).fused([held(tensor) for tensor in tensors])
    assert str(call.op) == "all_reduce(float32[5] in pieces, SUM)"
    assert [t.data_ptr() for t in call.inputs] == [t.data_ptr() for t in tensors]
    assert [argument for argument in arguments if isinstance(argument, torch.Tensor)] == list(tensors)


async def test_the_one_call_has_the_tensors_as_they_were(pair: tuple[Comm, Comm]) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    calls = [held(tensor) for tensor in tensors]
    address = tensors[1].data_ptr()
    tensors[1].set_(torch.zeros(100))  # type: ignore[call-overload]
    call, arguments = SubmitterCalls(submitter_of(pair[0])).fused(calls)
    assert str(call.op) == "all_reduce(float32[5] in pieces, SUM)"
    assert [t.data_ptr() for t in call.inputs] == [tensors[0].data_ptr(), address]
    assert [t.numel() for t in arguments if isinstance(t, torch.Tensor)] == [2, 3]


async def test_a_call_that_has_begun_is_numbered_and_sent(pair: tuple[Comm, Comm]) -> None:
    one, other = pair
    tensor = torch.ones(2)
    submitter = submitter_of(one)
    seen = []
    backend = submitter.backend
    assert backend is not None
    forward = backend.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "submit", lambda batch: (seen.extend(batch), forward(batch)))
        started = time.monotonic() - 5
        with submitter.lock:
            work = SubmitterCalls(submitter).adopt("a run", (AllReduce.of, tensor, ReduceOp.SUM), tensor, None, started)
    assert [submission.run for submission in seen] == ["a run"]
    assert (work.seq, work.started, one.statistics().submitted) == (0, started, 1)
    theirs = other.all_reduce(torch.ones(2))
    assert await work is tensor
    await theirs
    assert tensor.tolist() == [2, 2]


async def test_a_backend_without_a_fast_path(pair: tuple[Comm, Comm]) -> None:
    assert fast_path(submitter_of(pair[0])) is None
