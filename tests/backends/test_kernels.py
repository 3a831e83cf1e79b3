"""The numbers of the kernels in C."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from asynccomm.backends.kernels import DTYPES, OPERATORS, exact_kernel
from asynccomm.ops.reduce_op import RedOpType

HEADER = Path(__file__).parents[2] / "asynccomm" / "backends" / "_kernels.h"
NAMES = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}


def test_the_numbers_are_those_of_the_header() -> None:
    dtypes, operators = re.findall(r"enum \{ (.*), (?:DTYPES|OPERATORS) \};", HEADER.read_text())
    spelled = [re.sub(r"^[A-Z]+", lambda found: NAMES[found[0]], name) for name in dtypes.split(", ")]
    assert [f"torch.{name}" for name in spelled] == [str(dtype) for dtype in DTYPES]
    assert operators.split(", ") == [
        next(kind.name for kind in OPERATORS if OPERATORS[kind] == number) for number in range(7)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_of_floats_has_no_exact_kernel(dtype: torch.dtype) -> None:
    assert exact_kernel(dtype, RedOpType.MIN) is exact_kernel(torch.complex64, RedOpType.SUM) is None
    assert exact_kernel(dtype, RedOpType.SUM) == (DTYPES.index(dtype), 0)
