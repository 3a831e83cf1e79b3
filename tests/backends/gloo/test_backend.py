"""gloo on real processes: the conformance suite, and what is gloo's own."""

import asyncio
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, BackendError, BrokenError, MemoryStore, new_comm
from asynccomm.backends import addresses as addresses_module
from asynccomm.backends.base import RankInfo
from asynccomm.backends.gloo import backend as backend_module
from asynccomm.backends.gloo.backend import GlooBackend
from asynccomm.backends.gloo.torch_gloo import GlooGroup
from asynccomm.store.routes import InterfaceAddress
from asynccomm.testing import check_backend
from tests.sampling import exhaustive, some
from tests.waiting import until

from ..conformance import MANY_RANKS, OF_THREE_RANKS, USUAL, of_modules  # noqa: TID252
from ..contexts import rank_0_of_2  # noqa: TID252


@pytest.mark.ranks(some([3, 1, 2], 1), backend="gloo", timeout=240)
async def test_conformance() -> None:
    only = USUAL if exhaustive() else [name for name in USUAL if name in OF_THREE_RANKS]
    await check_backend(lambda name: new_comm("gloo", name=name, timeout=50), only=only)


@pytest.mark.ranks(2, backend="gloo", timeout=240)
async def test_conformance_of_two_ranks() -> None:
    only = [name for name in USUAL if name not in OF_THREE_RANKS]
    await check_backend(lambda name: new_comm("gloo", name=name, timeout=50), only=only)


# Without streams, torch's gloo moves the data of these; that of most others goes with frames and messages as usual.
BY_GLOO = [
    *of_modules("aliasing", "dicts", "experts", "uneven"),
    "disjoint_and_overlapping_groups_at_once",
    "large_objects",
    "objects_beside_collectives_in_flight",
    "objects_that_differ_in_size_between_ranks",
    "empty_tensors_in_every_form",
    "everything_in_one_scope",
    "long_tensors_in_every_form",
    "parameters_in_every_form",
    "two_hundred_operations_of_all_kinds_in_flight",
    "windows_carry_large_puts_and_gets",
    "windows_carry_puts_behind_signals",
]


@pytest.mark.ranks(some([2, 3], 1), timeout=240)
async def test_conformance_of_long_data_by_gloo() -> None:
    hints = {"streams": "0"}
    only = USUAL if exhaustive() else [name for name in BY_GLOO if name in USUAL]
    await check_backend(lambda name: new_comm("gloo", name=name, timeout=50, hints=hints), only=only)


@pytest.mark.exhaustive
@pytest.mark.ranks(5, backend="gloo", timeout=240)
async def test_conformance_on_more_ranks() -> None:
    await check_backend(lambda name: new_comm("gloo", name=name, timeout=50), only=MANY_RANKS)


async def test_a_thread_that_waits_for_a_peer_leaves_when_connecting_is_cancelled() -> None:
    store = MemoryStore()
    connecting = asyncio.create_task(GlooBackend.connect(rank_0_of_2(store=store)))
    await until(lambda: len(store._waiters) > 0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await until(lambda: len(store._waiters) == 0)


@pytest.mark.parametrize(
    ("hosts", "hints", "chosen"),
    [
        (("one", "one"), {}, "127.0.0.1"),
        (("one", "two"), {}, "10.0.0.7"),
        (("one", "two"), {"hostname": "127.0.0.1"}, "127.0.0.1"),
        (("one", "two"), {"interface": "lo"}, "127.0.0.1"),
        (("one", "one"), {"interface": "lo"}, "127.0.0.1"),
    ],
)
async def test_the_address_that_gloo_uses(
    monkeypatch: pytest.MonkeyPatch, hosts: Sequence[str], hints: dict[str, str], chosen: str
) -> None:
    given: list[dict[str, Any]] = []

    def refused(*_: object, **options: Any) -> None:
        given.append(options)
        raise RuntimeError("that is all")

    monkeypatch.setattr(backend_module, "GlooGroup", refused)
    context = rank_0_of_2(
        members=[RankInfo(rank, host, rank, "", "10.0.0.7") for rank, host in enumerate(hosts)],
        store=MemoryStore().prefix("comm"),
        timeout=5.0,
        hints=hints,
    )
    with pytest.raises(BackendError, match=f"at {chosen} on host 'one': that is all$"):
        await GlooBackend.connect(context)
    assert given[0]["address"] == chosen


async def test_an_error_of_connecting_between_hosts_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **options: Any) -> None:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(backend_module, "GlooGroup", refused)
    monkeypatch.setattr(addresses_module, "reachable_addresses", lambda: [InterfaceAddress("eth1", "10.1.0.1")])
    context = rank_0_of_2(
        members=[RankInfo(0, "one", 1, "a", "10.0.0.1"), RankInfo(1, "two", 1, "b", "10.0.0.2")],
        store=MemoryStore().prefix("comm"),
    )
    advice = "set GLOO_SOCKET_IFNAME, or hints={'interface': ...}, to one of eth1 (10.1.0.1)"
    message = f"at 10.0.0.1 on host 'one': connection refused; if the other hosts cannot reach that address, {advice}"
    with pytest.raises(BackendError, match=re.escape(message)):
        await GlooBackend.connect(context)


