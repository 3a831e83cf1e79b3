"""The choice of the executor."""

import sys
import time
from itertools import pairwise
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

    monkeypatch.delitem(sys.modules, "asynccomm.backends.shm._core", raising=False)
    monkeypatch.setattr(native.importlib, "import_module", missing)
    monkeypatch.delenv("ASYNCCOMM_EXECUTOR", raising=False)
    assert load_core() == CoreUnavailable("it was not built when the package was installed (no C here)")
    monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "core")
    with pytest.raises(ImportError, match="no C here"):
        load_core()


def test_the_clock_of_c_is_that_of_python() -> None:
    work = native.load("asynccomm.core._work")
    if isinstance(work, CoreUnavailable):
        pytest.skip(work.reason)
    end, readings = time.monotonic() + 0.2, 0
    while (before := time.monotonic()) < end:
        times = [work.seconds() for _ in range(20)]  # by the kernel's clock, and by the processor's counter
        after = time.monotonic()
        assert before - 2e-6 <= min(times)
        assert max(times) <= after + 2e-6
        assert all(later - earlier > -2e-6 for earlier, later in pairwise(times))
        readings += 20
    assert readings > 1000


def test_no_torch_is_imported() -> None:
    module = sys.modules["asynccomm.core.native"]
    assert not hasattr(module, "torch")
