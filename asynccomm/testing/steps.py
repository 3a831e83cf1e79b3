"""The steps of one test on one rank: comm, rank fixtures, test function, and their ends."""

from __future__ import annotations

import asyncio
import gc
import unittest
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, final

import pytest

from asynccomm.comm.new_comm import new_comm
from asynccomm.errors import AbortedError
from asynccomm.testing.debugging import RankDebugger
from asynccomm.testing.fixtures import unpack
from asynccomm.testing.isolation import ForkedChildren
from asynccomm.testing.project import ProjectModules
from asynccomm.testing.protocol import RankTask
from asynccomm.testing.rank_values import RankValues

__all__ = ["RankSteps"]

NO_ERRORS = pytest.skip.Exception, unittest.SkipTest, pytest.xfail.Exception
OWN_SECONDS = 0.05  # before a failed rank aborts: other ranks may fail in the same place, with reports of their own


@final
class RankSteps:
    """Runs one test on this rank.

    Args:
        modules: finds the test.
        debugger: for errors, if the task says so.
    """

    def __init__(self, task: RankTask, modules: ProjectModules, debugger: RankDebugger) -> None:
        self._task = task
        self._debugger = debugger
        self._test = modules.find(Path(task.path), task.qualname)
        self.unretrieved: list[str] = []  #: operations that failed and were never awaited

    async def run(self) -> Exception | None:
        """Run the test; returns its error. Raises: errors that are no Exception.

        The error is a value because a Runner formats its task. The ``__repr__`` of an error that the task raised could
        raise there, which would replace the error and leave the Runner's handler of SIGINT; that of a result cannot.
        """
        try:
            await self._run()
        except Exception as exc:
            return exc
        return None

    async def _run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note)
        world = self._task.world
        with pytest.MonkeyPatch.context() as patches:
            own: dict[str, Any] = {"monkeypatch": patches}
            values = RankValues(own, self._test.instance)
            try:
                async with AsyncExitStack() as stack:
                    if self._task.wants_comm:
                        comm = new_comm(
                            world.backend, world.device, name="test", hints=world.hints, timeout=world.timeout
                        )
                        own["comm"] = await stack.enter_async_context(comm)
                    await self._call(values)
            except BaseException as exc:
                await values.close(exc)  # the comm has ended: no rank waits for another one here
                raise
        del own, values
        gc.collect()  # operations that failed report it when they are dropped
        await asyncio.sleep(0)

    async def _call(self, values: RankValues) -> None:
        try:
            given = unpack(self._task.arguments)
            made = {name: await values.value(value) for name, value in given.items()}
            with ForkedChildren():
                await self._test.function(**{name: made[name] for name in self._task.names})
            failure = await values.close(None)
            if failure is not None:
                raise failure
        except BaseException as exc:  # a test may raise anything
            peer = isinstance(exc, AbortedError) and exc.rank != self._task.rank
            if self._task.debug and not peer and not isinstance(exc, (*NO_ERRORS, pytest.exit.Exception)):
                self._debugger.post_mortem(exc)
            await asyncio.sleep(OWN_SECONDS)
            raise

    def _note(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        if "call_site" in context:  # of a Work
            site = f"; called at {context['call_site']}" if context["call_site"] else ""
            self.unretrieved.append(f"{context['message']}: {context['exception']}{site}")
        loop.default_exception_handler(dict(context))
