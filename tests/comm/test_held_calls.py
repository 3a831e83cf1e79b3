"""Submissions made of calls that a fast path holds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm.comm.held_calls import checked_call, submission_of
from asynccomm.ops import AllReduce, Barrier, Call, Several
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo

GROUP = CommInfo("test", 0, 2, torch.device("cpu"))


def held(*tensors: Tensor) -> Any:
    """An all_reduce of each tensor, as the fast path holds a call."""
    places = [(t.untyped_storage(), t.storage_offset(), t.data_ptr(), t.shape, t.dtype) for t in tensors]

    def check(group: CommInfo, several: tuple[Tensor, ...], op: ReduceOp) -> Call:
        return AllReduce.of_several(group, several, op)

    return SimpleNamespace(arguments=(check, tuple(tensors), ReduceOp.SUM), places=places, work="the Work")


def test_checked_call() -> None:
    barrier = Barrier.of(GROUP)
    assert checked_call(GROUP, [lambda group: barrier]) is barrier
    assert checked_call(GROUP, [lambda group, *rest: Several([barrier], rest), 1, 2]) is barrier


def test_the_submission_has_the_tensors_and_the_work() -> None:
    tensors = torch.ones(2), torch.ones(3)
    submission = submission_of(GROUP, held(*tensors), "context")
    assert [t.data_ptr() for t in submission.inputs] == [t.data_ptr() for t in tensors]
    assert (submission.work, submission.call_context) == ("the Work", "context")


@pytest.mark.parametrize("change", ["set", "resize", "shape", "strides", "dtype"])
def test_a_tensor_that_has_changed_is_replaced_by_the_one_of_the_call(change: str) -> None:
    tensor = torch.arange(12.0)[2:8].view(2, 3)
    address = tensor.data_ptr()
    call = held(tensor)
    match change:
        case "set":
            tensor.set_(torch.zeros(2, 3))  # type: ignore[call-overload]
        case "resize":
            tensor.resize_(3, 1)
        case "shape":
            tensor.unsqueeze_(0)
        case "strides":
            tensor.as_strided_((2, 3), (1, 2))
        case _:
            tensor.data = tensor.data.view(torch.int32)
    (found,) = submission_of(GROUP, call, None).inputs
    assert (found.data_ptr(), found.tolist()) == (address, [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]])
    assert found is not tensor


def test_memory_that_was_freed() -> None:
    tensor = torch.arange(12.0)
    call = held(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"tensor \(shape \(12,\), torch.float32\) was freed between its call and"):
        submission_of(GROUP, call, None)
