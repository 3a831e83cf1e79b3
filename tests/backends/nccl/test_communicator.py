"""One NCCL communicator: made, used for groups of calls, ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm.backends.nccl import communicator as module
from asynccomm.backends.nccl.api import DTYPES, REDUCTIONS, Config
from asynccomm.backends.nccl.communicator import Communicator, end_all
from asynccomm.backends.nccl.device import ISSUING
from asynccomm.backends.nccl.plan import NcclCall
from asynccomm.core.background import in_background
from asynccomm.errors import BackendError
from asynccomm.ops import Barrier, Broadcast
from asynccomm.ops.reduce_op import RedOpType

from .simulation import SimulatedDevice, SimulatedNccl, SimulatedStream

SECONDS = 30.0  # after which a wait in here is a hang
CONFIG = Config(name="test", blocking=True)
first: Any = "comm 1"  #: what a library makes first


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(1e-4)


class Library:
    """An NCCL that takes notes.

    ``busy``: so many looks say that it is not ready. ``fail``: what to raise, by name of the call. ``within``: called
    by those calls, with nothing held.
    """

    dtypes = DTYPES
    reductions = REDUCTIONS

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.busy = 0
        self.fail: dict[str, BaseException] = {}
        self.within: dict[str, Callable[[], object]] = {}
        self.handles = 0
        self.made: list[int] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls if name != "progress"]

    def _note(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name in self.within:
            self.within[name]()
        if name in self.fail:
            raise self.fail[name]

    def __getattr__(self, name: str) -> Any:
        if name not in (
            *("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
            *("send", "recv", "group_start", "group_end", "finalize", "destroy", "abort", "drop_queued"),
        ):
            raise AttributeError(name)
        return lambda *arguments: self._note(name, *arguments)

    def init(self, *arguments: Any) -> str:
        self._note("init", *arguments)
        self.handles += 1
        return f"comm {self.handles}"

    def progress(self, handle: object) -> bool:
        self._note("progress", handle)
        self.busy -= 1
        return self.busy < 0

    def pre_mul_sum(self, scalar: int, dtype: int, handle: object, *, on_device: bool) -> int:
        assert on_device
        self._note("pre_mul_sum", scalar, dtype, handle)
        self.made.append(100 + len(self.calls))
        return self.made[-1]

    def group_estimate(self) -> float:
        self._note("group_estimate")
        return 0.5

    def drop_reduction(self, number: int, handle: object) -> None:
        self._note("drop_reduction", number, handle)
        self.made.remove(number)


class Gpu(SimulatedDevice):
    """Counts who is ``here``."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.visits = 0

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        self.inside += 1
        self.visits += 1
        yield
        self.inside -= 1


@pytest.fixture
def library() -> Any:
    return Library()


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def made(library: Any, gpu: Gpu) -> Communicator:
    """One that is not open yet."""
    return Communicator(library, gpu, SimulatedStream())


@pytest.fixture
def opened(made: Communicator, library: Library) -> Communicator:
    made.open(2, 1, b"id", CONFIG)
    library.calls.clear()
    return made


def all_reduce(tensor: Tensor, **other: Any) -> NcclCall:
    return NcclCall("all_reduce", tensor, tensor, tensor.numel(), tensor.dtype, reduction=RedOpType.SUM, **other)


def scaled(tensor: Tensor) -> NcclCall:
    factor = torch.full((1,), 2, dtype=tensor.dtype)
    return NcclCall("all_reduce", tensor, tensor, tensor.numel(), tensor.dtype, -1, RedOpType.PREMUL_SUM, factor)


def broadcast(tensor: Tensor, root: int = 0) -> NcclCall:
    return NcclCall("broadcast", tensor, tensor, tensor.numel(), tensor.dtype, root)


# -- open -------------------------------------------------------------------------------------------------------------


def test_open_blocks_until_it_may_be_used(made: Communicator, library: Library, gpu: Gpu) -> None:
    library.busy = 3
    library.within["init"] = lambda: gpu.inside or pytest.fail("NCCL takes the thread's current device")
    made.open(2, 1, b"id", CONFIG)
    assert library.calls == [("init", (2, 1, b"id", CONFIG)), *[("progress", ("comm 1",))] * 4]
    assert made.ready()


