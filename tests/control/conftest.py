"""Fixtures of the control channel."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import pytest

from .fake_listener import Door, opened
from .unauthenticated import until


@pytest.fixture(params=["local", "tcp"])
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    async with opened(request.param) as one:
        yield one


@pytest.fixture
async def local_door() -> AsyncIterator[Door]:
    async with opened("local") as one:
        yield one


@pytest.fixture
async def tcp_door() -> AsyncIterator[Door]:
    async with opened("tcp") as one:
        yield one


@pytest.fixture
async def quiet() -> None:
    """What a test before this one has used is closed."""
    await until(lambda: not any(t.name == "asynccomm control" for t in threading.enumerate()), "the thread's end")
