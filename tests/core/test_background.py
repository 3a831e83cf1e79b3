"""Functions on threads of their own, also while the interpreter ends."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest
import torch

from asynccomm import Comm
from asynccomm.core import background
from asynccomm.core.background import in_background, reserve
from asynccomm.core.per_process import PerProcess

SECONDS = 30.0


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> PerProcess[background._ReservedThreads]:
    made = PerProcess(background._ReservedThreads)
    monkeypatch.setattr(background, "_reserved", made)
    return made


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_a_function_runs_on_a_daemon_thread_of_its_own(reserved: PerProcess[background._ReservedThreads]) -> None:
    threads: list[threading.Thread] = []
    gate = threading.Event()

    def function() -> None:
        threads.append(threading.current_thread())
        gate.wait(SECONDS)

    call = in_background("mine", function)
    assert not call.join(0.01)
    gate.set()
    assert call.join(SECONDS)
    assert [(thread.name, thread.daemon) for thread in threads] == [("mine", True)]
    assert reserved.made is None


def test_functions_run_on_reserved_threads_where_none_can_be_started(
    reserved: PerProcess[background._ReservedThreads], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserve()
    reserve()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    ran: list[tuple[str, int]] = []

    def fails() -> None:
        raise OSError("no device")

    calls = [in_background("x", fails)]
    for number in range(3):
        calls.append(in_background("x", lambda number=number: ran.append((threading.current_thread().name, number))))  # type: ignore[misc]
    assert all(call.join(SECONDS) for call in calls)
    assert sorted(ran) == [("asynccomm end", number) for number in range(3)]
    assert "no device" in caplog.text


def test_no_thread_at_all(reserved: PerProcess[background._ReservedThreads], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="interpreter shutdown"):
        in_background("x", print)


@pytest.mark.real_end
def test_a_function_runs_while_the_interpreter_ends() -> None:
    code = """
import atexit
from asynccomm.core.background import in_background, reserve
reserve()
atexit.register(lambda: in_background("x", lambda: print("ran")).join(30) or print("hangs"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("ran\n", "")


@pytest.mark.ranks(2, backend="gloo")
async def test_a_gloo_comm_ends_where_no_thread_can_be_started(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    own = await comm.split([0, 1], "own")
    await own.all_reduce(torch.ones(1))
    start, warned = threading.Thread.start, logging.NullHandler(logging.WARNING)
    monkeypatch.setattr(warned, "handle", lambda record: pytest.fail(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("asynccomm"), "handlers", [warned])

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "asynccomm-gloo-end":
            no_thread(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    await own.aclose()
