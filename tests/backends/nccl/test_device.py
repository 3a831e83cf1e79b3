"""CUDA as the backend sees it, on machines that have none: what is missing is named, and fakes play the driver."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from asynccomm.backends.nccl import device as module
from asynccomm.backends.nccl.device import Cuda
from asynccomm.backends.nccl.event_pool import POOLED
from asynccomm.errors import BackendError

DEVICE = torch.device("cuda", 1)


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Driver(ModuleType):
    """cuda-python's, as far as it is used."""

    CUresult = Result
    CUstreamCaptureStatus = SimpleNamespace(
        CU_STREAM_CAPTURE_STATUS_NONE="none",
        CU_STREAM_CAPTURE_STATUS_ACTIVE="active",
        CU_STREAM_CAPTURE_STATUS_INVALIDATED="invalidated",
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(
        CU_STREAM_CAPTURE_MODE_GLOBAL="global", CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="thread local"
    )

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.events: dict[int, Result] = {}
        self.modes = threading.local()
        self.bound = threading.local()  # by thread, its context
        self.streams: list[tuple[int, int]] = []  # flags and priorities
        self.result = Result.CUDA_SUCCESS
        self.captures: dict[int, tuple[Any, ...]] = {}  # what is known of streams

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return (*self.captures[stream], "graph", "nodes", "edges", 1)

    def cuEventQuery(self, event: int) -> tuple[Result]:
        return (self.events[event],)

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Result, str]:
        before = getattr(self.modes, "mode", "global")
        self.modes.mode = mode
        return Result.CUDA_SUCCESS, before

    def cuDeviceGet(self, index: int) -> tuple[Result, str]:
        return Result.CUDA_SUCCESS, f"device {index}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Result, str]:
        return Result.CUDA_SUCCESS, f"context of {device}"

    def cuCtxSetCurrent(self, context: str) -> tuple[Result]:
        self.bound.context = context
        return (Result.CUDA_SUCCESS,)

    def has_context(self) -> bool:
        return hasattr(self.bound, "context")

    def cuCtxGetStreamPriorityRange(self) -> tuple[Result, int, int]:
        assert self.has_context(), "this thread has no context"
        return self.result, 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Result, int]:
        self.streams.append((flags, priority))
        return self.result, 1000 + len(self.streams)


class FakeEvent:
    handles = iter(range(1, 1 << 30))

    def __init__(self) -> None:
        self.cuda_event = next(self.handles)
        self.recorded: list[object] = []

    def record(self, stream: object) -> None:
        self.recorded.append(stream)


class FakeStream:
    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream, self.device = handle, device
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class FakeTorch:
    """``torch.cuda``: what is current."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self.current: list[object] = [FakeStream(7, DEVICE)]
        self.capturing = False
        self.made = 0  # objects of current streams

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        try:
            yield
        finally:
            self.devices.pop()

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def set_device(self, device: torch.device) -> None:
        self.devices = [device]

    def current_device(self) -> int:
        return self.devices[-1].index if self.devices else 0

    def current_stream(self, device: torch.device) -> Any:
        assert device == DEVICE
        self.made += 1
        return self.current[-1]

    def handle(self, index: int) -> int:
        assert index == DEVICE.index
        stream: Any = self.current[-1]
        return int(stream.cuda_stream)

    def is_current_stream_capturing(self) -> bool:
        assert self.devices[-1:] == [DEVICE], "asked for another device"
        return self.capturing


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("device", "stream", "set_device", "current_device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", fake.handle, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "ExternalStream", FakeStream)
    monkeypatch.setattr(module, "_streams", {})
    return fake


@pytest.fixture
def cuda(fake: FakeTorch, driver: Driver) -> Cuda:
    return Cuda(DEVICE)


# -- what is missing -----------------------------------------------------------------------------------------------


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendError, match="needs a GPU, but this torch is built without CUDA; `asynccomm doctor`"):
        Cuda(DEVICE)


def test_a_torch_for_gpus_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """They call themselves cuda, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendError, match="this torch is built without CUDA"):
        Cuda(DEVICE)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(BackendError, match=r"needs a GPU, but torch \(CUDA 12.8\) finds no GPU here"):
        Cuda(DEVICE)


@pytest.mark.parametrize("major", ["12", "13"])
def test_no_cuda_python(monkeypatch: pytest.MonkeyPatch, major: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", f"{major}.4")
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=rf"needs the package cuda-python: install asynccomm\[cu{major}\]") as found:
        Cuda(DEVICE)
    assert isinstance(found.value.__cause__, ImportError)


# -- events --------------------------------------------------------------------------------------------------------


