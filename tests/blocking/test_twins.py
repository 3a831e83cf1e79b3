"""The mechanism of blocking forms: the threads of methods, and the release of the loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import pytest

from asynccomm import ClosedError, WouldBlockError
from asynccomm.blocking.portal import Portal
from asynccomm.blocking.twins import Twin, here, made, making, there
from tests.waiting import until


class Original:
    def __init__(self) -> None:
        self.left: list[object] = []
        self.begun = threading.Event()  # of ``endless``

    def thread(self, add: str = "") -> str:
        return threading.current_thread().name + add

    async def thread_there(self, add: str) -> str:
        return self.thread(add)

    async def other(self) -> Original:
        return Original()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.left.append(exc)

    async def endless(self) -> None:
        self.begun.set()
        await asyncio.get_running_loop().create_future()


class Blocking(Twin[Original]):
    def __init__(self, original: Original, portal: Portal) -> None:
        self._hold(original, portal)

    @here(Original.thread)
    def thread(self) -> Any: ...

    @there(Original.thread_there)
    def thread_there(self) -> Any: ...

    @there(Original.endless)
    def endless(self) -> Any: ...

    @making(Original.other, lambda original, portal: Blocking(original, portal))
    def other(self) -> Any: ...


async def original() -> Original:
    return Original()


def no_loop_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if "portal" in thread.name]


def test_methods_run_here_or_on_the_loop() -> None:
    with made(original, Blocking) as twin:
        mine = threading.current_thread().name
        assert twin.thread("!") == f"{mine}!"
        elsewhere = twin.thread_there("?")
        assert elsewhere.endswith("?")
        assert not elsewhere.startswith(mine)
        with twin.other() as other:
            assert isinstance(other, Blocking)
            assert other._original is not twin._original
    assert no_loop_is_left()


def test_the_original_learns_how_the_body_has_ended() -> None:
    twin = made(original, Blocking)
    twin.close()
    twin.close()
    assert twin._original.left == [None]
    with pytest.raises(ZeroDivisionError), made(original, Blocking) as failed:
        raise ZeroDivisionError
    assert [type(exc) for exc in failed._original.left] == [ZeroDivisionError]
    last = made(original, Blocking)
    last.end_of_process()
    assert last._original.left == [None]
    assert no_loop_is_left()


def test_nothing_ends_on_a_thread_with_a_loop() -> None:
    twin = made(original, Blocking)

    async def main() -> None:
        with pytest.raises(WouldBlockError):
            twin.close()
        with pytest.raises(WouldBlockError), twin:
            pass

    asyncio.run(main())
    assert not twin._original.left
    assert twin.thread_there("") != threading.current_thread().name
    twin.close()
    assert twin._original.left == [None]
    assert no_loop_is_left()


def test_an_exception_ends_the_original_also_on_a_thread_with_a_loop() -> None:
    twin = made(original, Blocking)

    async def main() -> None:
        with pytest.raises(ZeroDivisionError), twin:
            raise ZeroDivisionError
        await until(no_loop_is_left)

    asyncio.run(main())
    assert [type(exc) for exc in twin._original.left] == [ZeroDivisionError]
    twin.close()


def test_a_call_that_another_thread_closes_raises_an_ordinary_error() -> None:
    twin = made(original, Blocking)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(twin.endless)
        assert twin._original.begun.wait(20)
        twin.close()
        with pytest.raises(ClosedError, match="closed by another thread during the call"):
            calling.result(20)


def test_the_loop_is_released_after_errors_and_by_forgetting() -> None:
    async def failing() -> Original:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made(failing, Blocking)
    twin = made(original, Blocking)
    assert not no_loop_is_left()
    del twin
    gc.collect()
    asyncio.run(until(no_loop_is_left))
