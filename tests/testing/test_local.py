"""A world of ranks in one loop."""

import asyncio
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, ClosedError
from asynccomm.backends.loopback import LoopbackBackend
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


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"size": -1}, ValueError, "size must be at least 1, got -1"),
        ({"size": 2.0}, TypeError, "size must be an integer, got 2.0"),
        ({"size": True}, TypeError, "size must be an integer, got True"),
        ({"size": None}, TypeError, "size must be an integer, got None"),
        ({"timeout": -1}, ValueError, "timeout must be positive, got -1"),
        ({"max_ops": 0}, ValueError, "max_ops must be a positive integer, got 0"),
    ],
)
async def test_wrong_arguments_are_named_before_any_comm_connects(
    wrong: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[object] = []
    monkeypatch.setattr(LoopbackBackend, "connect", connected.append)
    with pytest.raises(error, match=f"^{text}$"):
        async with loopback_world(**{"size": 2, **wrong}):
            pass
    assert not connected


def test_the_package_offers_what_it_says() -> None:
    import asynccomm.testing

    assert asynccomm.testing.check_backend.__module__ == "asynccomm.testing.conformance.suite"
    with pytest.raises(AttributeError, match="nonsense"):
        asynccomm.testing.nonsense  # noqa: B018
