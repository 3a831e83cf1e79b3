"""What becomes of an operation before gloo sees it, and after. With a gloo that only takes notes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import ReduceOp
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.lowering import movable, place, start
from asynccomm.checks import Group
from asynccomm.ops import AllReduce, AllToAllSingle, Broadcast, Call, Reduce, ReduceScatterSingle

GROUP = Group("test", 0, 2, torch.device("cpu"))


class Notes:
    """Takes what Gloo takes; keeps the tensors it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **_: Any) -> None:
            self.calls.append((name, arguments))

        return call

    def tensor(self) -> Tensor:
        found = self.calls[-1][1][0]
        assert isinstance(found, Tensor)
        return found


def begin(call: Call) -> tuple[Notes, Any]:
    notes = Notes()
    _, finish = start(notes, Submission(call, None), 2)  # type: ignore[arg-type]
    return notes, finish


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.int32, torch.int64])
def test_what_gloo_can_add_is_added_in_place(dtype: torch.dtype) -> None:
    tensor = torch.ones(4, 3, dtype=dtype)
    notes, _ = begin(AllReduce.of(GROUP, tensor, ReduceOp.SUM))
    assert notes.tensor().data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int16, torch.int32),
        (torch.uint16, torch.int32),
        (torch.uint32, torch.int64),
    ],
)
def test_what_it_cannot_or_should_not_is_widened(dtype: torch.dtype, wire: torch.dtype) -> None:
    tensor = torch.ones(4, dtype=dtype)
    notes, finish = begin(AllReduce.of(GROUP, tensor, ReduceOp.SUM))
    assert notes.tensor().dtype == wire
    notes.tensor().fill_(7)
    assert tensor.tolist() == [1] * 4
    finish()
    assert tensor.tolist() == [7] * 4
    assert tensor.dtype == dtype


def test_complex_numbers_travel_as_pairs_in_their_own_memory() -> None:
    tensor = torch.ones(3, dtype=torch.complex64)
    notes, _ = begin(AllReduce.of(GROUP, tensor, ReduceOp.SUM))
    assert notes.tensor().dtype == torch.float32
    assert notes.tensor().numel() == 6
    assert notes.tensor().data_ptr() == tensor.data_ptr()


def test_strided_tensors_are_staged_and_copied_back() -> None:
    tensor = torch.ones(4, 6)[:, ::2]
    notes, finish = begin(AllReduce.of(GROUP, tensor, ReduceOp.SUM))
    assert notes.tensor().data_ptr() != tensor.data_ptr()
    notes.tensor().fill_(5)
    finish()
    assert tensor.eq(5).all()


def test_avg_divides_afterwards_and_premul_multiplies_before() -> None:
    tensor = torch.full((2,), 10.0)
    _, finish = begin(AllReduce.of(GROUP, tensor, ReduceOp.AVG))
    finish()
    assert tensor.tolist() == [5, 5]
    notes, _ = begin(AllReduce.of(GROUP, tensor, ReduceOp.PREMUL_SUM(3)))
    assert notes.tensor().tolist() == [15, 15]
    assert tensor.tolist() == [5, 5], "only the result may be written"


def test_reduce_keeps_gloo_off_the_tensors_of_other_ranks() -> None:
    tensor = torch.ones(3)
    notes, finish = begin(Reduce.of(GROUP, tensor, 1, ReduceOp.SUM))  # the root is elsewhere
    notes.tensor().fill_(-1)
    assert finish is None
    assert tensor.tolist() == [1, 1, 1]


def test_reduce_scatter_is_an_exchange_and_a_sum_in_rank_order() -> None:
    source = torch.arange(4, dtype=torch.bfloat16)
    output = torch.zeros(2, dtype=torch.bfloat16)
    notes, finish = begin(ReduceScatterSingle.of(GROUP, output, source, ReduceOp.SUM))
    name, (received, sent) = notes.calls[-1]
    assert name == "all_to_all_single"
    assert sent.numel() == 8, "halves must travel as halves"
    received.view(torch.bfloat16).copy_(torch.tensor([1, 2, 10, 20]))
    finish()
    assert output.tolist() == [11, 22]
    assert source.tolist() == [0, 1, 2, 3]


def test_moved_tensors_travel_as_bytes() -> None:
    tensor = torch.ones(3, dtype=torch.float8_e4m3fn)
    notes, _ = begin(Broadcast.of(GROUP, tensor, 0))
    assert notes.tensor().dtype == torch.uint8
    assert notes.tensor().data_ptr() == tensor.data_ptr()


def test_exchange_in_place_sends_a_copy() -> None:
    tensor = torch.arange(4.0)
    notes, _ = begin(AllToAllSingle.of(GROUP, tensor, tensor))
    _, (received, sent) = notes.calls[-1]
    assert received.data_ptr() == tensor.data_ptr()
    assert sent.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3)])
def test_bytes_of_any_shape(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    assert movable(tensor).shape == (tensor.numel(),)
    assert movable(tensor.bool()).dtype == torch.uint8
    data, finish = place(tensor)
    assert data.shape == (tensor.numel(),)
    assert finish is None


def test_single_elements_with_odd_strides() -> None:
    tensor = torch.ones(1, 4)[:, 1:2].expand(1, 1)
    assert movable(tensor.half()).shape == (2,)
    data, _ = place(torch.ones(1, 4)[:, 1:2].half())
    assert data.shape == (2,)
