"""The side channel of a GPU comm: which backend it takes, and how its calls end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from asynccomm import BackendError, Comm, MemoryStore, PayloadError
from asynccomm.backends import registry
from asynccomm.backends.base import Backend, BackendContext, Submission, UnsuitableError
from asynccomm.backends.nccl.loop_watch import LoopWatch
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.backends.nccl.side_channel import SideChannel
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BrokenError, ClosedError
from asynccomm.ops import (
    Barrier,
    Call,
    Parcel,
    Parcels,
    RecvParcel,
    SendParcel,
    SignalCmpOp,
    WindowInfo,
    WindowSignal,
    WindowWait,
)
from asynccomm.ops.validation import CommInfo

from .conftest import World
from .simulation import SimulatedBackend, SimulatedDevice, SimulatedNccl

PATIENCE = 20.0


class Fake(Backend):
    """Keeps what it is given."""

    devices = frozenset({"cpu"})
    error: Exception | None = None
    contexts: list[BackendContext] = []

    def __init__(self) -> None:
        self.submitted: list[Submission] = []
        self.calls: list[object] = []
        self.on_submit: Callable[[Submission], object] = lambda submission: None

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        cls.contexts.append(context)
        if cls.error is not None:
            raise cls.error
        return cls()

    def submit(self, batch: Sequence[Submission]) -> None:
        (submission,) = batch
        self.submitted.append(submission)
        self.on_submit(submission)

    def before_await(self, work: Work[Any]) -> None:
        self.calls.append(("before_await", work))

    def before_block(self, work: Work[Any]) -> None:
        self.calls.append(("before_block", work))

    async def aclose(self) -> None:
        self.calls.append("aclose")

    def abort(self) -> None:
        self.calls.append("abort")

    def close_at_exit(self) -> None:
        self.calls.append("close_at_exit")


class First(Fake):
    name = "first"
    contexts: list[BackendContext] = []
    any_source = False


class Second(Fake):
    name = "second"
    contexts: list[BackendContext] = []


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``"auto"`` tries First, then Second."""
    for fake in (First, Second):
        monkeypatch.setitem(registry.BUILTIN, fake.name, (__name__, fake.__name__))
        monkeypatch.setattr(fake, "contexts", [])
        monkeypatch.setattr(fake, "error", None)
    monkeypatch.setattr(registry, "import_module", lambda name: _Here)
    monkeypatch.setitem(registry._AUTO, "cpu", ("first", "second"))


class _Here:
    First, Second = First, Second


def context(on_error: Callable[[BrokenError], object] = lambda error: None) -> BackendContext:
    group = CommInfo("test", 0, 1, torch.device("cuda", 0))
    mailbox = Mailbox(asyncio.get_running_loop())
    return BackendContext(group, [], MemoryStore(), mailbox, 5.0, on_error, {"max_ctas": "1"})


class Asked:
    """A poller that never calls."""

    def __init__(self) -> None:
        self.checks: list[Callable[[], bool]] = []

    def ask(self, check: Callable[[], bool], *, every: float, first: float) -> None:
        self.checks.append(check)


def connect(name: str) -> Coroutine[Any, Any, SideChannel]:
    return SideChannel.connect(context(), name, Asked())  # type: ignore[arg-type]


def backend_of(side: SideChannel) -> Fake:
    backend = side._backend
    assert isinstance(backend, Fake)
    return backend


# -- connecting ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fakes")
async def test_the_first_that_suits() -> None:
    side = await connect("auto")
    assert side.name == "first"
    assert not side.any_source
    assert not Second.contexts
    (own,) = First.contexts
    assert own.group.device == torch.device("cpu")
    assert (own.group.name, own.group.rank, own.group.size) == ("test", 0, 1)
    assert own.hints == {}, "hints are not for it"


@pytest.mark.usefixtures("fakes")
async def test_what_does_not_suit_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(First, "error", UnsuitableError("not here"))
    side = await connect("auto")
    assert side.name == "second"
    assert side.any_source
    await First.contexts[0].store.set("key", b"1")  # they do not meet in the store
    assert not await Second.contexts[0].store.check(["key"])


@pytest.mark.usefixtures("fakes")
async def test_none_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    for fake in (First, Second):
        monkeypatch.setattr(fake, "error", UnsuitableError(f"{fake.name} does not suit"))
    with pytest.raises(UnsuitableError, match="second does not suit"):
        await connect("auto")
    with pytest.raises(UnsuitableError, match="first does not suit"):
        await connect("first")


@pytest.mark.usefixtures("fakes")
async def test_other_errors_are_not_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(First, "error", BackendError("it broke"))
    with pytest.raises(BackendError, match="it broke"):
        await connect("auto")
    assert not Second.contexts


@pytest.mark.usefixtures("fakes")
async def test_one_that_is_named() -> None:
    side = await connect("second")
    assert side.name == "second"
    assert not First.contexts
    with pytest.raises(ValueError, match="'nobody' is unknown"):
        await connect("nobody")