async def test_the_error_of_connecting_keeps_nothing_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        """Has sockets."""

    devices: list[weakref.ref[Device]] = []

    def refused(*_: object, **__: object) -> None:
        device = Device()
        devices.append(weakref.ref(device))
        raise RuntimeError("connection refused")

    monkeypatch.setattr(backend_module, "GlooGroup", refused)
    with pytest.raises(
        BackendError, match=r"could not connect rank 0 of comm 'main' at .*: connection refused"
    ) as caught:
        await new_comm("gloo", store=MemoryStore(), rank=0, size=1, hints={"control": "off"})
    assert devices
    await until(lambda: not any(device() for device in devices))  # one for each group, made by a thread of its own
    assert isinstance(caught.value.__cause__, RuntimeError)


# the peer has an address, but is never seen: its port is the higher one, so it would be the one to connect
WAITS_FOR_A_CONNECTION = """
import asyncio, socket, torch
from asynccomm import BackendError, MemoryStore
from asynccomm.backends.base import BackendContext, RankInfo
from asynccomm.backends.gloo.backend import GlooBackend
from asynccomm.backends.gloo.torch_gloo import GlooGroup
from asynccomm.ops.validation import CommInfo
from asynccomm.core.mailbox import Mailbox

class Dead(MemoryStore):
    async def set(self, key, value):
        await super().set(key, value)
        at = value.index(socket.inet_aton("127.0.0.1"))  # the two bytes before are the port
        address = value[: at - 2] + bytes([255, 255]) + value[at:]
        await super().set(key[:-1] + "1", address)

async def main():
    context = BackendContext(
        group=CommInfo("t", 0, 2, torch.device("cpu")),
        members=(RankInfo(0, "host", 1), RankInfo(1, "host", 2)),
        store=Dead(),
        mailbox=Mailbox(asyncio.get_running_loop()),
        timeout=1.0,
        on_error=print,
        hints={},
    )
    try:
        async with asyncio.timeout(3.0):
            await GlooBackend.connect(context)
    except (BackendError, TimeoutError) as exc:
        print(repr(exc))
asyncio.run(main())
"""


def test_a_peer_that_dies_while_gloo_connects_does_not_keep_the_process() -> None:
    run = [sys.executable, "-c", WAITS_FOR_A_CONNECTION]
    result = subprocess.run(run, capture_output=True, text=True, timeout=40)
    assert result.returncode == 0, result.stderr
    assert "gloo could not connect rank 0 of comm 't'" in result.stdout


@pytest.mark.ranks(2, backend="gloo")
async def test_closing_ends_all_threads() -> None:
    def alive() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("asynccomm-gloo-brief")]

    async with new_comm("gloo", name="brief") as comm:
        await comm.all_gather_object("x" * 2000)  # more than goes with a frame
        if comm.rank == 0:
            await comm.send(torch.ones(1), 1)
        else:
            await comm.recv(torch.ones(1), 0)
        assert len(alive()) == 2
    await until(lambda: not alive(), 5.0)  # half of what an idle thread stays