def test_a_query_has_three_outcomes(cuda: Cuda, driver: Driver) -> None:
    event = cuda.events.take()
    driver.events[event.cuda_event] = Result.CUDA_ERROR_NOT_READY
    assert cuda.query(event) is False
    driver.events[event.cuda_event] = Result.CUDA_SUCCESS
    assert cuda.query(event) is True
    driver.events[event.cuda_event] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(BackendError, match="CUDA failed on cuda:1: CUDA_ERROR_ILLEGAL_ADDRESS"):
        cuda.query(event)


def test_events_are_used_again(cuda: Cuda) -> None:
    stream = cuda.current_stream()
    event = stream.record()
    assert event.recorded == [cuda.current_stream().stream]  # type: ignore[attr-defined]
    other = stream.record()
    assert other is not event
    cuda.release(event)
    assert stream.record() is event
    assert stream.record() is not event


def test_events_that_are_captured_are_not_used_again(cuda: Cuda) -> None:
    stream = cuda.current_stream()
    first = stream.record()
    cuda.release(first)
    captured = stream.record(captured=True)
    assert captured is not first, "a graph keeps its events for good"
    assert stream.record() is first


def test_only_so_many_events_are_kept(cuda: Cuda) -> None:
    events = [cuda.events.take() for _ in range(POOLED + 15)]
    for event in events:
        cuda.release(event)
    again = [cuda.events.take() for _ in range(POOLED + 15)]
    assert len(set(map(id, again)) & set(map(id, events))) == POOLED
    assert len(set(map(id, again))) == POOLED + 15


def test_events_from_many_threads(cuda: Cuda) -> None:
    used: set[int] = set()
    errors: list[str] = []
    lock = threading.Lock()

    def use() -> None:
        for _ in range(300):
            event = cuda.events.take()
            with lock:
                if id(event) in used:
                    errors.append("two threads have the same event")
                used.add(id(event))
            with lock:
                used.discard(id(event))
            cuda.release(event)

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# -- captures ------------------------------------------------------------------------------------------------------


def mode(driver: Driver) -> str:
    return getattr(driver.modes, "mode", "global")


def test_looking_lasts_as_long_as_it_is_within(cuda: Cuda, driver: Driver) -> None:
    with cuda.looking():
        assert mode(driver) == "thread local"
        with cuda.looking():
            assert mode(driver) == "thread local"
        assert mode(driver) == "thread local", "an inner one gives back what it found"
    assert mode(driver) == "global"
    with pytest.raises(KeyError), cuda.looking():
        raise KeyError
    assert mode(driver) == "global"


def test_streams_are_made_on_threads_that_never_used_the_device(cuda: Cuda, driver: Driver) -> None:
    made: list[object] = []
    thread = threading.Thread(target=lambda: made.append(cuda.new_stream(high_priority=False)))
    thread.start()
    thread.join()
    assert len(made) == 1


def test_a_thread_that_enters_stays_so(cuda: Cuda, driver: Driver, fake: FakeTorch) -> None:
    modes: list[str] = []

    def main() -> None:
        cuda.enter()
        with cuda.looking():
            pass
        modes.append(mode(driver))
        assert driver.has_context()

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    assert modes == ["thread local"]
    assert mode(driver) == "global", "another thread's is its own"
    assert fake.devices == [DEVICE]


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ((Result.CUDA_SUCCESS, "none", None), 0),
        ((Result.CUDA_SUCCESS, "active", 12), 12),
        ((Result.CUDA_SUCCESS, "invalidated", None), -1),
        ((Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, None, None), 0),
    ],
)
@pytest.mark.parametrize("newer", [False, True])
def test_which_capture_a_stream_is_part_of(
    cuda: Cuda, driver: Driver, answer: tuple[Any, ...], number: int, newer: bool
) -> None:
    stream = cuda.wrap(FakeStream(9, DEVICE))
    if newer:  # of an older cuda-python, whose first function cannot tell of every graph
        driver.cuStreamGetCaptureInfo_v3 = driver.cuStreamGetCaptureInfo  # type: ignore[attr-defined]
        driver.cuStreamGetCaptureInfo = None  # type: ignore[assignment,method-assign]
        cuda = Cuda(DEVICE)
    driver.captures[9] = answer
    assert cuda.capture_of(stream) == number


def test_which_capture_cannot_be_found_out(cuda: Cuda, driver: Driver) -> None:
    driver.captures[9] = (Result.CUDA_ERROR_INVALID_VALUE, None, None)
    with pytest.raises(BackendError, match="CUDA could not look up whether a stream is captured on cuda:1"):
        cuda.capture_of(cuda.wrap(FakeStream(9, DEVICE)))


def test_capturing_is_asked_of_the_right_device(cuda: Cuda, fake: FakeTorch) -> None:
    assert not cuda.capturing()
    fake.capturing = True
    assert cuda.capturing()
    assert fake.devices == []
    with cuda.here():
        assert fake.devices == [DEVICE]
        with cuda.here():
            assert fake.devices == [DEVICE], "it is the current one"
            assert cuda.capturing()


