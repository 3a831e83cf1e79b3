"""The loop behind torch's groups, the threads that complete futures, and the end of the process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from anyio.from_thread import BlockingPortal

from asynccomm.blocking import loop_thread


def test_the_loop_lives_as_long_as_somebody_uses_it() -> None:
    provider = loop_thread.loops()
    with provider as portal:
        loop, thread = portal.call(asyncio.get_running_loop), portal.call(threading.current_thread)
        with provider as again:
            assert again is portal
        assert portal.call(asyncio.get_running_loop) is loop
        assert thread.is_alive()
    assert not thread.is_alive()
    assert loop.is_closed()


class _Provider:
    """A provider whose thread takes long to start; it gives the portal of another one."""

    def __init__(self, portal: BlockingPortal, begin: Callable[[], object]) -> None:
        self._portal, self._begin = portal, begin
        self.left = threading.Event()

    def __enter__(self) -> BlockingPortal:
        self._begin()
        return self._portal

    def __exit__(self, *_: object) -> None:
        self.left.set()


def test_an_interrupted_lease_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    main, interrupted = threading.get_ident(), threading.Event()

    def begin() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(10)

    with loop_thread.loops() as portal:
        provider = _Provider(portal, begin)
        monkeypatch.setattr(loop_thread, "_loops", provider)
        with pytest.raises(KeyboardInterrupt):
            loop_thread.lease()
        assert not provider.left.is_set()
        interrupted.set()
        assert provider.left.wait(10)
        monkeypatch.undo()


def test_a_lease_whose_thread_is_interrupted_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            loop_thread.lease()


def test_a_lease_that_fails_raises_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with loop_thread.loops() as portal:
        monkeypatch.setattr(loop_thread, "_loops", _Provider(portal, lambda: 1 // 0))
        with pytest.raises(ZeroDivisionError):
            loop_thread.lease()
        monkeypatch.undo()


def test_calls_that_wait_for_each_other_all_have_a_thread() -> None:
    everybody = threading.Barrier(20)
    done = threading.Semaphore(0)

    def call() -> None:
        everybody.wait(20)
        done.release()

    for _ in range(20):
        loop_thread.on_a_thread(call)
    assert all(done.acquire(timeout=20) for _ in range(20))


async def test_a_thread_with_a_loop_is_detached_for_a_while() -> None:
    loop = asyncio.get_running_loop()
    with loop_thread.detached():
        assert asyncio._get_running_loop() is None
    assert asyncio.get_running_loop() is loop
    with pytest.raises(ZeroDivisionError), loop_thread.detached():
        raise ZeroDivisionError
    assert asyncio.get_running_loop() is loop


PROGRAM = """
import threading
from asynccomm.blocking import loop_thread

class Somebody:
    def end_of_process(self):
        loop_thread.loops().__exit__(None, None, None)
        print("ended", flush=True)


somebody = Somebody()
loop_thread.at_exit(somebody)
portal = loop_thread.loops().__enter__()
from anyio import to_thread
portal.call(to_thread.run_sync, print, "called")  # leaves a thread that only the end of the loop ends
"""


@pytest.mark.real_end
def test_what_is_open_is_ended_before_the_interpreter_waits_for_threads() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["called", "ended"]), done.stderr


def test_a_forked_child_starts_anew() -> None:
    loop_thread.on_a_thread(lambda: None)
    with loop_thread.loops():
        child = os.fork()
        if child == 0:
            fine = False
            try:
                came = threading.Event()
                loop_thread.on_a_thread(came.set)
                with loop_thread.loops() as portal:
                    fine = came.wait(10) and portal.call(asyncio.get_running_loop) is not None
            finally:
                os._exit(0 if fine else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_loop_of_a_portal() -> None:
    with loop_thread.loops() as portal:
        loop = loop_thread.loop_of(portal)
        assert portal.call(asyncio.get_running_loop) is loop is loop_thread.loop_of(portal)
    assert loop.is_closed()
    with loop_thread.loops() as portal:
        assert loop_thread.loop_of(portal) is not loop
