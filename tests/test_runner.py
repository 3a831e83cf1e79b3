"""Running a program."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from textwrap import dedent

import pytest
import uvloop

from asynccomm.core.preemption import preemption
from asynccomm.runner import run
from tests.forking import fork

runner = import_module("asynccomm.runner")


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def debugging() -> bool:
    return asyncio.get_running_loop().get_debug()


def test_result_comes_back() -> None:
    async def main() -> int:
        await asyncio.sleep(0)
        return 3

    assert run(main()) == 3


def test_uvloop_when_asked() -> None:
    loop = run(running_loop(), use_uvloop=True)
    assert isinstance(loop, uvloop.Loop)
    assert loop.is_closed()


def test_asyncio_when_asked() -> None:
    loop = run(running_loop(), use_uvloop=False)
    assert not isinstance(loop, uvloop.Loop)
    assert loop.is_closed()


def test_uvloop_when_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(run(running_loop()), uvloop.Loop)
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    assert not isinstance(run(running_loop()), uvloop.Loop)


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_debug_mode(use_uvloop: bool) -> None:
    assert run(debugging(), debug=True, use_uvloop=use_uvloop)
    assert not run(debugging(), debug=False, use_uvloop=use_uvloop)


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_exceptions_come_out(use_uvloop: bool) -> None:
    async def main() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        run(main(), use_uvloop=use_uvloop)


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_tasks_left_over_are_cancelled(use_uvloop: bool) -> None:
    ended = []

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main() -> asyncio.Task[None]:
        task = asyncio.ensure_future(linger())
        await asyncio.sleep(0)
        return task

    assert run(main(), use_uvloop=use_uvloop).cancelled()
    assert ended == [True]


async def test_not_within_a_running_loop() -> None:
    coroutine = running_loop()
    try:
        with pytest.raises(RuntimeError, match="running event loop"):
            run(coroutine)
    finally:
        coroutine.close()


# -- SIGTERM


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_sigterm_is_a_cancellation(use_uvloop: bool) -> None:
    ended = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(SystemExit) as end:
        run(main(), use_uvloop=use_uvloop)
    assert end.value.code == 128 + signal.SIGTERM
    assert ended == [True]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_may_go_on_after_sigterm() -> None:
    async def main() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as exc:
            return str(exc)
        return "never"

    assert run(main()) == "SIGTERM"


def test_a_cancellation_of_the_program_s_own_comes_out() -> None:
    async def main() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(main())


def test_a_handler_of_the_program_s_own_stays() -> None:
    got = []

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while not got:
            await asyncio.sleep(0)

    signal.signal(signal.SIGTERM, lambda *_: got.append(True))
    try:
        run(main())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_who_asks_for_it_is_cancelled_by_the_second_sigterm() -> None:
    async def main() -> None:
        preemption.polled = True
        os.kill(os.getpid(), signal.SIGTERM)
        while not preemption.requested:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert not preemption.cancelled
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    with pytest.raises(SystemExit):
        run(main())
    assert preemption.cancelled


def test_off_the_main_thread_there_is_no_handler() -> None:
    async def main() -> bool:
        return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: run(main())).result(10)


@pytest.mark.parametrize("use_uvloop", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_sigterm_reaches_a_program_that_does_not_come_to_await(count: int, use_uvloop: bool) -> None:
    code = f"""
        import os, signal, asynccomm
        async def main():
            for _ in range({count}):
                os.kill(os.getpid(), signal.SIGTERM)
            print("did its step", flush=True)
        asynccomm.run(main(), use_uvloop={use_uvloop})
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=30)
    expected = (128 + signal.SIGTERM, "did its step\n") if count == 1 else (-signal.SIGTERM, "")
    assert (done.returncode, done.stdout) == expected


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_sigterm_wakes_an_idle_loop_whichever_thread_gets_it(use_uvloop: bool) -> None:
    async def main() -> None:
        threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
        await asyncio.sleep(60)

    with pytest.raises(SystemExit):
        run(main(), use_uvloop=use_uvloop)


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_a_forked_child_leaves_the_tasks_to_its_parent(use_uvloop: bool) -> None:
    process = os.getpid()
    read, write = os.pipe()

    async def beside() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            os.write(write, b"%d " % os.getpid())

    async def main() -> int:
        task = asyncio.create_task(beside())
        await asyncio.sleep(0)
        pid = fork()
        if pid:
            await asyncio.to_thread(os.waitpid, pid, 0)
            assert not task.done()
        return pid

    try:
        assert run(main(), use_uvloop=use_uvloop) != 0
    finally:
        if os.getpid() != process:
            os._exit(0)
    assert os.read(read, 100) == b"%d " % process
    os.close(read)
    os.close(write)


def test_sigterm_ends_a_forked_child() -> None:
    async def main() -> int:
        read, write = os.pipe()
        pid = fork()
        if pid == 0:
            try:
                os.write(write, b"!")  # Python drops the signals that arrive before
                end = time.monotonic() + 30
                while time.monotonic() < end:
                    time.sleep(0.01)
            finally:
                os._exit(1)
        os.read(read, 1)
        os.close(read)
        os.close(write)
        os.kill(pid, signal.SIGTERM)
        return (await asyncio.to_thread(os.waitpid, pid, 0))[1]

    assert os.waitstatus_to_exitcode(run(main())) == -signal.SIGTERM


def test_sigterm_ends_a_forked_child_also_before_it_runs() -> None:
    """As ``multiprocessing.Pool`` ends its workers; they wait in system calls, which Python's handlers cannot end."""

    async def main() -> int:
        read, write = os.pipe()
        pid = fork()
        if pid == 0:
            try:
                os.read(read, 1)  # the child has the other end, too
            finally:
                os._exit(1)
        os.kill(pid, signal.SIGTERM)
        os.close(read)
        os.close(write)
        return (await asyncio.to_thread(os.waitpid, pid, 0))[1]

    for _ in range(5):
        assert os.waitstatus_to_exitcode(run(main())) == -signal.SIGTERM


def test_sigterms_end_a_program_that_waits_in_a_system_call() -> None:
    code = """
        import asyncio, os, signal, threading, time, asynccomm
        def send():
            while True:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
        async def main():
            threading.Thread(target=send, daemon=True).start()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        asynccomm.run(main())
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


def test_a_further_sigterm_ends_it_at_once() -> None:
    code = """
        import asyncio, os, signal, asynccomm
        async def main():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)
            finally:
                print("cleaning up", flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(60)
        asynccomm.run(main())
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "cleaning up\n"
