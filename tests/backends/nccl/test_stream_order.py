"""A batch on its way through a stream: what waits for it, and when its event is given back."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.errors import BackendError
from tests.sampling import examples

from .conftest import World
from .simulation import SimulatedBackend

SECONDS = 30.0  # after which a wait in here is a hang


class Mark:
    """An event."""

    def __init__(self) -> None:
        self.releases = 0


class Line:
    """A stream, which takes notes; ``within`` is called by whoever makes it wait."""

    def __init__(self) -> None:
        self.waited: list[Mark] = []
        self.within: Callable[[], object] = lambda: None

    def wait(self, event: Mark) -> None:
        assert not event.releases, "it may be somebody else's by now"
        self.within()
        assert not event.releases, "given back while a stream is being told of it"
        self.waited.append(event)


class Gpu:
    """A device of two streams: the current one, and another."""

    def __init__(self) -> None:
        self.current, self.other = Line(), Line()

    def current_stream(self) -> Line:
        return self.current

    def wrap(self, stream: object) -> Line:
        assert stream == "other"
        return self.other

    def release(self, event: Mark) -> None:
        event.releases += 1


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def flight_on(gpu: Any, *, immediate: bool = True) -> StreamPosition:
    return StreamPosition(gpu, immediate=immediate)


def in_threads(*functions: Callable[[], object]) -> None:
    """Run them at once; raises what one of them does."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        start.wait(SECONDS)
        try:
            function()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    for error in errors:
        raise error


def test_issued_then_passed(gpu: Gpu) -> None:
    flight, event = flight_on(gpu), Mark()
    assert (flight.issued, flight.over, flight.captured) == (False, False, False)
    flight.issue(event)
    assert (flight.issued, flight.over) == (True, False)
    flight.order(None)
    flight.order("other")  # type: ignore[arg-type]
    assert (gpu.current.waited, gpu.other.waited) == ([event], [event])
    assert event.releases == 0
    flight.pass_()
    assert (flight.issued, flight.over) == (True, True)
    assert event.releases == 1
    flight.order(None)
    flight.pass_()
    assert gpu.current.waited == [event], "what has passed needs no order"
    assert event.releases == 1


def test_it_says_whether_it_is_prompt(gpu: Gpu) -> None:
    assert flight_on(gpu).immediate
    assert not flight_on(gpu, immediate=False).immediate


def test_passed_before_it_is_issued(gpu: Gpu) -> None:
    """The poller saw the event pass before the issuing thread came to say that there is one."""
    flight, event = flight_on(gpu), Mark()
    flight.pass_()
    assert (flight.issued, flight.over) == (True, True)
    flight.order(None)
    flight.issue(event)
    assert event.releases == 1
    flight.order(None)
    assert gpu.current.waited == []
    assert event.releases == 1


def test_never_issued(gpu: Gpu) -> None:
    flight = flight_on(gpu)
    heard: list[None] = []
    flight.listen(lambda: heard.append(None))
    flight.pass_()
    assert heard == [None]
    flight.order(None)
    assert gpu.current.waited == []


def test_listeners(gpu: Gpu) -> None:
    flight = flight_on(gpu)
    heard: list[str] = []
    flight.listen(lambda: heard.append("first"))
    flight.listen(lambda: heard.append("second"))
    assert heard == []
    flight.issue(Mark())
    assert heard == ["first", "second"]
    flight.listen(lambda: heard.append("late"))
    assert heard == ["first", "second", "late"]
    flight.pass_()
    assert heard[:3] == ["first", "second", "late"]
    assert set(heard[3:]) <= {"late"}, "maybe twice, but the early ones are forgotten"


def test_a_listener_sees_it_issued(gpu: Gpu) -> None:
    flight, event = flight_on(gpu), Mark()
    flight.listen(lambda: flight.order(None))
    flight.issue(event)
    assert gpu.current.waited == [event]


def test_a_captured_event_is_the_graphs_for_good(gpu: Gpu) -> None:
    flight, event = flight_on(gpu), Mark()
    flight.issue(event, captured=True)
    assert flight.captured
    flight.order(None)
    flight.pass_()
    flight.order(None)
    assert not flight.over, "it runs again and again"
    assert gpu.current.waited == [event, event]
    assert event.releases == 0


def test_not_given_back_while_a_thread_has_a_stream_wait(gpu: Gpu) -> None:
    flight, event = flight_on(gpu), Mark()
    flight.issue(event)
    gpu.current.within = flight.pass_
    flight.order(None)
    assert event.releases == 1, "once that is over"