async def test_an_error_does_not_keep_the_groups() -> None:
    """Whoever drops the last reference to one ends its threads, and may wait for that for ever."""
    store = MemoryStore()
    hints = {"streams": "0"}
    made = (new_comm("gloo", store=store, rank=rank, size=2, hints=hints) for rank in range(2))
    comms = await asyncio.gather(*made)
    gloos = [comm.unsafe_get_backend()._gloos.small for comm in comms]
    groups = [weakref.ref(gloo) for gloo in gloos]
    gloos[0].poison()
    del gloos
    works = [comm.all_reduce(torch.ones(300_000)) for comm in comms]  # more than frames carry; gloo refuses it
    errors = await asyncio.gather(*works, return_exceptions=True)
    assert all(isinstance(error, BrokenError) for error in errors)
    (first, *_) = [error for error in errors if isinstance(error.__cause__, RuntimeError)]  # the other may report it
    assert re.search(r"gloo (could not start|failed in) all_reduce", str(first))
    del errors, first, works
    await asyncio.gather(*(comm.aclose() for comm in comms))
    assert [group() for group in groups] == [None, None]


async def test_groups_end_on_a_thread_that_nobody_waits_for() -> None:
    """One that is stuck would keep whoever ends it."""
    store = MemoryStore()
    comms = await asyncio.gather(*(new_comm("gloo", store=store, rank=rank, size=2) for rank in range(2)))
    await asyncio.gather(*(comm.all_reduce(torch.ones(n)) for n in (3, 3000) for comm in comms))
    ends: list[str] = []
    for comm in comms:
        backend = comm.unsafe_get_backend()
        assert isinstance(backend, GlooBackend)
        for gloo in backend._gloos.made if backend._gloos is not None else ():
            weakref.finalize(gloo, lambda: ends.append(threading.current_thread().name))
    del backend, gloo
    await asyncio.gather(*(comm.aclose() for comm in comms))
    await until(lambda: len(ends) == 4)
    assert set(ends) == {"asynccomm-gloo-end"}


class Late:
    """Rank 1 is not told that it has connected before ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.made: list[weakref.ref[GlooGroup]] = []
        self.ends: list[str] = []  #: threads on which groups have ended

    def make(self, store: Any, rank: int, size: int, **options: Any) -> GlooGroup:
        gloo = GlooGroup(store, rank, size, **options)
        weakref.finalize(gloo, lambda: self.ends.append(threading.current_thread().name))
        self.made.append(weakref.ref(gloo))
        if rank == 1:
            assert self.go.wait(30)
        return gloo

    async def connect(self) -> tuple[MemoryStore, list[asyncio.Task[Any]]]:
        """Connect two ranks; returns when rank 0 has all its connections, and either a comm or a reason to wait."""
        store = MemoryStore()
        connecting = [
            asyncio.ensure_future(new_comm("gloo", store=store, rank=rank, size=2)._connect()) for rank in range(2)
        ]
        await until(lambda: len(self.made) == 4 and (connecting[0].done() or len(store._waiters) > 0))
        return store, connecting


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    late = Late()
    monkeypatch.setattr(backend_module, "GlooGroup", late.make)
    yield late
    late.go.set()


async def test_no_rank_has_a_comm_before_all_have_their_connections(late: Late) -> None:
    """Else it could close it, which would break connections that others are still making."""
    store, connecting = await late.connect()
    early = connecting[0].done()
    late.go.set()
    comms = await asyncio.gather(*connecting)
    assert not early
    assert len(store._waiters) == 0
    await asyncio.gather(*(comm.barrier() for comm in comms))
    await asyncio.gather(*(comm.aclose() for comm in comms))


async def test_a_rank_that_gives_up_before_all_have_connected_ends_its_groups(late: Late) -> None:
    store, connecting = await late.connect()
    connecting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting[0]
    assert late.ends == ["asynccomm-gloo-end"] * 2
    assert len(store._waiters) == 0
    late.go.set()
    with pytest.raises(AbortedError, match="aborted by rank 0: could not connect: CancelledError"):
        await connecting[1]
    await until(lambda: not any(gloo() for gloo in late.made))
