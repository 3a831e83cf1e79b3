"""The values of rank fixtures, made in a rank process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, final

from asynccomm.errors import AsyncCommError, describe_exception
from asynccomm.testing.fixtures import RankOnly, registered
from asynccomm.testing.isolation import ForkedChildren

__all__ = ["RankValues"]


@final
class RankValues:
    """The values of the rank fixtures of one test, on one rank.

    Args:
        own: the values that the rank process has, by name.
        instance: the instance of the test's class; None: the test is no method.
    """

    def __init__(self, own: Mapping[str, Any], instance: object) -> None:
        self._own = own
        self._instance = instance
        self._made: dict[int, tuple[RankOnly, Any]] = {}  # by the identity of the stand-in, which it keeps alive
        self._open: list[tuple[str, Any]] = []  # names and generators, in order of setup

    async def value(self, argument: Any) -> Any:
        """The value of ``argument``, if it is a stand-in, which is made at the first call; else ``argument``."""
        if not isinstance(argument, RankOnly):
            return argument
        if argument.function is None:
            return self._own[argument.name]
        if id(argument) not in self._made:
            arguments = {name: await self.value(each) for name, each in argument.arguments.items()}
            with ForkedChildren():
                self._made[id(argument)] = argument, await self._make(argument, arguments)
        return self._made[id(argument)][1]

    async def _make(self, argument: RankOnly, arguments: Mapping[str, Any]) -> Any:
        assert argument.function is not None
        function = registered(argument.function)
        made = function(self._instance, **arguments) if argument.is_method else function(**arguments)
        if inspect.isasyncgen(made) or inspect.isgenerator(made):
            try:
                value = next(made) if inspect.isgenerator(made) else await anext(made)
            except (StopIteration, StopAsyncIteration):
                raise ValueError(f"rank fixture {argument.name!r} did not yield a value") from None
            self._open.append((argument.name, made))
            return value
        return await made if inspect.isawaitable(made) else made

    async def close(self, failure: BaseException | None) -> BaseException | None:
        """Run the rest of all generators, the last one first; returns the first error of the test.

        Args:
            failure: the error of the test; then errors of operations are left out, as the comm has ended.
        """
        while self._open:
            name, generator = self._open.pop()
            try:
                with ForkedChildren():
                    await _finish(name, generator)
            except BaseException as exc:  # a fixture may raise anything, as a test may
                if failure is None:
                    exc.add_note(f"in the rest of rank fixture {name!r}, after the test")
                    failure = exc
                elif not isinstance(exc, AsyncCommError):
                    failure.add_note(f"the rest of rank fixture {name!r} raised {describe_exception(exc)}")
        return failure


async def _finish(name: str, generator: Any) -> None:
    try:
        if inspect.isgenerator(generator):
            next(generator)
        else:
            await anext(generator)
    except (StopIteration, StopAsyncIteration):
        return
    if inspect.isgenerator(generator):
        generator.close()
    else:
        await generator.aclose()
    raise ValueError(f"rank fixture {name!r} yielded more than once")
