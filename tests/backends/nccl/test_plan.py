"""What is noted of a batch: calls and steps, and whose they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asynccomm.backends.nccl.plan import Capabilities, LoweredBatch
from asynccomm.ops import AllReduce, Barrier
from asynccomm.ops.reduce_op import ReduceOp


@pytest.fixture
def plan() -> LoweredBatch:
    def empty(nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    return LoweredBatch(0, 2, Capabilities(frozenset({torch.float32}), frozenset()), empty)


def test_calls_and_steps_tell_whose_they_are(plan: LoweredBatch) -> None:
    ops = [AllReduce(torch.float32, 4, ReduceOp.SUM), Barrier()]
    ran: list[str] = []
    for op in ops:
        plan.op = op
        plan.prepare(lambda op=op: ran.append(f"before {op.kind}"))  # type: ignore[misc]
        plan.call("all_reduce", None, None, 4)
        plan.finish(lambda op=op: ran.append(f"after {op.kind}"))  # type: ignore[misc]
    assert (
        [step.op for step in plan.before] == [call.op for call in plan.calls] == [step.op for step in plan.after] == ops
    )
    for step in [*plan.before, *plan.after]:
        step()
    assert ran == ["before all_reduce", "before barrier", "after all_reduce", "after barrier"]


def test_what_moves_nothing_is_no_call(plan: LoweredBatch) -> None:
    plan.call("broadcast", None, None, 0)
    assert plan.calls == []


def test_strided_memory_is_copied_around_the_calls(plan: LoweredBatch) -> None:
    plan.op = Barrier()
    tensor = torch.arange(6.0).view(3, 2)[:, 0]
    source, target = plan.source(tensor), plan.target(tensor)
    plan.before[0]()
    assert source.view(torch.float32).tolist() == [0, 2, 4]
    target.view(torch.float32).fill_(7)
    plan.after[0]()
    assert tensor.tolist() == [7, 7, 7]
    assert plan.source(tensor[:1]).data_ptr() == tensor.data_ptr(), "plain memory is used as it is"