def test_objects_of_current_streams_are_kept(cuda: Cuda, fake: FakeTorch) -> None:
    first, second = FakeStream(3, DEVICE), FakeStream(4, DEVICE)
    for _ in range(3):
        for stream in (first, second):
            fake.current = [stream]
            found = cuda.current_stream()
            assert isinstance(found, module._CudaStream)
            assert found.stream is stream
    assert fake.made == 2
    for number in range(2 * module.STREAMS_KEPT):
        fake.current = [FakeStream(100 + number, DEVICE)]
        assert cuda.current_stream().handle == 100 + number
        assert len(cuda._current) <= module.STREAMS_KEPT


# -- streams -------------------------------------------------------------------------------------------------------


def test_streams_are_made_with_a_priority_and_used_again_with_the_same(cuda: Cuda, driver: Driver) -> None:
    low, high = cuda.new_stream(high_priority=False), cuda.new_stream(high_priority=True)
    assert driver.streams == [(1, 0), (1, -5)], "flags and priorities"
    assert (low.handle, high.handle) == (1001, 1002)
    cuda.end_stream(low)
    assert cuda.new_stream(high_priority=True).handle == 1003
    assert cuda.new_stream(high_priority=False).handle == 1001
    assert cuda.new_stream(high_priority=False).handle == 1004
    cuda.end_stream(high)
    again = cuda.new_stream(high_priority=True)
    assert again.handle == 1002
    cuda.end_stream(again)
    assert cuda.new_stream(high_priority=True).handle == 1002, "it keeps its priority"
    assert len(driver.streams) == 4


def test_streams_are_shared_among_comms_of_one_device_alone(cuda: Cuda, driver: Driver) -> None:
    stream = cuda.new_stream(high_priority=False)
    cuda.end_stream(stream)
    other = Cuda(torch.device("cuda", 0)).new_stream(high_priority=False)
    assert other.handle != stream.handle
    assert Cuda(DEVICE).new_stream(high_priority=False).handle == stream.handle
    made: Any = other
    assert made.stream.device == torch.device("cuda", 0)


def test_a_stream_that_cannot_be_made(cuda: Cuda, driver: Driver, fake: FakeTorch) -> None:
    driver.result = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(BackendError, match="CUDA could not look up the priorities of streams on cuda:1: CUDA_ERROR_IN"):
        cuda.new_stream(high_priority=False)
    assert fake.devices == []
    driver.result = Result.CUDA_SUCCESS
    assert cuda.new_stream(high_priority=False).handle == 1001


def test_what_a_stream_does(cuda: Cuda, fake: FakeTorch) -> None:
    theirs = FakeStream(42, DEVICE)
    stream, other = cuda.wrap(theirs), cuda.new_stream(high_priority=False)
    assert stream.handle == 42
    event = stream.record()
    assert event.recorded == [theirs]
    other.wait(event)
    current: list[object] = []
    other.run(lambda: current.append(fake.current[-1]))
    stream.run(lambda: current.append(fake.current[-1]))
    with cuda.allocating(stream):
        current.append(fake.current[-1])
    ours: Any = other
    assert ours.stream.waited == [event]
    assert current == [ours.stream, theirs, theirs]
    assert len(fake.current) == 1


def test_memory_belongs_to_the_device_it_lies_on(cuda: Cuda) -> None:
    assert not cuda.owns(torch.ones(3))
    assert not cuda.owns(torch.ones(3, device="meta"))


def test_memory_of_another_owner_is_lent_to_torch(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[Any, torch.device]] = []

    def as_tensor(data: Any, device: torch.device) -> str:
        assert not torch.is_inference_mode_enabled()
        taken.append((data, device))
        return "tensor"

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    owner = object()
    with torch.inference_mode():
        assert cuda.bytes_at(4096, 100, owner) == "tensor"  # type: ignore[comparison-overlap]
    ((data, device),) = taken
    assert device == DEVICE
    assert data.owner is owner
    interface = data.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"], interface["data"]) == ((100,), "|u1", (4096, False))


def test_the_device_is_waited_for(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    cuda.synchronize()
    assert waited == [DEVICE]


def test_memory_is_made_and_lent_for_a_stream(cuda: Cuda, fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, object, bool]] = []

    def empty(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> str:
        assert (dtype, device) == (torch.uint8, DEVICE)
        made.append((nbytes, fake.current[-1], torch.is_inference_mode_enabled()))
        return "memory"

    monkeypatch.setattr(torch, "empty", empty)
    stream: Any = cuda.new_stream(high_priority=False)
    with torch.inference_mode():
        memory: Any = cuda.empty(9, stream)
    assert memory == "memory"
    assert made == [(9, stream.stream, False)]
    lent: list[object] = []
    tensor: Any = SimpleNamespace(record_stream=lent.append)
    cuda.lend(tensor, stream)
    assert lent == [stream.stream]
