"""Making a comm: every argument checked at the call, every mismatch among ranks named on all of them."""

import asyncio
import logging
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Self

import pytest
import torch
from torch import distributed as dist

from asynccomm import (
    AbortedError,
    BackendError,
    Comm,
    MemoryStore,
    PeerLostError,
    ReduceOp,
    RendezvousError,
    StoreClient,
    StoreError,
    new_comm,
)
from asynccomm.backends import registry
from asynccomm.backends.base import Backend, BackendContext, UnsuitableError
from asynccomm.backends.loopback import LoopbackBackend
from asynccomm.backends.shm import bootstrap
from asynccomm.comm import connecting as connecting_module
from asynccomm.options import seconds
from asynccomm.testing.local import loopback_world


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, port: int) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        monkeypatch.delenv(name)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


BAD_CALLS: list[tuple[dict[str, object], str]] = [
    ({"backend": "mpi"}, "backend 'mpi' is unknown; choose from auto, gloo, hierarchical, loopback"),
    ({"backend": 3}, "backend must be a name, got 3"),
    ({"device": "toaster"}, "device must name a torch device .* got 'toaster'"),
    ({"backend": "gloo", "device": "cuda:0"}, "'gloo' takes tensors on .*, not on device cuda:0"),
    ({"device": "meta"}, "'auto' has no choice for device meta"),
    ({"name": ""}, "name must be a non-empty str, got ''"),
    ({"name": "\ud800"}, r"name must be a str that UTF-8 can encode, got '\\ud800'"),
    ({"timeout": 0}, "timeout must be positive, got 0"),
    ({"timeout": "1"}, "timeout must be seconds or a timedelta, got '1'"),
    ({"timeout": -(10**400)}, "timeout must be positive, got -1000"),
    ({"alone": "0"}, "alone must be True or False, got '0'"),
    ({"abort_process_on_timeout_or_error": "false"}, "abort_process_on_timeout_or_error must be True or False, got"),
    ({"high_priority_stream": "no"}, "high_priority_stream must be True or False, got 'no'"),
    ({"hints": [1]}, "hints must be a mapping"),
    ({"hints": {"gloo_threads": 2}}, "hints must map strings to strings, got 'gloo_threads': 2"),
    ({"hints": {"gloo_threads": "many"}}, "hint 'gloo_threads' must be a positive integer, got 'many'"),
    ({"hints": {"gloo_threads": "0"}}, "hint 'gloo_threads' must be a positive integer, got '0'"),
    ({"hints": {"gloo_threads": "9" * 5000}}, "hint 'gloo_threads' must be a positive integer, got '999"),
    ({"hints": {"recorder": "9" * 5000}}, "hint 'recorder' must be an integer from 1 to 1048576, got '999"),
    ({"hints": {"inline_bytes": "9" * 5000}}, "hint 'inline_bytes' must be an integer from 0 to .*, got '999"),
    ({"hints": {"hostname": "a", "interface": "b"}}, "hints 'hostname' and 'interface' exclude each other"),
    ({"max_ops": 0}, "max_ops must be a positive integer, got 0"),
    ({"max_bytes": 1.5}, "max_bytes must be a positive integer, got 1.5"),
    ({"rank": 2, "size": 2}, r"rank must be in \[0, 2\), got 2"),
    ({"size": 0}, "size must be at least 1, got 0"),
    ({"rank": True}, "rank must be an integer, got True"),
    ({"store": 5}, "store must be a Store"),
    ({"store": "http://x"}, "store 'http://x' must be"),
    ({"store": "tcp://a..b:1"}, r"host of store 'tcp://a\.\.b:1' must be the name or address of a host, got 'a\.\.b'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS, ids=lambda value: str(value)[:30])
def test_bad_arguments_raise_at_the_call(
    environ: pytest.MonkeyPatch, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        new_comm(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(environ: pytest.MonkeyPatch, name: str) -> None:
    environ.delenv(name)
    with pytest.raises(ValueError, match=f"environment variable {name} is not set"):
        new_comm()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "one"),
        ("RANK", "1"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "0"),
        ("MASTER_ADDR", "a..b"),
        ("MASTER_PORT", "70000"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(environ: pytest.MonkeyPatch, name: str, value: str) -> None:
    environ.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name}.*{value}"):
        new_comm()


@pytest.mark.parametrize("backend", ["auto", "gloo"])
async def test_one_rank_alone(environ: pytest.MonkeyPatch, backend: str) -> None:
    async with new_comm(backend, timeout=timedelta(seconds=20)) as comm:
        tensor = torch.ones(3)
        assert await comm.all_reduce(tensor) is tensor
        assert tensor.tolist() == [1, 1, 1]
        assert comm.options.timeout == 20


@pytest.mark.parametrize("backend", ["auto", "gloo"])
async def test_a_process_alone_needs_no_launcher(environ: pytest.MonkeyPatch, backend: str) -> None:
    environ.delenv("RANK")
    async with new_comm(backend, alone=True) as comm, new_comm(backend, alone=True) as other:
        assert (comm.rank, comm.size, other.name) == (0, 1, "main")
        assert torch.equal(await comm.all_reduce(torch.ones(3), ReduceOp.AVG), torch.ones(3))
        async with comm.split([0], "half") as half:
            assert await half.all_gather_object("x") == ["x"]
    with pytest.raises(ValueError, match="alone=True excludes store, rank and size, got None, 0 and None"):
        new_comm(alone=True, rank=0)


async def test_unknown_hints_are_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asynccomm"):
        async with new_comm("loopback", store=MemoryStore(), rank=0, size=1, hints={"speed": "ludicrous"}) as comm:
            assert comm.options.hints == {}
    assert "hint 'speed' is unknown to backend 'loopback'" in caplog.text


async def test_the_port_is_in_use(environ: pytest.MonkeyPatch, port: int) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        with pytest.raises(RendezvousError, match=rf"cannot listen at 127.0.0.1:{port}: Address already in use"):
            await new_comm(timeout=5)


async def test_no_server(environ: pytest.MonkeyPatch, port: int) -> None:
    environ.setenv("RANK", "1")
    environ.setenv("WORLD_SIZE", "2")
    with pytest.raises(RendezvousError, match=f"no store at 127.0.0.1:{port} within 0.3 s"):
        await new_comm(timeout=0.3)


async def test_ranks_that_do_not_come_are_named(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("WORLD_SIZE", "3")
    with pytest.raises(RendezvousError, match=r"ranks \[1, 2\] of 3 did not come within 0.5 s"):
        await new_comm(timeout=0.5)


async def test_another_world_size_is_named_on_both_sides() -> None:
    store = MemoryStore()
    results = await asyncio.gather(
        *(new_comm("loopback", store=store, rank=rank, size=2 + rank, timeout=10)._connect() for rank in range(2)),
        return_exceptions=True,
    )
    for error in results:
        assert isinstance(error, RendezvousError)
        assert "size differs: rank 0 has 2, rank 1 has 3" in str(error)


async def test_cancelling_cleans_up_and_frees_the_name() -> None:
    store = MemoryStore()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await new_comm("loopback", store=store, rank=0, size=2)
    async with new_comm("loopback", store=store, rank=0, size=1) as comm:
        await comm.barrier()


async def test_loopback_needs_a_memory_store(environ: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'loopback' needs store=MemoryStore\(\).* got StoreClient"):
        await new_comm("loopback")


async def test_a_failure_to_connect_is_sent_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = LoopbackBackend.connect.__func__  # type: ignore[attr-defined]

    async def half_broken(cls: type[Backend], context: BackendContext) -> Backend:
        if context.group.rank == 1:
            raise BackendError("rank 1 has no network")
        return await connect(cls, context)  # type: ignore[no-any-return]

    monkeypatch.setattr(LoopbackBackend, "connect", classmethod(half_broken))
    store = MemoryStore()

    async def rank_0() -> None:
        async with new_comm("loopback", store=store, rank=0, size=2) as comm:
            await comm.barrier()

    async def rank_1() -> None:
        await new_comm("loopback", store=store, rank=1, size=2)

    first, second = await asyncio.gather(rank_0(), rank_1(), return_exceptions=True)
    assert isinstance(second, BackendError)
    assert "aborted by rank 1: could not connect: BackendError: rank 1 has no network" in str(first)


async def test_connecting_ends_when_another_rank_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    started = asyncio.Event()

    async def stuck_or_broken(cls: type[Backend], context: BackendContext) -> Backend:
        if context.group.rank == 1:
            await started.wait()
            raise BackendError("rank 1 has no network")
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(LoopbackBackend, "connect", classmethod(stuck_or_broken))
    store = MemoryStore()
    async with asyncio.timeout(10):
        errors = await asyncio.gather(
            *(new_comm("loopback", store=store, rank=rank, size=3)._connect() for rank in range(3)),
            return_exceptions=True,
        )
    assert isinstance(errors[1], BackendError)
    for rank in (0, 2):
        assert isinstance(errors[rank], AbortedError)
        assert "aborted by rank 1: could not connect: BackendError: rank 1 has no network" in str(errors[rank])


async def test_a_rank_that_is_lost_before_the_news_of_why(monkeypatch: pytest.MonkeyPatch) -> None:

    async def lost(cls: type[Backend], context: BackendContext) -> Backend:
        if context.group.rank == 0:
            raise PeerLostError(1, "it left while the ranks were connecting")
        await asyncio.sleep(0.05)
        raise BackendError("rank 1 has no network")

    monkeypatch.setattr(LoopbackBackend, "connect", classmethod(lost))
    store = MemoryStore()
    errors = await asyncio.gather(
        *(new_comm("loopback", store=store, rank=rank, size=2)._connect() for rank in range(2)), return_exceptions=True
    )
    assert str(errors[0]) == "aborted by rank 1: could not connect: BackendError: rank 1 has no network"

    async def lost_for_no_reason(cls: type[Backend], context: BackendContext) -> Backend:
        raise PeerLostError(1, "it left while the ranks were connecting")

    monkeypatch.setattr(LoopbackBackend, "connect", classmethod(lost_for_no_reason))
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        await new_comm("loopback", store=store, rank=0, size=1)


@pytest.mark.parametrize("error", [BackendError("the connection was closed"), StoreError("the store was lost")])
async def test_a_transport_that_fails_before_the_news_of_why(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    failed = asyncio.Event()

    async def fails(cls: type[Backend], context: BackendContext) -> Backend:
        if context.group.rank == 0:
            failed.set()
            raise error
        await failed.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(LoopbackBackend, "connect", classmethod(fails))
    store = MemoryStore()
    errors = await asyncio.gather(
        *(new_comm("loopback", store=store, rank=rank, size=2)._connect() for rank in range(2)), return_exceptions=True
    )
    assert str(errors[0]) == "aborted by rank 1: could not connect: ZeroDivisionError"
    assert errors[0].__cause__ is error  # type: ignore[union-attr]


async def test_a_transport_that_fails_when_a_rank_dies_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever else connects may see that before the control channel does."""
    async with loopback_world(3) as comms:

        async def fails(cls: type[Backend], context: BackendContext) -> Backend:
            lost = PeerLostError(1, "its control connection ended")
            asyncio.get_running_loop().call_soon(comms[context.group.rank]._session.break_by, lost)
            raise BackendError("the connection was closed")

        monkeypatch.setattr(LoopbackBackend, "connect", classmethod(fails))
        errors = await asyncio.gather(*(comms[rank].dup()._connect() for rank in (0, 2)), return_exceptions=True)
    assert all("rank 1 was lost: its control connection ended (comm 'test" in str(error) for error in errors)


async def test_the_error_of_a_broken_parent_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_SECONDS", "EXPLAIN_SECONDS"):
        monkeypatch.setattr(connecting_module, name, 3600.0)
    async with loopback_world(2) as (a, b):
        for comm, error in ((a, BackendError("the connection was closed")), (b, PeerLostError(0, "it has ended"))):
            comm._session.break_by(error)
            async with asyncio.timeout(20):
                with pytest.raises(type(error)) as caught:
                    await comm.dup()
            cause = caught.value.__cause__
            assert isinstance(cause, type(error))
            assert cause.args[:2] == error.args[:2]


@pytest.mark.parametrize("first", [TimeoutError(), PeerLostError(1, "it left while the ranks were connecting")])
async def test_an_abort_while_connecting_has_no_other_cause(monkeypatch: pytest.MonkeyPatch, first: Exception) -> None:
    async with loopback_world(2) as (a, b):

        async def fails(cls: type[Backend], context: BackendContext) -> Backend:
            a._session.break_by(AbortedError(1, "enough"))
            raise first

        monkeypatch.setattr(LoopbackBackend, "connect", classmethod(fails))
        with pytest.raises(AbortedError, match="aborted by rank 1: enough") as caught:
            await a.dup()
        lines = traceback.format_exception(caught.value)
        assert sum("Traceback" in line for line in lines) == 1, "".join(lines)
        assert b.size == 2


# -- "auto" -----------------------------------------------------------------------------------------------------------


class First(LoopbackBackend):  # type: ignore[misc]
    """Suits as far as ``problem`` is empty; leaves keys behind when it does not."""

    name = "first"
    hints = {"only_first": "", "both": ""}
    problem = ""
    checked: list[object] = []
    seen: list[dict[str, str]] = []

    @classmethod
    def check_hints(cls, hints: Mapping[str, str]) -> None:
        cls.checked.append((cls.name, dict(hints)))
        if hints.get("both") == cls.name:
            raise ValueError(f"hint 'both' cannot be {cls.name!r}")

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        cls.seen.append(dict(context.hints))
        await context.store.set("key", cls.name)
        if cls.problem:
            await context.store.wait(["key"])
            raise UnsuitableError(cls.problem)
        assert await context.store.get("key") == cls.name.encode()
        return await super().connect(context)


class Second(First):
    name = "second"
    hints = {"only_second": "", "both": ""}
    checked: list[object] = []
    seen: list[dict[str, str]] = []


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backends that "auto" may choose."""
    for backend in (First, Second):
        monkeypatch.setattr(backend, "problem", "")
        monkeypatch.setattr(backend, "checked", [])
        monkeypatch.setattr(backend, "seen", [])
        monkeypatch.setitem(registry.BUILTIN, backend.name, (__name__, backend.__name__))
        monkeypatch.setitem(sys.modules, __name__, sys.modules[backend.__module__])
    monkeypatch.setattr(registry, "_AUTO", {"cpu": ("first", "second")})


@pytest.mark.usefixtures("auto")
def test_a_backend_may_require_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked also where the caller gives no hints at all."""

    def required(hints: Mapping[str, str]) -> None:
        if "only_second" not in hints:
            raise ValueError("hint 'only_second' is required")

    monkeypatch.setattr(Second, "check_hints", required)
    for hints in (None, {}):
        with pytest.raises(ValueError, match="hint 'only_second' is required"):
            new_comm("auto", store=MemoryStore(), rank=0, size=1, hints=hints)


async def pair(backend: str = "auto", hints: Mapping[str, str] | None = None) -> list[Comm]:
    store = MemoryStore()
    return await asyncio.gather(
        *(new_comm(backend, store=store, rank=rank, size=2, timeout=20, hints=hints) for rank in range(2))
    )


async def check_pair(comms: list[Comm], backend: str) -> None:
    for comm in comms:
        assert comm.backend == backend
        assert repr(backend).strip("'") in repr(comm)
    await asyncio.gather(*(comm.barrier() for comm in comms))
    await asyncio.gather(*(comm.aclose() for comm in comms))


@pytest.mark.usefixtures("auto")
async def test_auto_takes_the_first_that_suits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "asynccomm"):
        await check_pair(await pair(), "first")
    assert not caplog.records


@pytest.mark.usefixtures("auto")
async def test_auto_tries_the_next_backend_and_logs_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(First, "problem", "rank 1 is on the moon")
    monkeypatch.setattr(Second, "problem", "")
    with caplog.at_level(logging.INFO, "asynccomm"):
        await check_pair(await pair(), "second")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [("INFO", "backend 'first' does not suit, so another is tried: rank 1 is on the moon")] * 2


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("backend", ["auto", "first"])
async def test_without_a_suitable_backend_the_last_error_is_raised(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(First, "problem", "the first has no hands")
    monkeypatch.setattr(Second, "problem", "the second has no feet")
    reason = "the first has no hands" if backend == "first" else "the second has no feet"
    with pytest.raises(UnsuitableError, match=reason):
        await pair(backend)


@pytest.mark.usefixtures("auto")
async def test_only_an_unsuitable_backend_leads_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(context: BackendContext) -> Backend:
        raise BackendError("broken on one rank, for all we know")

    monkeypatch.setattr(First, "connect", fail)
    with pytest.raises((BackendError, AbortedError), match="broken on one rank"):  # its own, or the other rank's
        await pair()
    assert Second.seen == []


@pytest.mark.usefixtures("auto")
async def test_hints_go_to_the_backends_that_know_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(First, "problem", "no")
    monkeypatch.setattr(Second, "problem", "")
    hints = {"only_first": "1", "only_second": "2", "both": "3", "neither": "4"}
    for_first, for_second = {"only_first": "1", "both": "3"}, {"only_second": "2", "both": "3"}
    comms = await pair(hints=hints)
    assert First.checked == [("first", for_first)] * 2
    assert Second.checked == [("second", for_second)] * 2
    assert (First.seen, Second.seen) == ([for_first] * 2, [for_second] * 2)
    assert [comm.options.hints for comm in comms] == [for_second] * 2
    assert caplog.text.count("hint 'neither' is unknown to backend 'auto'") == 2
    await check_pair(comms, "second")


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("backend", ["first", "second"])
async def test_hints_of_all_that_may_be_chosen_are_checked_at_the_call(backend: str) -> None:
    with pytest.raises(ValueError, match=f"hint 'both' cannot be '{backend}'"):
        new_comm("auto", store=MemoryStore(), rank=0, size=1, hints={"both": backend})


@pytest.mark.usefixtures("auto")
async def test_ranks_must_ask_for_the_same() -> None:
    store = MemoryStore()
    results = await asyncio.gather(
        *(
            new_comm(backend, store=store, rank=rank, size=2, timeout=10)._connect()
            for rank, backend in enumerate(["auto", "first"])
        ),
        return_exceptions=True,
    )
    for error in results:
        assert "backend differs: rank 0 has 'auto', rank 1 has 'first'" in str(error)


@pytest.mark.usefixtures("auto")
async def test_one_time_limit_for_all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(context: BackendContext) -> Backend:
        await asyncio.sleep(0.2)
        raise UnsuitableError("took its time")

    async def never(context: BackendContext) -> Backend:
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(First, "connect", slow)
    monkeypatch.setattr(Second, "connect", never)
    start = time.monotonic()
    with pytest.raises(BackendError, match=r"second did not connect rank 0 of comm 'main' within 0\.4 s"):
        await new_comm("auto", store=MemoryStore(), rank=0, size=1, timeout=0.4)
    assert time.monotonic() - start < 5


@pytest.mark.ranks(2)
async def test_auto_on_one_machine(comm: Comm) -> None:
    assert comm.backend == "shm"


@pytest.mark.ranks(2, backend="gloo")
async def test_auto_where_one_rank_cannot_share_memory() -> None:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(bootstrap, "unsupported", lambda: "none left")
        with pytest.raises(UnsuitableError, match="rank 1 cannot share memory: none left"):
            await new_comm("shm", name="shared")
        async with new_comm(name="any") as comm:
            assert comm.backend == "gloo"
            tensor = torch.ones(4)
            await comm.all_reduce(tensor)
            assert tensor[0] == 2


@pytest.mark.ranks(2, backend="gloo")
async def test_names_can_be_used_again_and_comms_live_side_by_side() -> None:
    for _ in range(3):
        async with new_comm("gloo", name="again") as comm:
            await comm.barrier()
    async with new_comm("gloo", name="left") as left, new_comm("gloo", name="right") as right:
        tensors = [torch.ones(100) for _ in range(20)]
        works = [(left if i % 2 else right).all_reduce(t) for i, t in enumerate(tensors)]
        await asyncio.gather(*works)
        assert all(t[0] == 2 for t in tensors)


@pytest.mark.ranks(2, backend="gloo")
async def test_two_comms_on_one_given_store() -> None:
    client = await StoreClient.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=20)
    comms: list[Comm] = []
    for name in ("left", "right"):
        comms.append(await new_comm("gloo", name=name, store=client))
    for comm in comms:
        tensor = torch.ones(4)
        await comm.all_reduce(tensor)
        assert tensor[0] == 2
    for comm in comms:
        await comm.aclose()
    assert await client.check([]) is True  # a store that was given stays open
    await client.aclose()


@pytest.mark.ranks(2)
async def test_comms_one_after_the_other_where_rank_0_hosts(tmp_path: Path) -> None:
    rank = int(os.environ["RANK"])
    chosen = tmp_path / "port"
    if rank == 0:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            chosen.write_text(str(sock.getsockname()[1]))
    while not (chosen.exists() and chosen.read_text()):
        await asyncio.sleep(0.01)
    for _ in range(10):  # each time the server of the one before is just on its way out
        store = f"tcp://127.0.0.1:{chosen.read_text()}"
        async with new_comm("gloo", name="next", store=store, rank=rank, size=2, timeout=30) as comm:
            await comm.barrier()


async def test_many_comms_connect_at_once_on_a_torch_store() -> None:
    store = dist.HashStore()
    names = [f"comm {i}" for i in range(25)]

    async def one(name: str, rank: int) -> None:
        async with new_comm("gloo", name=name, store=store, rank=rank, size=2, timeout=60) as comm:
            await comm.barrier()

    await asyncio.gather(*(one(name, rank) for name in names for rank in range(2)))


def test_seconds_that_no_clock_can_take_mean_never() -> None:
    assert seconds("timeout", 10**400, 1.0) == math.inf


@pytest.mark.parametrize("first", ["torch", "asynccomm"])
@pytest.mark.ranks(2)
async def test_a_comm_beside_the_default_group_of_torch(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Rank 0 hosts one store for both, as without a launcher both meet at MASTER_PORT."""
    async with new_comm(name="before") as comm:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            free = await comm.broadcast_object(sock.getsockname()[1], 0)
        monkeypatch.setenv("MASTER_PORT", str(free))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        if first == "torch":
            await asyncio.to_thread(dist.init_process_group, "gloo")
        async with new_comm(name="beside", timeout=20) as beside:
            if first == "asynccomm":
                await asyncio.to_thread(dist.init_process_group, "gloo")
            for _ in range(2):
                one, other = torch.ones(1), torch.ones(1)
                await beside.all_reduce(one)
                await asyncio.to_thread(dist.all_reduce, other)
                assert one.item() == other.item() == 2
        await asyncio.to_thread(dist.barrier)  # the store outlives the comm
        await comm.barrier()
        dist.destroy_process_group()


def test_a_port_of_another_program_is_an_error(environ: pytest.MonkeyPatch) -> None:
    """Also where torch has a default group, which has met elsewhere."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            environ.setenv("MASTER_PORT", str(taken.getsockname()[1]))
            with pytest.raises(RendezvousError, match=r"cannot listen at .*: Address already in use"):
                await new_comm(timeout=20)

    dist.init_process_group("gloo")
    try:
        asyncio.run(main())
    finally:
        dist.destroy_process_group()
