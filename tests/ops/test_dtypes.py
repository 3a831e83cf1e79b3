"""Dtypes by name and by number, and complex numbers as pairs of reals."""

from __future__ import annotations

import subprocess
import sys
import warnings
import zlib

import pytest
import torch

from asynccomm.ops.dtypes import BY_CODE, BY_NAME, CODES, COMPLEX, REAL, UNCOPIED, in_reals

DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def test_every_dtype_has_a_name_and_a_code() -> None:
    assert set(BY_NAME.values()) == set(CODES) == set(BY_CODE.values()) == DTYPES
    assert all(str(dtype) == name for name, dtype in BY_NAME.items())
    assert all(BY_CODE[code] == dtype for dtype, code in CODES.items())


def test_codes_are_checksums_of_names() -> None:
    assert dict(CODES) == {dtype: zlib.crc32(str(dtype).encode()) for dtype in CODES}


@pytest.mark.exhaustive
@pytest.mark.real_python
def test_codes_are_equal_in_every_process() -> None:
    code = "from asynccomm.ops.dtypes import CODES; print({str(d): n for d, n in CODES.items()})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == str({str(dtype): n for dtype, n in CODES.items()})
    assert CODES[torch.float32] == zlib.crc32(b"torch.float32")
    assert all(0 <= n < 2**32 for n in CODES.values())


def test_some_dtypes_cannot_be_copied() -> None:
    uncopied = set()
    for dtype in DTYPES - {getattr(torch, "float4_e2m1fn_x2", None)}:  # not by every version of torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # support of bcomplex32 is experimental
            tensor = torch.empty(4, dtype=dtype)
        try:
            tensor.clone()
        except (NotImplementedError, RuntimeError):
            uncopied.add(dtype)
    assert uncopied <= UNCOPIED
    assert {torch.int1, torch.int4, torch.uint7, torch.qint8, torch.quint2x4} <= UNCOPIED
    assert not {torch.int8, torch.uint8, torch.int16, torch.bool} & UNCOPIED


def test_complex_and_real() -> None:
    assert dict(REAL) == {
        torch.complex32: torch.float16,
        torch.complex64: torch.float32,
        torch.complex128: torch.float64,
    }
    assert {pair: real for real, pair in COMPLEX.items()} == REAL


@pytest.mark.parametrize("pair", REAL)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_pairs_of_reals_share_memory(pair: torch.dtype) -> None:
    for number in (
        torch.tensor([[1 + 2j, 3 - 4j]], dtype=pair),
        torch.zeros(4, 3, dtype=pair).t()[::2],
        torch.zeros((), dtype=pair),
        torch.zeros(0, 2, dtype=pair),
        torch.zeros(2, dtype=pair, requires_grad=True),
    ):
        reals = in_reals(number)
        assert (reals.dtype, reals.shape, reals.requires_grad) == (REAL[pair], (*number.shape, 2), False)
        assert reals.data_ptr() == number.data_ptr()
        reals.fill_(7)
        assert number.detach().eq(7 + 7j).all()


def test_negated_views_keep_their_values() -> None:
    number = torch._neg_view(torch.tensor([1 + 2j]))
    assert in_reals(number).tolist() == [[-1, -2]]


def test_conjugated_views_are_to_be_resolved_first() -> None:
    with pytest.raises(RuntimeError, match="resolve_conj"):
        in_reals(torch.tensor([1 + 2j]).conj())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint64])
def test_others_are_left_as_they_are(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    assert in_reals(tensor) is tensor
