"""What each collective contributes to a slot, and what of it stays alive. Whole collectives: test_collectives.py."""

import gc
import random
from functools import partial

import torch
from torch import Tensor

from asynccomm import ops
from asynccomm.backends.shm.lowering import extent, has_program, lowered
from asynccomm.backends.shm.programs import Space, room_per_reader
from asynccomm.backends.shm.schedule import in_place
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.cases import cases
from tests.sampling import exhaustive

from .calls import DTYPES, KINDS, legal, make, values
from .world import each_executor, executors, submission  # noqa: F401

REDUCTIONS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PREMUL_SUM(2)]


@cases("kind", KINDS)
@cases("size", [1, 3])
def test_a_part_keeps_to_its_place(kind: str, size: int) -> None:
    """A part fills the bytes that ``extent`` gives for the operation, whatever this rank's own tensors."""
    choose = random.Random(1)
    dtypes = [*DTYPES, torch.uint16, torch.float16]  # not all of those of one size move in ways of their own
    usual = [torch.float32, torch.int8, torch.bfloat16, torch.bool, torch.complex64, torch.uint16]
    for dtype in dtypes if exhaustive() else usual:
        for op in REDUCTIONS if "reduce" in kind or exhaustive() else REDUCTIONS[:1]:  # the others have none
            if not legal(op, dtype):
                continue
            world = executors(size, chunk=16384)
            for executor in world:
                board = executor.board
                group = CommInfo("t", board.rank, size, torch.device("cpu"))
                new = partial(values, dtype=dtype, strided=False, choose=choose)
                call = make(kind, group, 200, 0, op, new)  # too large for a record
                if not has_program(call.op) or not call.op.sizes_known:
                    return
                nbytes, split = extent(call.op, size)
                slot = board.elements(Space.SLOT, torch.uint8, 0, board.rank, 0, board.chunk).fill_(77)
                made = lowered(executor, submission(call, 0), board.chunk)
                board.begin(0, call.op, 1)
                next(executor.run(made.compiled, 0, made.operands, made.reductions), None)
                room = room_per_reader(board.chunk, size) if split else board.chunk
                taken = slot[: room * (size if split else 1)]
                assert slot[len(taken) :].eq(77).all()
                for share in taken.split(room):
                    assert share[nbytes:].eq(77).all()
                if kind in ("all_reduce", "reduce", "all_gather", "all_gather_single", "gather"):
                    assert taken[:nbytes].ne(77).any()


def tensors_of(n: int) -> list[Tensor]:
    """Not plain, so that copies are made for each."""
    return [torch.arange(2.0 * n).view(n, 2)[:, 0] for _ in range(2)]


@cases("kind", ["all_reduce", "broadcast", "scatter", "reduce_scatter", "all_gather"])
def test_a_part_keeps_the_memory_it_uses(kind: str) -> None:
    n = 100_000
    (executor,) = executors(1, chunk=1 << 20)
    board = executor.board
    group = CommInfo("t", 0, 1, torch.device("cpu"))
    source, out = tensors_of(n)
    call = {
        "all_reduce": lambda: ops.AllReduce.of(group, source, ReduceOp.SUM, out),
        "broadcast": lambda: ops.Broadcast.of(group, source, 0),
        "scatter": lambda: ops.Scatter.of(group, out, [source], 0),
        "reduce_scatter": lambda: ops.ReduceScatter.of(group, out, [source], ReduceOp.SUM),
        "all_gather": lambda: ops.AllGather.of(group, [out], source),
    }[kind]()
    given = submission(call, 0)
    made = lowered(executor, given, board.chunk)
    gc.collect()
    others = [torch.full((n,), -1.0) for _ in range(4)]  # would get memory that was given back
    board.begin(0, call.op, 1)
    assert list(executor.run(made.compiled, 0, made.operands, made.reductions)) == []
    for land in made.lands:
        land()
    assert torch.equal(source if kind == "broadcast" else out, torch.arange(0, 2.0 * n, 2))
    if kind == "broadcast":
        assert torch.equal(board.elements(Space.SLOT, torch.float32, 0, 0, 0, 4 * n), source)
    assert len(others) == 4


def test_plain_tensors_are_reduced_in_place() -> None:
    (executor,) = executors(1)
    group = CommInfo("t", 0, 1, torch.device("cpu"))

    def of(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, out: Tensor | None = None) -> Tensor | None:
        found = in_place(executor.board, submission(ops.AllReduce.of(group, tensor, op, out), 0))
        return None if found is None else found[0]

    for tensor in (torch.ones(3), torch.ones(2, 3), torch.ones(()), torch.ones(4, dtype=torch.float16), torch.ones(0)):
        found = of(tensor)
        assert found is not None
        assert (found.data_ptr(), found.shape) == (tensor.data_ptr(), (tensor.numel(),))
    assert of(torch.ones(3), out=torch.ones(3)) is None
    assert of(torch.ones(3, 2)[:, 0]) is None
    assert of(torch.ones(3, dtype=torch.complex64)) is None
    assert of(torch.ones(3, dtype=torch.bool)) is None
    assert of(torch.ones(3), ReduceOp.PREMUL_SUM(2.0)) is None
    assert of(torch.ones(3, dtype=torch.int8), ReduceOp.AVG) is None
    with torch.inference_mode():
        inference = torch.ones(3)
    assert of(inference) is None