# -- calls ---------------------------------------------------------------------------------------------------------


async def side_of() -> SideChannel:
    mailbox = Mailbox(asyncio.get_running_loop())
    return SideChannel(Second(), mailbox, LoopWatch(Asked(), mailbox))  # type: ignore[arg-type]


def barrier() -> Call:
    return Call(Barrier(), (), (), None)


def receive() -> Call:
    return Call(RecvParcel("x", 0, 0), (), (), None)


async def test_the_end_of_a_call_is_told() -> None:
    side = await side_of()
    ends: list[AsyncCommError | None] = []
    work = side.submit(barrier(), ends.append)
    assert not ends
    (submission,) = backend_of(side).submitted
    assert submission.work is work
    work.settle()
    assert ends == [None]


async def test_errors_are_given_away_and_nobody_reports_them() -> None:
    side = await side_of()
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, report: reports.append(report))
    ends: list[AsyncCommError | None] = []
    for error in (PayloadError("no"), BackendError("gone")):
        side.submit(barrier(), ends.append).settle(error)
        assert ends[-1] is error
        assert not error.observed
    backend_of(side).submitted.clear()
    gc.collect()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not reports
    asyncio.get_running_loop().set_exception_handler(None)


async def test_calls_have_numbers_of_their_own() -> None:
    side = await side_of()
    calls = [barrier(), receive(), receive(), barrier(), receive()]
    assert [side.submit(call, lambda error: None).seq for call in calls] == [0, 0, 1, 1, 2]


async def test_one_call_at_a_time() -> None:
    side = await side_of()
    inside: list[int] = []

    def look(submission: Submission) -> None:
        inside.append(1)
        assert len(inside) == 1, "two threads are within the backend"
        threading.Event().wait(0.0)
        inside.pop()

    backend_of(side).on_submit = look
    errors: list[BaseException] = []

    def many() -> None:
        try:
            for _ in range(200):
                side.submit(receive(), lambda error: None)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=many) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join, PATIENCE)
    assert not errors
    submitted = backend_of(side).submitted
    assert [submission.work.seq for submission in submitted] == list(range(1200)), "numbers are in the order of calls"


async def test_a_call_may_end_within_another() -> None:
    side = await side_of()
    ends: list[str] = []
    first = side.submit(receive(), lambda error: ends.append("first"))
    backend_of(side).on_submit = lambda submission: (first.settle(), submission.work.settle())
    side.submit(receive(), lambda error: ends.append("second"))
    assert ends == ["first", "second"]


async def test_what_the_backend_refuses_is_raised() -> None:
    side = await side_of()

    def refuse(submission: Submission) -> None:
        raise ValueError("not this")

    backend_of(side).on_submit = refuse
    with pytest.raises(ValueError, match="not this"):
        side.submit(barrier(), lambda error: None)
    backend_of(side).on_submit = lambda submission: submission.work.settle()
    ends: list[object] = []
    side.submit(barrier(), ends.append)
    assert ends == [None]


async def test_calls_are_completed_without_the_loop_while_it_is_blocked() -> None:
    poller, mailbox = Asked(), Mailbox(asyncio.get_running_loop())
    side = SideChannel(Second(), mailbox, LoopWatch(poller, mailbox))  # type: ignore[arg-type]
    late, early = (side.submit(receive(), lambda error: None) for _ in range(2))
    early.settle()
    (check,) = poller.checks
    look = threading.Thread(target=lambda: (check(), check()))  # the poller's thread
    look.start()
    look.join()
    assert backend_of(side).calls == [("before_block", late)]


async def test_the_rest_is_passed_on() -> None:
    side = await side_of()
    work = side.submit(barrier(), lambda error: None)
    side.before_await(work)
    side.before_block(work)
    side.abort()
    side.close_at_exit()
    await side.aclose()
    assert backend_of(side).calls == [
        ("before_await", work),
        ("before_block", work),
        "abort",
        "close_at_exit",
        "aclose",
    ]


async def test_receives_without_a_source_are_refused_where_the_side_cannot(world: World) -> None:
    async with world(2) as (comm, _):
        backend = comm.unsafe_get_backend()
        assert isinstance(backend, SimulatedBackend)

        class Named(type(backend._side._backend)):  # type: ignore[misc]
            any_source = False

        Named.__abstractmethods__ = frozenset()
        before = comm.statistics()
        backend._side._backend.__class__ = Named
        for call in (lambda: comm.recv(torch.ones(3)), comm.recv_object, comm.recv_tensor_dict):
            with pytest.raises(ValueError, match="with 'loopback' on the host cannot receive from any source"):
                call()
        assert comm.statistics() == before


# -- between real processes: what needs no NCCL ------------------------------------------------------------------------


