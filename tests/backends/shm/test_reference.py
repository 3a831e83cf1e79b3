"""The executor in Python: when its generator yields. The programs it runs: test_programs.py."""

import torch

from asynccomm.backends.shm.programs import program, published
from asynccomm.backends.shm.reference import run
from asynccomm.ops import Barrier

from .world import boards

SENT, GOT = torch.arange(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)


def test_it_yields_whether_it_has_moved_and_ends_when_it_is_done() -> None:
    mine, theirs = boards(2, chunk=128, banks=2)
    for board in (mine, theirs):
        board.begin(0, Barrier(), 4)
    giving = run(mine, program(4, published(0, 40, [], 10)), 0, [SENT], ())
    taking = run(theirs, program(4, published(1, None, [(0, 40)], 10)), 0, [GOT], ())
    assert [next(giving) for _ in range(3)] == [True, True, False]  # two banks
    assert [next(taking) for _ in range(3)] == [True, True, True]
    assert list(giving) == [True]
    assert all(taking)
    assert torch.equal(SENT, GOT)
