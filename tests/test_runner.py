"""Running a program."""

from __future__ import annotations

import asyncio
from importlib import import_module

import pytest
import uvloop

from asynccomm.runner import run

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
