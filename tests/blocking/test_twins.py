"""The mechanism of blocking forms: the threads of methods, and the release of the loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from types import TracebackType
from typing import Any

import pytest

from asynccomm.blocking.portal import Portal
from asynccomm.blocking.twins import Twin, here, made, making, there
from tests.waiting import until


class Original:
    def __init__(self) -> None:
        self.left: list[object] = []

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


class Blocking(Twin[Original]):
    def __init__(self, original: Original, portal: Portal) -> None:
        self._hold(original, portal)

    @here(Original.thread)
    def thread(self) -> Any: ...

    @there(Original.thread_there)
    def thread_there(self) -> Any: ...

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
