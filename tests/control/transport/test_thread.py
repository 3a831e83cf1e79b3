"""The control thread: there as long as somebody needs it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from functools import partial
from textwrap import dedent

import pytest

from asynccomm.control.transport import thread as module
from asynccomm.control.transport.thread import ControlThread, control_thread
from asynccomm.errors import BackendError
from tests.control.fake_listener import Door, Guest
from tests.control.unauthenticated import descriptors, nothing_unclosed, until
from tests.forking import fork
from tests.sampling import amount


def test_one_thread_for_all_until_the_last_has_gone() -> None:
    held = descriptors()
    one, two = control_thread(), control_thread()
    assert one is two
    one.release()
    assert one.call(lambda: None)
    two.release()
    one.join()
    assert not one._thread.is_alive()
    assert descriptors() <= held
    assert not one.call(lambda: None)
    again = control_thread()
    assert again is not one
    again.release()
    again.join()


def test_a_thread_that_cannot_start_is_an_error_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with nothing_unclosed(), pytest.raises(BackendError, match="cannot start the control thread: can't start new"):
            control_thread()
    thread = control_thread()
    thread.release()
    thread.join()


def test_the_process_waits_for_a_thread_that_is_about_to_end() -> None:
    """A thread that drops a tensor after the end of the interpreter would end the process by SIGABRT."""
    code = """
        import time
        from asynccomm.control.transport.thread import control_thread

        thread = control_thread()
        thread.call(lambda: (time.sleep(0.3), print("ended", flush=True)))
        thread.release()
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_calls_run_on_the_thread_in_order() -> None:
    thread = control_thread()
    seen: list[object] = []
    for number in range(100):
        thread.call(lambda number=number: seen.append(number))  # type: ignore[misc]
    thread.call(lambda: thread.call(lambda: seen.append(threading.current_thread().name)))
    thread.release()
    thread.join()
    assert seen == [*range(100), "asynccomm control"]


def test_coroutines() -> None:
    thread = control_thread()

    async def where() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert thread.run(where()).result(10) == "asynccomm control"
    thread.release()
    thread.join()
    with pytest.raises(RuntimeError):
        thread.run(where())


def test_what_is_left_comes_to_its_end() -> None:
    thread = ControlThread()
    thread.acquire()
    ended = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.set()

    future = thread.run(wait())
    thread.run(asyncio.sleep(0)).result(10)
    thread.release()
    thread.join()
    assert ended.is_set()
    with pytest.raises(RuntimeError, match="the control thread has ended"):
        future.result(10)


def test_a_coroutine_whose_future_is_cancelled_is_cancelled() -> None:
    thread = control_thread()
    began, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    future = thread.run(wait())
    assert began.wait(10)
    assert future.cancel()
    assert ended.wait(10)
    thread.release()
    thread.join()


def test_a_coroutine_that_fails() -> None:
    thread = control_thread()

    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        thread.run(fail()).result(10)
    thread.release()
    thread.join()


def test_whatever_comes_while_it_ends_is_done_or_refused() -> None:
    """And not lost, for which somebody would wait for ever."""

    async def nothing() -> None:
        pass

    for _ in range(amount(200, 50)):
        thread = control_thread()
        calls = 0
        called: list[int] = []
        count = partial(called.append, 1)
        thread.release()
        futures = []
        for _ in range(5000):  # on a busy machine, endless calls would not let the thread end
            try:
                futures.append(thread.run(nothing()))
            except RuntimeError:
                break
            calls += thread.call(count)
        for future in futures:
            try:
                future.result(10)
            except RuntimeError as exc:
                assert "the control thread has ended" in str(exc)
        thread.join()
        assert len(called) == calls


async def test_it_does_not_need_the_callers_loop() -> None:
    thread = control_thread()
    called = threading.Event()
    thread.call(called.set)
    assert called.wait(10), "though this loop is blocked"
    thread.release()
    await until(lambda: not thread._thread.is_alive(), "its end")


def test_many_come_and_go() -> None:
    def use() -> None:
        for _ in range(50):
            thread = control_thread()
            called = threading.Event()
            assert thread.call(called.set)
            assert called.wait(10)
            thread.release()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert module._thread is None


def test_a_forked_child_has_one_of_its_own() -> None:
    thread = control_thread()
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            own = control_thread()
            called = threading.Event()
            own.call(called.set)
            os.write(write, b"yes" if called.wait(10) and own is not thread else b"no")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 10) == b"yes"
    os.close(read)
    os.close(write)
    thread.release()
    thread.join()


def test_it_ends_with_the_process() -> None:
    code = "from asynccomm.control.transport.thread import control_thread; control_thread(); print('there')"
    done = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "there\n", "")


def test_what_is_open_on_its_loop_is_closed_with_it() -> None:
    """Whatever the users of the thread have forgotten, or is held up by who does not read."""

    async def connect() -> None:
        door = await Door().open("local")
        connection = await Guest().connect(door.contact)
        assert door.welcomed[0][1]._transport is not None
        door.welcomed[0][1]._transport.pause_reading()
        connection.send({"a": "x" * 1_000_000})
        connection.close()

    with nothing_unclosed():
        thread = control_thread()
        thread.run(connect()).result(10)
        thread.release()
        thread.join()
        assert not thread._thread.is_alive()


def test_tasks_that_others_begin_as_they_end_are_ended_too() -> None:
    thread = control_thread()
    ended: list[str] = []
    begun = threading.Event()

    async def wait(name: str, then: str) -> None:
        try:
            begun.set()
            await asyncio.sleep(3600)
        finally:
            ended.append(name)
            if then:
                thread.loop.create_task(wait(then, "")).add_done_callback(lambda _: ended.append("all"))

    thread.run(wait("first", "second"))
    assert begun.wait(10)
    thread.release()
    thread.join()
    assert ended in (["first", "all"], ["first", "second", "all"])
