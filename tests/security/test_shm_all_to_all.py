"""all_to_all takes what it was promised, no more and no less."""

from __future__ import annotations

import pytest
import torch

from asynccomm import ops
from asynccomm.backends.shm.lowering import start
from asynccomm.backends.shm.programs import Space
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops.validation import CommInfo
from tests.cases import cases

from ..backends.shm.world import each_executor, executors, submission  # noqa: F401, TID252


@cases("header", [(400, 100, 1), (4000, 100, 9), (0, 100, 0), (100, 0, 1), (1, 99, 1)], ids=str)
def test_a_header_that_does_not_fit(header: tuple[int, int, int]) -> None:
    group = CommInfo("test", 0, 2, torch.device("cpu"))
    mine, other = executors(2, chunk=2048)
    theirs = other.board
    guarded = torch.zeros(20_000, dtype=torch.uint8)
    outputs = [torch.zeros(8, dtype=torch.uint8), guarded[5000:5100]]
    inputs = [torch.zeros(n, dtype=torch.uint8) for n in (8, 100)]
    call = ops.AllToAll.of(group, outputs, inputs)
    progress = start(mine, submission(call, 0), 512)
    theirs.begin(0, call.op, 1)
    for step in range(9):
        if step < 4:
            theirs.elements(Space.SLOT, torch.uint8, step, 1, 0, theirs.chunk).fill_(7)
        theirs.put(0, 0, header)
        theirs.post(step)
        theirs.finish(step)
    with pytest.raises(BrokenError):
        for _ in range(30):
            if next(progress, None) is None:
                break
    assert not guarded[:5000].any()
    assert not guarded[5100:].any(), "written beyond the output"


def test_a_stream_of_too_few_steps() -> None:
    group = CommInfo("test", 0, 2, torch.device("cpu"))
    mine, other = executors(2, chunk=2048)
    theirs = other.board
    outputs = [torch.zeros(8, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)]
    call = ops.AllToAll.of(group, outputs, [torch.zeros(8, dtype=torch.uint8)] * 2)
    progress = start(mine, submission(call, 0), 512)
    theirs.begin(0, call.op, 1)
    theirs.put(0, 0, (0, 5000, 1))
    theirs.post(0)
    with pytest.raises(BackendError, match=r"rank 1 announces for .* what cannot be: 5000 bytes in 1 steps"):
        list(progress)