def test_the_last_of_several_gives_it_back(gpu: Gpu) -> None:
    flight, event = flight_on(gpu), Mark()
    flight.issue(event)
    both = threading.Barrier(3)
    leave = {line: threading.Event() for line in (gpu.current, gpu.other)}
    for line, may_go in leave.items():
        line.within = lambda may_go=may_go: (both.wait(SECONDS), may_go.wait(SECONDS))  # type: ignore[misc]
    threads = [threading.Thread(target=flight.order, args=(stream,)) for stream in (None, "other")]
    for thread in threads:
        thread.start()
    both.wait(SECONDS)
    flight.pass_()
    assert event.releases == 0
    leave[gpu.current].set()
    threads[0].join(SECONDS)
    assert event.releases == 0
    leave[gpu.other].set()
    threads[1].join(SECONDS)
    assert event.releases == 1
    assert len(gpu.current.waited + gpu.other.waited) == 2


def test_a_stream_that_cannot_wait(gpu: Gpu) -> None:
    flight, event = flight_on(gpu), Mark()
    flight.issue(event)

    def fail() -> None:
        raise RuntimeError("no such stream")

    gpu.current.within = fail
    with pytest.raises(RuntimeError, match="no such stream"):
        flight.order(None)
    flight.pass_()
    assert event.releases == 1


STEPS = ["issue", "pass", "order", "listen"]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("steps", list(itertools.permutations(STEPS)), ids="-".join)
def test_any_order(gpu: Gpu, steps: tuple[str, ...], captured: bool) -> None:
    flight, event = flight_on(gpu), Mark()
    heard: list[bool] = []
    for step in steps:
        match step:
            case "issue":
                flight.issue(event, captured=captured)
            case "pass":
                flight.pass_()
            case "order" if flight.issued:
                flight.order(None)
            case "listen":
                flight.listen(lambda: heard.append(flight.issued))
    assert heard
    assert all(heard)
    passed_first = steps.index("pass") < steps.index("issue")
    if not (captured and passed_first):  # which nobody does
        assert event.releases == (not captured)


@examples(200)
@given(st.lists(st.sampled_from([*STEPS, "inside"]), max_size=20), st.booleans())
def test_given_back_exactly_once_and_as_soon_as_can_be(steps: list[str], captured: bool) -> None:
    gpu = Gpu()
    flight, event = flight_on(gpu), Mark()
    issued = passed = False
    heard: list[None] = []
    for step in steps:
        match step:
            case "issue" if not issued and not (captured and passed):
                flight.issue(event, captured=captured)
                issued = True
            case "pass":
                flight.pass_()
                passed = True
            case "order" if flight.issued:
                flight.order(None)
            case "inside" if flight.issued and issued:
                gpu.current.within = flight.pass_
                flight.order(None)
                gpu.current.within = lambda: None
                passed = passed or bool(gpu.current.waited)
            case "listen":
                before = len(heard)
                flight.listen(lambda: heard.append(None))
                assert len(heard) - before == flight.issued
        assert flight.issued == (issued or passed)
        assert event.releases == (issued and flight.over)


def test_threads_at_once() -> None:
    for i in range(300):
        gpu = Gpu()
        flight, event = flight_on(gpu), Mark()
        heard = [threading.Event() for _ in range(2)]

        def wait(n: int, flight: StreamPosition = flight, heard: list[threading.Event] = heard) -> None:
            flight.listen(heard[n].set)
            assert heard[n].wait(SECONDS), "a listener was lost"
            flight.order(None)

        def issue(flight: StreamPosition = flight, event: Mark = event) -> None:
            flight.issue(event)

        in_threads(issue, flight.pass_, *(lambda n=n, wait=wait: wait(n) for n in range(2 if i % 2 else 1)))
        assert event.releases == 1


# -- of a backend -----------------------------------------------------------------------------------------------------


async def test_what_could_not_be_issued_is_waited_for_until_it_fails(world: World) -> None:
    """It is over, but no stream can be ordered after it: nothing was reduced."""
    async with world(1) as (comm,):
        backend = comm.unsafe_get_backend()
        assert isinstance(backend, SimulatedBackend)
        backend.nccl.fail["all_reduce"] = "no connection"
        tensor = torch.ones(2)
        with pytest.raises(BackendError, match="no connection"):
            await asyncio.to_thread(lambda: comm.all_reduce(tensor).wait())
