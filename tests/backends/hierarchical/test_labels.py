"""Labels are equal exactly if the calls fit each other, and lead back to the call."""

from typing import Any

import pytest
import torch

from asynccomm.backends.base import Submission
from asynccomm.backends.hierarchical import labels
from asynccomm.backends.hierarchical.labels import call_behind, label_of
from asynccomm.ops import AllReduce, Barrier, Broadcast, Call, Parcels
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo

GROUP = CommInfo("test", 0, 2, torch.device("cpu"))
FOUR = torch.ones(4)


class Numbered:
    seq = 3


def submission(call: Call, **fields: Any) -> Submission:
    found = Submission(call, Numbered())  # type: ignore[arg-type]
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def all_reduce(op: ReduceOp = ReduceOp.SUM, tensor: torch.Tensor = FOUR) -> Submission:
    return submission(AllReduce.of(GROUP, tensor, op))


def test_each_rank_has_a_factor_of_its_own() -> None:
    assert label_of(all_reduce(ReduceOp.PREMUL_SUM(2.0))) == label_of(all_reduce(ReduceOp.PREMUL_SUM(3.0)))


def test_different_calls_have_different_labels() -> None:
    found = [
        all_reduce(),
        all_reduce(ReduceOp.AVG),
        all_reduce(tensor=FOUR.half()),  # which travels as floats
        all_reduce(tensor=torch.ones(5)),
        submission(AllReduce.of(GROUP, FOUR, ReduceOp.SUM).labelled("tag")),
        submission(AllReduce.of(GROUP, FOUR, ReduceOp.SUM), members=(AllReduce, AllReduce), numbers=(3, 5)),
        submission(AllReduce.of_several(GROUP, [FOUR[:1], FOUR[1:]], ReduceOp.SUM)),
        submission(AllReduce.of_several(GROUP, [FOUR[:2], FOUR[2:]], ReduceOp.SUM)),
        submission(Broadcast.of(GROUP, FOUR, 0)),
        submission(Broadcast.of(GROUP, FOUR, 1)),
        submission(Barrier.of(GROUP)),
        submission(Call(Parcels("all_gather_object"), (), (), None)),
        submission(Call(Parcels("broadcast_object"), (), (), None)),
    ]
    assert len({label_of(each) for each in found}) == len(found)


def test_the_call_behind_a_step() -> None:
    step = f"broadcast(float32[4], root=0, tag={label_of(all_reduce())!r})"
    assert call_behind(step) == "all_reduce(float32[4], SUM)"
    assert call_behind("barrier()") == "barrier()"
    assert call_behind(f"barrier(tag='all_reduce #{'0' * 24}')") == "another call"


def test_so_many_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "REMEMBERED", 2)
    for n in range(5):
        label_of(all_reduce(tensor=torch.ones(n)))
    assert len(labels._calls) <= 2
