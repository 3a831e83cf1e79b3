"""The choice of the executor."""

import builtins
import sys
from typing import Any

import pytest

from asynccomm.backends.shm.native import CoreUnavailable, load_core


def test_the_environment_chooses_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "reference")
    assert load_core() == CoreUnavailable("ASYNCCOMM_EXECUTOR=reference")
    monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "C")
    with pytest.raises(ValueError, match="ASYNCCOMM_EXECUTOR must be 'core' or 'reference', got 'C'"):
        load_core()


def test_a_missing_module_is_named_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if rest[2] and "_core" in rest[2]:
            raise ImportError("no _core here")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.delenv("ASYNCCOMM_EXECUTOR", raising=False)
    assert load_core() == CoreUnavailable("it was not built when the package was installed (no _core here)")
    monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "core")
    with pytest.raises(ImportError, match="no _core here"):
        load_core()


def test_no_torch_is_imported() -> None:
    module = sys.modules["asynccomm.backends.shm.native"]
    assert not hasattr(module, "torch")