def test_open_fails_in_init(made: Communicator, library: Library) -> None:
    library.fail["init"] = BackendError("no network")
    with pytest.raises(BackendError, match="no network"):
        made.open(2, 1, b"id", CONFIG)
    assert made.take() is None


def test_open_fails_while_it_connects(made: Communicator, library: Library) -> None:
    library.fail["progress"] = BackendError("refused")
    with pytest.raises(BackendError, match="refused"):
        made.open(2, 1, b"id", CONFIG)
    assert made.take() == first, "there is something to abort"


def connecting(communicator: Communicator) -> tuple[threading.Thread, list[str]]:
    """A thread that connects, and comes back with an error."""
    errors: list[str] = []

    def connect() -> None:
        with pytest.raises(BackendError) as caught:
            communicator.open(2, 1, b"id", CONFIG)
        errors.append(str(caught.value))

    thread = threading.Thread(target=connect)
    thread.start()
    return thread, errors


def test_ended_while_it_is_made(made: Communicator, library: Library, gpu: Gpu) -> None:
    inside, go_on = threading.Event(), threading.Event()
    library.within["init"] = lambda: inside.set() or go_on.wait(SECONDS)  # type: ignore[func-returns-value]
    thread, errors = connecting(made)
    assert inside.wait(SECONDS)
    end_all(library, gpu, [made], abort=True)  # type: ignore[arg-type]
    assert library.calls[1:] == [("abort", ())], "there is none yet"
    go_on.set()
    thread.join(SECONDS)
    assert library.calls[2:] == [("abort", ("comm 1",))]
    assert errors == ["the NCCL communicator was ended"]
    assert made.take() is None


def test_ended_while_it_connects(made: Communicator, library: Library, gpu: Gpu) -> None:
    library.busy = 10**9
    thread, errors = connecting(made)
    until(lambda: ("progress", ("comm 1",)) in library.calls)
    end_all(library, gpu, [made], abort=True)  # type: ignore[arg-type]
    thread.join(SECONDS)
    assert errors == ["the NCCL communicator was ended"]
    assert library.calls[-1] == ("abort", ("comm 1",))


@pytest.mark.parametrize("taken", [False, True])
def test_there_is_nothing_to_use(made: Communicator, library: Library, taken: bool) -> None:
    if taken:
        made.open(2, 1, b"id", CONFIG)
        made.take()
    library.calls.clear()
    for use in (made.ready, lambda: made.issue([all_reduce(torch.ones(1))], known=False)):
        with pytest.raises(BackendError, match="was ended"):
            use()
    assert library.calls == []


# -- issue ------------------------------------------------------------------------------------------------------------


def test_every_call_as_nccl_takes_it(opened: Communicator, library: Library, gpu: Gpu) -> None:
    a, b = torch.ones(4), torch.ones(8, dtype=torch.float64)
    pa, pb = a.data_ptr(), b.data_ptr()
    calls = [
        NcclCall("all_reduce", a, b, 4, torch.float32, reduction=RedOpType.MAX),
        NcclCall("reduce", a, None, 4, torch.float32, 1, RedOpType.AVG),
        NcclCall("reduce_scatter", a, b, 2, torch.int8, reduction=RedOpType.SUM),
        NcclCall("broadcast", a, b, 4, torch.uint8, 1),
        NcclCall("all_gather", a, b, 4, torch.uint8),
        NcclCall("gather", a, None, 4, torch.uint8, 0),
        NcclCall("scatter", None, b, 4, torch.uint8, 0),
        NcclCall("all_to_all", a, b, 4, torch.uint8),
        NcclCall("send", a, None, 4, torch.uint8, 0),
        NcclCall("recv", None, b, 4, torch.uint8, 0),
    ]
    opened.issue(calls, known=True)
    at = ("comm 1", opened.stream.handle)
    assert library.calls == [
        ("group_start", ()),
        ("all_reduce", (pa, pb, 4, 7, 2, *at)),
        ("reduce", (pa, 0, 4, 7, 4, 1, *at)),
        ("reduce_scatter", (pa, pb, 2, 0, 0, *at)),
        ("broadcast", (pa, pb, 4, 1, 1, *at)),
        ("all_gather", (pa, pb, 4, 1, *at)),
        ("gather", (pa, 0, 4, 1, 0, *at)),
        ("scatter", (0, pb, 4, 1, 0, *at)),
        ("all_to_all", (pa, pb, 4, 1, *at)),
        ("send", (pa, 4, 1, 0, *at)),
        ("recv", (pb, 4, 1, 0, *at)),
        ("group_end", ()),
    ]


