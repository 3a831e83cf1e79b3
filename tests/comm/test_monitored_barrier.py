"""Rounds over a store; what a comm makes of them is in tests/comm/methods/test_barriers.py."""

import asyncio

import pytest
import torch
from torch import distributed as dist

from asynccomm import MemoryStore, MonitoredBarrierError, Store, TorchStore, Work
from asynccomm.comm.monitored_barrier import MonitoredBarrier, MonitoredBarriers
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import StoreProtocolError
from asynccomm.ops.validation import CommInfo


def sides(store: Store, size: int) -> list[MonitoredBarriers]:
    return [MonitoredBarriers(CommInfo("c", rank, size, torch.device("cpu")), store) for rank in range(size)]


async def take_part(side: MonitoredBarriers, timeout: float) -> MonitoredBarrierError | None:
    mailbox = Mailbox(asyncio.get_running_loop())
    work: Work[None] = Work(MonitoredBarrier(True), 0, mailbox, value=None, timeout=timeout, on_settled=lambda _: None)
    try:
        await side.pass_through(work)
    except MonitoredBarrierError as exc:
        return exc
    return None


@pytest.fixture(params=["memory", "hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: object) -> Store:
    if request.param == "memory":
        return MemoryStore()
    return TorchStore(dist.HashStore() if request.param == "hash" else dist.FileStore(f"{tmp_path}/store", 1))


async def test_on_every_kind_of_store(store: Store) -> None:
    a, b, c = sides(store, 3)
    assert await asyncio.gather(*(take_part(side, 20) for side in (a, b, c))) == [None] * 3
    errors = await asyncio.gather(*(take_part(side, 0.3) for side in (a, b)))
    assert [error.missing for error in errors if error is not None] == [(2,), (2,)]
    late = await take_part(c, 20)
    assert late is not None
    assert (late.comm, late.rank, late.missing) == ("c", 0, (2,))
    assert await asyncio.gather(*(take_part(side, 20) for side in (c, b, a))) == [None] * 3


async def test_all_who_decide_at_once_agree() -> None:
    for _ in range(20):
        store = MemoryStore()
        group = sides(store, 6)
        errors = await asyncio.gather(*(take_part(side, 0.01) for side in group[1:5]))
        assert len({str(error) for error in errors}) == 1
        assert errors[0] is not None


async def test_the_first_verdict_counts() -> None:
    store = MemoryStore()
    a, b = sides(store, 2)
    error = await take_part(b, 0.01)
    assert error is not None
    again = await take_part(a, 10)  # everybody has left word now, too late
    assert again is not None
    assert str(again) == str(error)
    assert (again.rank, again.missing) == (1, (0,))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "text",
    [
        b"nonsense",
        b"\xff",
        b"[" * 10_000,
        b"null",
        b"[]",
        b"{}",
        b'{"rank": 5, "missing": [1], "elapsed": 1.0}',
        b'{"rank": true, "missing": [1], "elapsed": 1.0}',
        b'{"rank": 0, "missing": 1, "elapsed": 1.0}',
        b'{"rank": 0, "missing": ["1"], "elapsed": 1.0}',
        b'{"rank": 0, "missing": [2], "elapsed": 1.0}',
        b'{"rank": 0, "missing": [1, 1, 1], "elapsed": 1.0}',
        b'{"rank": 0, "missing": [1], "elapsed": "1"}',
        b'{"rank": 0, "missing": [1], "elapsed": NaN}',
        b'{"rank": 0, "missing": [1], "elapsed": -1}',
    ],
)
async def test_what_is_no_verdict_is_named(rank: int, text: bytes) -> None:
    store = MemoryStore()
    side = sides(store, 2)[rank]
    for key in ("decided", "verdict"):
        await store.set(f"monitored/0/{key}", text)
    with pytest.raises(StoreProtocolError, match="as the verdict of a monitored barrier is none: b'") as caught:
        await take_part(side, 5)
    assert len(str(caught.value)) < 1000
