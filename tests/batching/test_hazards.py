"""Which operations must not be decided in one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import ReduceOp
from asynccomm.backends.base import Submission
from asynccomm.batching.hazards import PendingHazards
from asynccomm.ops import AllGatherSingle, AllReduce, Broadcast, Call
from asynccomm.ops.validation import CommInfo

GROUP = CommInfo("test", 0, 2, torch.device("cpu"))


def submission(call: Call) -> Submission:
    nobody: Any = None
    return Submission(call, nobody)


def reduced(tensor: Tensor, out: Tensor | None = None) -> Submission:
    return submission(AllReduce.of(GROUP, tensor, ReduceOp.SUM, out))


def test_memory_is_in_use_until_it_is_decided() -> None:
    undecided, whole = PendingHazards(), torch.zeros(10)
    first, beside, over = reduced(whole[:5]), reduced(whole[5:]), reduced(whole[4:6])
    assert not undecided.enter([first])
    assert not undecided.enter([beside])
    assert undecided.enter([over])
    undecided.leave([first, over])
    again = reduced(whole[:5])
    assert not undecided.enter([again])
    undecided.leave([beside, again])
    assert not undecided.enter([reduced(whole)])


def test_reading_twice_is_fine() -> None:
    undecided, source = PendingHazards(), torch.zeros(4)
    assert not undecided.enter([reduced(source, torch.zeros(4)), reduced(source, torch.zeros(4))])
    assert undecided.enter([reduced(source)]), "it writes what others read"


def test_what_others_write_counts_as_written() -> None:
    undecided, tensor = PendingHazards(), torch.zeros(4)
    assert not undecided.enter([submission(Broadcast.of(GROUP, tensor, 0))]), "this is the root"
    assert undecided.enter([submission(AllGatherSingle.of(GROUP, torch.zeros(8), tensor))])


def test_within_one_call() -> None:
    tensor = torch.zeros(4)
    assert PendingHazards().enter([reduced(tensor), reduced(tensor)])


def test_only_what_entered_leaves() -> None:
    with pytest.raises(KeyError):
        PendingHazards().leave([reduced(torch.zeros(1))])