def test_on_another_stream(opened: Communicator, library: Library) -> None:
    stream = SimulatedStream()
    opened.issue([broadcast(torch.ones(1))], stream=stream, known=True)
    assert library.calls[1][1][-1] == stream.handle != opened.stream.handle


def test_in_the_device(opened: Communicator, library: Library, gpu: Gpu) -> None:
    library.within["broadcast"] = lambda: gpu.inside or pytest.fail("NCCL takes the thread's current device")
    opened.issue([broadcast(torch.ones(1))], known=True)
    assert gpu.visits == 2
    assert gpu.inside == 0


def test_a_factor_is_made_and_dropped(opened: Communicator, library: Library) -> None:
    call = scaled(torch.ones(2))
    opened.issue([call, scaled(torch.ones(3))], known=True)
    assert library.names == [
        *("pre_mul_sum", "pre_mul_sum", "group_start", "all_reduce", "all_reduce", "group_end"),
        *("drop_reduction", "drop_reduction"),
    ]
    assert call.factor is not None
    assert library.calls[0][1] == (call.factor.data_ptr(), DTYPES[torch.float32], "comm 1")
    assert [arguments[4] for name, arguments in library.calls if name == "all_reduce"] == [101, 102]
    assert library.made == []


@pytest.mark.parametrize(
    "wrong",
    [
        broadcast(torch.ones(1, dtype=torch.bool)),
        NcclCall("all_reduce", None, None, 1, torch.float32, reduction=RedOpType.BXOR),
        NcclCall("all_gather_v", None, None, 1, torch.float32),
    ],
    ids=["dtype", "reduction", "name"],
)
def test_a_wrong_argument_is_found_before_the_group(opened: Communicator, library: Library, wrong: NcclCall) -> None:
    good = [broadcast(torch.ones(1)), scaled(torch.ones(1))]
    with pytest.raises((KeyError, AttributeError)):
        opened.issue([*good, wrong], known=True)
    assert "group_start" not in library.names
    assert library.made == [], "the factors are dropped"
    assert not opened.knows(good)


def test_a_factor_that_cannot_be_made(opened: Communicator, library: Library) -> None:
    good = scaled(torch.ones(1))
    number = 0

    def second() -> None:
        nonlocal number
        number += 1
        if number == 2:
            raise BackendError("too many reductions")

    library.within["pre_mul_sum"] = second
    with pytest.raises(BackendError, match="too many reductions"):
        opened.issue([good, good], known=True)
    assert library.names == ["pre_mul_sum", "pre_mul_sum", "drop_reduction"]
    assert library.made == []


@pytest.mark.parametrize("also_at_the_end", [False, True])
def test_a_call_that_nccl_refuses_ends_the_group(opened: Communicator, library: Library, also_at_the_end: bool) -> None:
    error = BackendError("invalid argument")
    library.fail["broadcast"] = error
    if also_at_the_end:
        library.fail["group_end"] = BackendError("the group is spoilt")
    calls = [scaled(torch.ones(1)), broadcast(torch.ones(1)), broadcast(torch.ones(1))]
    with pytest.raises(BackendError) as caught:
        opened.issue(calls, known=True)
    assert caught.value is error
    assert library.names == ["pre_mul_sum", "group_start", "all_reduce", "broadcast", "group_end", "drop_reduction"]
    assert library.made == []
    assert not opened.knows(calls[:1])


