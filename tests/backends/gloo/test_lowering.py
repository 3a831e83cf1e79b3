"""What becomes of an operation before gloo sees it, and after. With a gloo that only takes notes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import Comm, ReduceOp
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.lowering import OUT_OF_PLACE, start
from asynccomm.backends.gloo.reduction import is_native
from asynccomm.backends.gloo.staging import movable, place
from asynccomm.backends.hazards import separated
from asynccomm.backends.regions import bytes_of
from asynccomm.ops import AllReduce, AllToAll, AllToAllSingle, Broadcast, Call, Reduce, ReduceScatterSingle
from asynccomm.ops.validation import CommInfo
from asynccomm.testing.conformance.data import DTYPES, reduced, sample, sentinel, strided
from tests.sampling import exhaustive, some

GROUP = CommInfo("test", 0, 2, torch.device("cpu"))


class Notes:
    """Takes what Gloo takes; keeps the tensors it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def is_native(self, dtype: torch.dtype, reduction: ReduceOp) -> bool:
        return is_native(dtype, reduction)

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
    buffers = separated(Submission(call, None), 0, OUT_OF_PLACE)  # type: ignore[arg-type]
    _, finish = start(notes, call.op, buffers, 2)
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
    assert sent.data_ptr() == source.data_ptr()
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


def test_an_output_of_its_own_is_reduced_in_and_the_input_untouched() -> None:
    tensor, out = torch.ones(3), torch.zeros(3)
    notes, finish = begin(AllReduce.of(GROUP, tensor, ReduceOp.SUM, out))
    assert notes.tensor().data_ptr() == out.data_ptr()
    assert finish is None
    notes.tensor().fill_(8)
    assert out.tolist() == [8, 8, 8]
    assert tensor.tolist() == [1, 1, 1]


@pytest.mark.parametrize("start", [0, 1])
def test_an_output_that_lies_across_the_input_takes_a_copy_of_it(start: int) -> None:
    memory = torch.arange(5.0)
    notes, finish = begin(AllReduce.of(GROUP, memory[1 - start : 4 - start], ReduceOp.SUM, memory[start : 3 + start]))
    assert notes.tensor().tolist() == [1.0 - start, 2 - start, 3 - start]
    assert finish is None
    assert memory[start : 3 + start].tolist() == [1.0 - start, 2 - start, 3 - start]


def test_parts_that_lie_side_by_side_are_exchanged_as_they_are() -> None:
    source, target = torch.arange(6.0), torch.zeros(5)
    call = AllToAll.of(GROUP, [target[:2], target[2:]], [source[:2], source[2:]])
    notes, finish = begin(call)
    _, (received, sent, receives, sends) = notes.calls[-1]
    assert received.data_ptr() == target.data_ptr()
    assert sent.data_ptr() == source.data_ptr()
    assert (list(receives), list(sends)) == ([8, 12], [8, 16])
    assert finish is None


# -- and with a real one -----------------------------------------------------------------------------------------------

RANKS = pytest.mark.ranks(some([3, 1, 2, 4], 1), backend="gloo")


async def run(comm: Comm, call: Call) -> Any:
    return await comm._submit(call, None, None)


@RANKS
async def test_reductions_with_an_output_of_their_own(comm: Comm) -> None:
    for dtype in DTYPES:
        for shape in ((3, 4), (0,), (300_000,)):
            if len(shape) == 1 and dtype not in (torch.float32, torch.bfloat16) and (shape[0] or not exhaustive()):
                continue
            for layout in range(4):
                mine = sample(comm.rank, shape, dtype)
                source = strided(mine) if layout % 2 else mine.clone()
                for kind in (ReduceOp.SUM, ReduceOp.MAX):
                    try:
                        kind.check(dtype)
                    except (TypeError, ValueError):
                        continue
                    expected = reduced([sample(r, shape, dtype) for r in range(comm.size)], kind)
                    for root in (None, comm.size - 1):
                        out = strided(sentinel(shape, dtype)) if layout > 1 else sentinel(shape, dtype)
                        if root is None:
                            assert await run(comm, AllReduce.of(comm._group, source, kind, out)) is out
                        else:
                            here = comm.rank == root
                            await run(comm, Reduce.of(comm._group, source, root, kind, out if here else None))
                        if root in (None, comm.rank):
                            assert torch.equal(bytes_of(out), bytes_of(expected))
                        assert torch.equal(bytes_of(source), bytes_of(mine))


@RANKS
async def test_all_to_all_of_any_numbers(comm: Comm) -> None:
    def count(source: int, target: int) -> int:
        return [0, 5, 1, 300_000, 7][(source + 2 * target) % 5]

    for dtype in DTYPES if comm.size < 4 else (torch.float32, torch.bool):
        for gaps in (False, True):
            inputs = [sample(comm.rank, (count(comm.rank, r),), dtype, salt=r) for r in range(comm.size)]
            outputs = [sentinel((count(r, comm.rank),), dtype) for r in range(comm.size)]
            if gaps:
                inputs, outputs = [strided(t) for t in inputs], [strided(t) for t in outputs]
            assert await run(comm, AllToAll.of(comm._group, outputs, inputs)) is outputs
            for r, output in enumerate(outputs):
                wanted = sample(r, output.shape, dtype, salt=comm.rank)
                assert torch.equal(bytes_of(output), bytes_of(wanted))


@RANKS
async def test_all_to_all_in_place(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    counts = [[(s + r) % 3 * 1000 for r in range(size)] for s in range(size)]  # the same in both directions
    whole = torch.cat([sample(rank, (n,), salt=r) for r, n in enumerate(counts[rank])])
    parts = list(whole.split(counts[rank]))
    await run(comm, AllToAll.of(comm._group, parts, parts))
    assert torch.equal(whole, torch.cat([sample(s, (counts[s][rank],), salt=rank) for s in range(size)]))