class HostBackend(SimulatedBackend):
    """All tensors are on the host, so that nothing is left for NCCL, whose simulation knows one process only."""

    name = "hostonly"

    @classmethod
    def _platform_for(cls, context: BackendContext) -> DeviceRuntime:
        return DeviceRuntime(SimulatedNccl(), _HostDevice())


class _HostDevice(SimulatedDevice):
    def owns(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.float64  # which are only offered, and refused


def own_comm(side: str) -> Any:
    from asynccomm import new_comm

    registry.BUILTIN["hostonly"] = (HostBackend.__module__, "HostBackend")
    return new_comm("hostonly", name=f"over-{side}", hints={"side": side, "connect": "lazy"}, timeout=30)


SIDES = pytest.mark.parametrize("side", ["shm", "gloo"])


@SIDES
@pytest.mark.ranks([1, 2, 3])
async def test_objects_dicts_and_barriers_between_processes(comm: Comm, side: str) -> None:
    async with own_comm(side) as own:
        size, rank = own.size, own.rank
        assert own.unsafe_get_backend()._side.name == side
        following, previous = (rank + 1) % size, (rank - 1) % size
        for i in range(30):
            barrier = own.barrier()
            assert await own.all_gather_object((rank, i)) == [(r, i) for r in range(size)]
            assert await own.broadcast_object({"i": i, "x": "y" * 5000 * (i % 3)}, i % size) == {
                "i": i,
                "x": "y" * 5000 * (i % 3),
            }
            tensors = {"a": torch.full((1000 * i,), rank), "b": [torch.tensor(i)]}
            sent = [own.send_tensor_dict(tensors, following), own.send_object(("o", rank, i), following)]
            got = await own.recv_tensor_dict(previous)
            assert torch.equal(got["a"], torch.full((1000 * i,), previous))
            assert got["b"][0].item() == i
            assert await own.recv_object(previous) == ("o", previous, i)
            await asyncio.gather(*sent)
            await barrier
        for giver in range(size):
            for taker in range(size):
                seen: list[int] = []

                def place(source: int, head: bytes, lengths: Mapping[int, int], seen: list[int] = seen) -> list[Tensor]:
                    seen.append(source)
                    return [torch.empty(lengths[source], dtype=torch.uint8)]

                op = Parcels("one to one", False, giver, taker)
                given = (Parcel(b"x", (torch.ones(9),)),) * size if rank == giver else ()
                await own._submit(Call(op, (), (), None, parcels=given, place=place), None, None)
                assert seen == ([giver] if rank == taker != giver else [])


@SIDES
@pytest.mark.ranks(2)
async def test_many_messages_between_processes(comm: Comm, side: str) -> None:
    async with own_comm(side) as own:
        peer = 1 - own.rank
        works = [own.send_object((own.rank, i, "x" * (i % 7 * 1000)), peer, i % 3) for i in range(300)]
        received = [own.recv_object(peer, i % 3) for i in range(300)]
        for i, work in enumerate(received):
            assert await work == (peer, i, "x" * (i % 7 * 1000))
        await asyncio.gather(*works)


@SIDES
@pytest.mark.ranks(2)
async def test_the_answer_of_one_that_refuses_and_leaves_arrives(comm: Comm, side: str) -> None:
    """It is on its way when the taker closes."""
    for turn in range(10):
        async with own_comm(f"{side}") as own:
            if own.rank == 0:
                parcel = Parcel(b"", (torch.ones(3, dtype=torch.float64),))
                op = SendParcel("send_object", 1, 0)
                work = own._submit(Call(op, (), (), None, parcels=(parcel,)), None, None)
                await work
            else:

                def refuse(source: int, head: bytes, lengths: Mapping[int, int]) -> list[Tensor]:
                    raise PayloadError("not wanted")

                call = Call(RecvParcel("recv_object", 0, 0), (), (), None, place=refuse)
                with pytest.raises(PayloadError, match="not wanted"):
                    await own._submit(call, None, None)
        await comm.barrier()
        assert turn >= 0


# -- windows -------------------------------------------------------------------------------------------------------


async def test_a_window_on_the_host_is_of_the_cpu() -> None:
    side = await connect("loopback")
    group = CommInfo("test", 0, 1, torch.device("cuda", 0))
    window = await side.window(WindowInfo(group, 0, (0,), 2))
    errors: list[AsyncCommError | None] = []
    wait = window.submit(WindowWait(0, None, 1, 5, SignalCmpOp.EQ), errors.append)
    assert not wait.done()
    signal = window.submit(WindowSignal(0, 0, 1, 5, False), errors.append)
    assert wait.done()
    assert signal.done()
    assert errors == [None, None]
    assert window.window.load(1) == 5
    window.submit(WindowWait(0, None, 0, 1, SignalCmpOp.EQ), errors.append)
    window.window.end_waits(ended := ClosedError("over"))
    assert errors[2:] == [ended]
    await side.aclose()
