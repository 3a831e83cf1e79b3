"""The comms that most of the tests here use."""

from collections.abc import AsyncIterator

import pytest

from asynccomm import Comm
from asynccomm.testing.local import loopback_world
from tests.comm.methods.argument_matrix import SIZE


@pytest.fixture
async def comms() -> AsyncIterator[list[Comm]]:
    """Those of all ranks, on loopback."""
    async with loopback_world(SIZE) as found:
        yield found
