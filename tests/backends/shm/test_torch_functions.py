"""The functions of torch that the fast path asks, found and checked."""

from __future__ import annotations

import pytest
import torch

from asynccomm.backends.shm import torch_functions as module
from asynccomm.backends.shm.torch_functions import torch_functions


def test_this_torch_has_them() -> None:
    found = torch_functions()
    assert found is not None
    assert all(found)


def test_a_torch_without_one_of_them_is_not_asked() -> None:
    assert torch_functions(("no_such_function", *module._NAMES[1:])) is None


def test_a_function_that_answers_otherwise_is_not_asked() -> None:
    assert torch_functions((*module._NAMES[:2], "aoti_torch_get_numel")) is None


def test_a_torch_without_the_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, mode: int) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert torch_functions() is None


def test_tensors_of_another_layout_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "_cdata", property(lambda _: 1), raising=False)
    assert torch_functions() is None