@pytest.mark.parametrize("where", ["group_start", "group_end", "progress"])
def test_the_group_fails(opened: Communicator, library: Library, where: str) -> None:
    library.fail[where] = BackendError("remote error")
    calls = [scaled(torch.ones(1))]
    with pytest.raises(BackendError, match="remote error"):
        opened.issue(calls, known=False)
    assert library.made == []
    assert not opened.knows(calls)
    del library.fail[where]
    opened.issue(calls, known=False)  # it is none the worse
    assert opened.knows(calls)


def test_a_call_that_nccl_refuses_names_its_operation(opened: Communicator, library: Library) -> None:
    error = BackendError("invalid argument")
    library.fail["broadcast"] = error
    calls = [all_reduce(torch.ones(1), op=Barrier()), replace(broadcast(torch.ones(1)), op=Broadcast(torch.int8, 1, 0))]
    with pytest.raises(
        BackendError, match=r"^nccl could not start broadcast\(int8\[1\].*\): invalid argument$"
    ) as caught:
        opened.issue(calls, known=True)
    assert caught.value.__cause__ is error
    assert library.names == ["group_start", "all_reduce", "broadcast", "group_end"]


def test_an_interrupt_is_not_blamed_on_an_operation(opened: Communicator, library: Library) -> None:
    library.fail["all_reduce"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        opened.issue([all_reduce(torch.ones(1), op=Barrier())], known=True)
    assert library.names == ["group_start", "all_reduce", "group_end"]


def test_what_is_not_known_blocks_until_it_is_connected(opened: Communicator, library: Library) -> None:
    library.busy = 3
    opened.issue([broadcast(torch.ones(1))], known=False)
    assert [name for name, _ in library.calls] == ["group_start", "broadcast", "group_end", *["progress"] * 4]


def test_what_is_known_does_not_ask(opened: Communicator, library: Library) -> None:
    library.busy = 3
    opened.issue([broadcast(torch.ones(1))], known=True)
    assert [name for name, _ in library.calls] == ["group_start", "broadcast", "group_end"]


def held() -> bool:
    """Whether another thread is kept from issuing."""
    answers: list[bool] = []

    def ask() -> None:
        got = ISSUING.acquire(blocking=False)
        answers.append(not got)
        if got:
            ISSUING.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(SECONDS)
    return answers[0]


def test_others_are_kept_out_of_nccl_by_known_calls_only(opened: Communicator, library: Library) -> None:
    """The others may have to issue before what is not known can connect."""
    answers: list[tuple[str, bool]] = []
    for name in ("pre_mul_sum", "group_start", "all_reduce", "group_end", "drop_reduction"):
        library.within[name] = lambda name=name: answers.append((name, held()))  # type: ignore[misc]
    for known in (False, True):
        opened.issue([scaled(torch.ones(1))], known=known)
        assert {answer for _, answer in answers} == {known}, answers
        assert len(answers) == 5
        answers.clear()
        assert not held()
    library.fail["all_reduce"] = BackendError("no")
    with pytest.raises(BackendError):
        opened.issue([scaled(torch.ones(1))], known=True)
    assert not held()


def test_others_are_kept_out_of_the_calls_of_a_communicator_that_does_not_block(
    made: Communicator, library: Library
) -> None:
    """And out of its launches, once it cannot wait for other ranks any more."""
    made.open(2, 1, b"id", replace(CONFIG, blocking=False))
    library.calls.clear()
    answers: list[tuple[str, bool]] = []
    for name in ("group_start", "all_reduce", "group_end", "progress"):
        library.within[name] = lambda name=name: answers.append((name, held()))  # type: ignore[misc]
    for launching in (False, True):
        made.issue([all_reduce(torch.ones(1))], known=False)
        calls = [("group_start", True), ("all_reduce", True), ("group_end", True)]
        assert answers == [*calls, ("progress", launching)]
        answers.clear()
        assert not held()


def test_one_thread_at_a_time_asks_for_the_state(opened: Communicator, library: Library) -> None:
    inside, most = 0, 0

    def look() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    library.within["progress"] = look
    threads = [threading.Thread(target=opened.ready) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert most == 1


def test_what_is_known(opened: Communicator) -> None:
    def message(n: int, name: str = "send", peer: int = 0, dtype: torch.dtype = torch.uint8) -> NcclCall:
        return NcclCall(name, torch.empty(n), None, n, dtype, peer)

    assert opened.knows([])
    assert not opened.knows([message(700)])
    opened.issue([message(700)], known=False)
    opened.issue([message(3, peer=1)], known=False)
    for like in (message(700), message(512), message(1023), message(2, peer=1)):
        assert opened.knows([like])
    others = [message(1024), message(511), message(700, "broadcast"), message(700, peer=1), message(200)]
    others.append(message(175, dtype=torch.float32))
    for other in others:
        assert not opened.knows([other])
        assert not opened.knows([message(700), other])
    assert not opened.knows([message(700)] * 2), "together they are more, and NCCL may go another way"
    opened.issue([message(700), *others], known=False)
    assert opened.knows([message(700), *others])


def test_nothing_is_known_of_one_that_does_not_block(made: Communicator) -> None:
    """A thread of NCCL's own launches every group, so each is to be waited for."""
    made.open(2, 1, b"id", Config(blocking=False))
    calls = [broadcast(torch.ones(1))]
    made.issue(calls, known=False)
    assert not made.knows(calls)


def test_half_a_group_does_not_run() -> None:
    nccl: Any = SimulatedNccl()
    stream = SimulatedStream()
    communicator = Communicator(nccl, SimulatedDevice(), stream)
    communicator.open(1, 0, nccl.unique_id(), Config(blocking=True))
    source, target = torch.ones(2), torch.zeros(2)
    move = NcclCall("all_gather", source, target, 2, torch.float32)
    nccl.fail["broadcast"] = "not this one"
    with pytest.raises(BackendError, match="not this one"):
        communicator.issue([move, broadcast(source)], known=False)
    stream.record().passed.wait(SECONDS)
    assert target.tolist() == [0, 0]
    nccl.fail.clear()
    calls = [move, broadcast(source), scaled(source)]  # which keep the memory of the factor
    communicator.issue(calls, known=True)
    stream.record().passed.wait(SECONDS)
    assert (target.tolist(), source.tolist()) == ([1, 1], [2, 2])
    end_all(nccl, SimulatedDevice(), [communicator], abort=False)
    assert nccl.comms == []


# -- estimate ---------------------------------------------------------------------------------------------------------


def test_a_group_is_estimated_and_dropped(opened: Communicator, library: Library) -> None:
    a, b = torch.ones(4), scaled(torch.ones(2))
    assert opened.estimate([NcclCall("broadcast", None, a, 4, torch.float32, 0), b], known=True) == 0.5
    assert library.names == [
        *("pre_mul_sum", "group_start", "broadcast", "all_reduce", "group_estimate", "drop_reduction", "drop_queued")
    ]
    assert library.calls[-1][1] == (first, a.data_ptr(), opened.stream.handle)
    assert library.made == []
    assert not opened.knows([b]), "NCCL has not run it"


@pytest.mark.parametrize("where", ["pre_mul_sum", "group_start", "all_reduce", "group_estimate"])
def test_an_estimate_fails(opened: Communicator, library: Library, where: str) -> None:
    library.fail[where] = BackendError("remote error")
    with pytest.raises(BackendError, match="remote error"):
        opened.estimate([scaled(torch.ones(1))], known=True)
    assert library.made == []
    assert library.names[-1] == "drop_queued", "whatever of it NCCL has"
    ended = [name for name in library.names if name in ("group_end", "group_estimate")]
    assert len(ended) == (where in ("all_reduce", "group_estimate")), "a group that was started is ended, once"


def test_others_are_kept_out_of_nccl_while_it_estimates_what_it_knows(
    opened: Communicator, library: Library, gpu: Gpu
) -> None:
    answers: list[bool] = []
    for name in ("group_start", "all_reduce", "group_estimate", "drop_queued"):
        library.within[name] = lambda: answers.append(held() and gpu.inside == 1)
    for known in (True, False):
        opened.estimate([all_reduce(torch.ones(1))], known=known)
        assert answers == [known] * 4
        answers.clear()


def test_there_is_nothing_to_ask(opened: Communicator) -> None:
    opened.take()
    with pytest.raises(BackendError, match="was ended"):
        opened.estimate([all_reduce(torch.ones(1))], known=True)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_taken_once(opened: Communicator) -> None:
    assert opened.take() == first
    assert opened.take() is None


@pytest.fixture
def inside(opened: Communicator, library: Library) -> Iterator[threading.Event]:
    """A thread is within NCCL until this is set."""
    entered, leave = threading.Event(), threading.Event()
    library.within["broadcast"] = lambda: entered.set() or leave.wait(SECONDS)  # type: ignore[func-returns-value]
    thread = threading.Thread(target=lambda: opened.issue([broadcast(torch.ones(1))], known=True))
    thread.start()
    assert entered.wait(SECONDS)
    yield leave
    leave.set()
    thread.join(SECONDS)


def test_taking_waits_for_those_inside(
    opened: Communicator, inside: threading.Event, library: Library, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_SECONDS", SECONDS)
    ending = in_background("end", lambda: end_all(library, gpu, [opened], abort=True))  # type: ignore[arg-type]
    until(lambda: opened._shared._handle is None)
    with pytest.raises(BackendError, match="was ended"):
        opened.ready()  # nobody comes in any more
    assert "abort" not in library.names
    inside.set()
    assert ending.join(SECONDS)
    assert library.names[-2:] == ["group_end", "abort"]


def test_a_handle_is_either_put_or_taken() -> None:
    for _ in range(200):
        shared = module._SharedHandle()
        taken: list[object] = []
        thread = threading.Thread(target=lambda shared=shared, taken=taken: taken.append(shared.take()))
        thread.start()
        was_put = shared.put(7)
        thread.join()
        assert (taken == [7]) is was_put


def test_taking_does_not_wait_for_ever(
    opened: Communicator, inside: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is inside may wait for what only the abort brings."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.01)
    assert opened.take() == first


@pytest.fixture
def three(library: Any, gpu: Gpu) -> list[Communicator]:
    """Two that are open, and between them one that is not."""
    communicators = [Communicator(library, gpu, SimulatedStream()) for _ in range(3)]
    for communicator in (communicators[0], communicators[2]):
        communicator.open(2, 1, b"id", CONFIG)
    library.calls.clear()
    return communicators


def test_aborted_all_in_one_call(three: list[Communicator], library: Any, gpu: Gpu) -> None:
    library.within["abort"] = lambda: gpu.inside or pytest.fail("not in the device")
    end_all(library, gpu, three, abort=True)
    assert library.calls == [("abort", ("comm 1", "comm 2"))]
    end_all(library, gpu, three, abort=True)
    assert library.calls[1:] in ([], [("abort", ())])


def test_closed_one_after_the_other(three: list[Communicator], library: Any, gpu: Gpu) -> None:
    library.within["destroy"] = lambda: gpu.inside or pytest.fail("not in the device")
    end_all(library, gpu, three, abort=False)
    assert library.calls == [
        ("finalize", ("comm 1",)),
        ("finalize", ("comm 2",)),
        ("progress", ("comm 1",)),  # what does not block refuses to be destroyed before it is done
        ("destroy", ("comm 1",)),
        ("progress", ("comm 2",)),
        ("destroy", ("comm 2",)),
    ]


@pytest.mark.parametrize(("what", "abort"), [("finalize", False), ("destroy", False), ("abort", True)])
def test_what_goes_wrong_at_the_end_is_logged(
    three: list[Communicator],
    library: Any,
    gpu: Gpu,
    what: str,
    abort: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library.fail[what] = BackendError("remote error")
    end_all(library, gpu, three, abort=abort)
    assert "an NCCL communicator could not be ended: remote error" in caplog.text
    assert [communicator.take() for communicator in three] == [None] * 3
