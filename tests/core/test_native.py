"""The choice of the executor."""

import sys
from typing import Any

import pytest

from asynccomm.core import native
from asynccomm.core.native import CoreUnavailable, load_core


def test_the_environment_chooses_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "reference")
    assert load_core() == CoreUnavailable("ASYNCCOMM_EXECUTOR=reference")
    monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "C")
    with pytest.raises(ValueError, match="ASYNCCOMM_EXECUTOR must be 'core' or 'reference', got 'C'"):
        load_core()


def test_a_missing_module_is_named_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError("no C here")

    monkeypatch.setattr(native.importlib, "import_module", missing)
    monkeypatch.delenv("ASYNCCOMM_EXECUTOR", raising=False)
    assert load_core() == CoreUnavailable("it was not built when the package was installed (no C here)")
    monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "core")
    with pytest.raises(ImportError, match="no C here"):
        load_core()


def test_no_torch_is_imported() -> None:
    module = sys.modules["asynccomm.core.native"]
    assert not hasattr(module, "torch")
