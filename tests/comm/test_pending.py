"""A comm to be: awaited, or entered."""

from types import TracebackType
from typing import Self

import pytest

from asynccomm.comm.pending import PendingComm


class Thing:
    def __init__(self) -> None:
        self.left_with: list[type[BaseException] | None] = []

    async def __aenter__(self) -> Self:
        raise AssertionError("it is open already")

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.left_with.append(kind)


def connecting(thing: Thing | None) -> PendingComm[Thing | None]:
    async def connect() -> Thing | None:
        return thing

    return PendingComm(connect)


async def test_awaiting_gives_an_open_comm() -> None:
    thing = Thing()
    assert await connecting(thing) is thing
    assert thing.left_with == []


async def test_entering_gives_the_comm_and_leaving_closes_it() -> None:
    thing = Thing()
    async with connecting(thing) as entered:
        assert entered is thing
        assert thing.left_with == []
    assert thing.left_with == [None]
    with pytest.raises(ZeroDivisionError):
        async with connecting(thing):
            raise ZeroDivisionError
    assert thing.left_with == [None, ZeroDivisionError]


async def test_nothing_can_be_entered_too() -> None:
    assert await connecting(None) is None
    async with connecting(None) as entered:
        assert entered is None
    with pytest.raises(ZeroDivisionError):
        async with connecting(None):
            raise ZeroDivisionError


async def test_an_error_of_connecting_is_raised() -> None:
    async def fail() -> None:
        raise ConnectionError("no")

    with pytest.raises(ConnectionError):
        await PendingComm(fail)
    with pytest.raises(ConnectionError):
        async with PendingComm(fail):
            raise AssertionError
