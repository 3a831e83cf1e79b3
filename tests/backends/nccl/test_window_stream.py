"""The stream of a window: the calls of one rank, and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from asynccomm.backends.nccl.api import Config
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.nccl.window_memory import WindowMemory
from asynccomm.backends.nccl.window_stream import WindowStream
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops import WindowInfo
from asynccomm.ops.validation import CommInfo

from .simulation import LIMIT, SimulatedDevice, SimulatedNccl, SimulatedStream

INFO = WindowInfo(CommInfo("test", 0, 1, torch.device("cpu")), 0, (64,), 1)


@pytest.fixture
def runtime() -> Iterator[DeviceRuntime]:
    made = DeviceRuntime(SimulatedNccl(), SimulatedDevice())
    yield made
    made.leave()


def opened(runtime: DeviceRuntime, errors: list[BrokenError]) -> tuple[WindowStream, WindowMemory]:
    made = WindowStream(runtime, high_priority=False, on_error=errors.append)
    memory = WindowMemory(runtime.nccl, runtime.device, INFO)
    try:
        made.open(1, 0, runtime.nccl.unique_id(), Config(blocking=True), memory)
    except BaseException:
        made.end()
        raise
    return made, memory


def test_calls_of_one_rank(runtime: DeviceRuntime) -> None:
    errors: list[BrokenError] = []
    stream, memory = opened(runtime, errors)
    nccl = runtime.nccl
    assert isinstance(nccl, SimulatedNccl)
    assert not nccl.configs[-1].blocking
    own, _ = memory.tensors(runtime.device)
    assert not own.count_nonzero()
    own[:4].fill_(7)
    over = threading.Event()
    with stream.lock:
        stream.put(memory.address, 4, 0, 32)
        stream.wait({0: 1})
        position = StreamPosition(runtime.device)
        stream.when_passed(position, over.set, own)
    assert over.wait(LIMIT)
    assert own[32:36].tolist() == [7] * 4
    assert not errors
    stream.end()
    assert nccl.calls[:5] == ["mem_alloc", "init", "window_register", "put_signal", "wait_signal"]
    assert nccl.calls[5:] == ["window_deregister", "abort"]
    stream.give_back()
    assert stream.communicator.stream.ended  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match="ended"):
        stream.wait({0: 1})


def test_memory_that_cannot_be_a_window(runtime: DeviceRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedNccl, "window_register", lambda *args: None)
    with pytest.raises(BackendError, match=r"^NCCL 2.30.7 has no windows between these GPUs$"):
        opened(runtime, [])


def test_a_wait_for_an_event_ends_with_the_window(runtime: DeviceRuntime) -> None:
    stream, _ = opened(runtime, [])
    user, gate = SimulatedStream(), threading.Event()
    assert stream.passed(user.record())
    user.put(lambda: gate.wait(LIMIT))
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(stream.passed(user.record())))
    waiting.start()
    stream.end()
    waiting.join(LIMIT)
    assert results == [False]
    gate.set()
