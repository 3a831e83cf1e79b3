"""The functions of torch that the fast path asks, found and checked."""

from __future__ import annotations

import pytest
import torch

from asynccomm.backends.shm import torch_functions as module
from asynccomm.backends.shm.torch_functions import NAMES, found, torch_functions
from asynccomm.ops.dtypes import CODES


def test_this_torch_has_them() -> None:
    functions = torch_functions()
    assert functions is not None
    plain = [dtype for dtype in CODES if not dtype.is_complex and not str(dtype).startswith("torch.q")]
    assert sorted(size for size in functions.item_bytes if size) == sorted(dtype.itemsize for dtype in plain)


@pytest.mark.parametrize("field", NAMES)
def test_a_torch_without_one_of_them_is_not_asked(field: str) -> None:
    assert found({**NAMES, field: "no_such_function"}) is None


@pytest.mark.parametrize("field", sorted({*NAMES} - {"is_negated", "dtype"}))
def test_a_function_that_answers_otherwise_is_not_asked(field: str) -> None:
    others = {"device_type": "dtype", "layout": "dtype", "shape": "strides", "strides": "shape"}
    other = NAMES[others[field]] if field in others else "aoti_torch_get_numel"
    assert found({**NAMES, field: other}) is None


def test_a_torch_without_the_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, mode: int) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert found(NAMES) is None


def test_tensors_of_another_layout_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "_cdata", property(lambda _: 1), raising=False)
    assert found(NAMES) is None
