"""A world of ranks in one loop."""

import asyncio

import pytest
import torch

from asynccomm import AbortedError, ClosedError
from asynccomm.testing import loopback_world


async def test_ranks_in_order_and_closed_afterwards() -> None:
    async with loopback_world(3, name="three", timeout=9) as comms:
        assert [comm.rank for comm in comms] == [0, 1, 2]
        assert comms[0].options.timeout == 9
        works = [comm.all_reduce(torch.ones(2)) for comm in comms]
        assert [work.result().tolist() for work in works] == [[3, 3]] * 3
    with pytest.raises(ClosedError, match="'three' is closed"):
        comms[0].barrier()


async def test_an_exception_does_not_wait_for_what_is_in_flight() -> None:
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(10), loopback_world(2) as comms:
            work = comms[0].barrier()
            raise ZeroDivisionError("enough")
    assert isinstance(work.exception(), AbortedError)


def test_the_package_offers_what_it_says() -> None:
    import asynccomm.testing

    assert asynccomm.testing.check_backend.__module__ == "asynccomm.testing.conformance.suite"
    with pytest.raises(AttributeError, match="nonsense"):
        asynccomm.testing.nonsense  # noqa: B018
