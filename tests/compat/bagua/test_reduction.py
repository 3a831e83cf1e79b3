"""Bagua's reductions by their numbers."""

from __future__ import annotations

import pytest

from asynccomm import ReduceOp as Ours
from asynccomm.compat.bagua import ReduceOp
from asynccomm.compat.bagua.reduction import reduction


def test_numbers_are_baguas_and_mean_the_same_names() -> None:
    numbers = {"SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BOR": 7, "BAND": 8, "BXOR": 9, "AVG": 10}
    assert {op.name: op.value for op in ReduceOp} == numbers
    for op in ReduceOp:
        assert reduction(op) is reduction(int(op)) is getattr(Ours, op.name)
    assert reduction(Ours.MAX) is Ours.MAX
    with pytest.raises(ValueError, match=r"op must be one of 0 \(SUM\), .*, got 4"):
        reduction(4)
    with pytest.raises(TypeError, match="op must be one of"):
        reduction(True)
