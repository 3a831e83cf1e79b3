"""Interpreters that the package refuses, before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asynccomm.core.interpreter import check_interpreter

HERE = """
import sys
try:
    import asynccomm
except ImportError as exc:
    print(exc, "torch" in sys.modules, flush=True)
"""


def test_python_without_the_gil_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_interpreter()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    check_interpreter()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False)
    with pytest.raises(ImportError, match="does not support Python without the GIL; set PYTHON_GIL=1"):
        check_interpreter()


@pytest.mark.real_python
def test_a_subinterpreter_is_refused() -> None:
    if sys.version_info >= (3, 13):
        code = f"import _interpreters as i; print(i.exec(i.create(), {HERE!r}))"
    else:
        code = f"import _xxsubinterpreters as i; print(i.run_string(i.create(), {HERE!r}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "asynccomm does not support subinterpreters, as torch does not False\nNone\n"
