"""What comms of one device share, with a device that is none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from asynccomm.backends.nccl import shared as module
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.errors import BackendError, ClosedError

from .simulation import SimulatedDevice, SimulatedNccl

PATIENCE = 20.0
CUDA0, CUDA1 = torch.device("cuda", 0), torch.device("cuda", 1)


class Made:
    """What was loaded and made."""

    def __init__(self) -> None:
        self.loaded = 0
        self.devices: list[torch.device] = []
        self.error: Exception | None = None

    def load(self) -> SimulatedNccl:
        self.loaded += 1
        return SimulatedNccl()

    def device(self, device: torch.device) -> SimulatedDevice:
        if self.error is not None:
            raise self.error
        self.devices.append(device)
        return SimulatedDevice()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    made = Made()
    monkeypatch.setattr(module, "load", made.load)
    monkeypatch.setattr(module, "Cuda", made.device)
    yield made
    assert not module._shared, "a platform was left"


def pollers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "asynccomm-nccl"]


def start(platform: DeviceRuntime) -> None:
    """Give the poller something, so that it has a thread."""
    asked = threading.Event()

    def question() -> bool:
        asked.set()
        return False

    platform.poller.ask(question)
    assert asked.wait(PATIENCE)


def test_one_for_each_device(made: Made) -> None:
    platforms = [DeviceRuntime.of(device) for device in (CUDA0, CUDA1, CUDA0)]
    assert platforms[0] is platforms[2]
    assert platforms[0] is not platforms[1]
    assert made.devices == [CUDA0, CUDA1]
    assert platforms[0].poller is not platforms[1].poller
    for platform in platforms:
        platform.leave()


def test_the_thread_ends_with_the_last_user(made: Made) -> None:
    before = len(pollers())
    platforms = [DeviceRuntime.of(CUDA0) for _ in range(3)]
    assert len(pollers()) == before, "there is no thread before there is something to do"
    start(platforms[0])
    assert len(pollers()) == before + 1
    for platform in platforms[1:]:
        platform.leave()
        start(platform)
    platforms[0].leave()
    assert len(pollers()) == before
    with pytest.raises(ClosedError):
        platforms[0].poller.ask(lambda: False)


def test_the_next_one_is_new(made: Made) -> None:
    first = DeviceRuntime.of(CUDA0)
    first.leave()
    second = DeviceRuntime.of(CUDA0)
    assert second is not first
    start(second)
    second.leave()
    assert made.devices == [CUDA0, CUDA0]


def test_one_of_its_own_is_shared_with_nobody(made: Made) -> None:
    alone = DeviceRuntime(SimulatedNccl(), SimulatedDevice())
    shared = DeviceRuntime.of(CUDA0)
    start(alone)
    alone.leave()
    with pytest.raises(ClosedError):
        alone.poller.ask(lambda: False)
    assert DeviceRuntime.of(CUDA0) is shared
    shared.leave()
    shared.leave()


def test_errors_leave_nothing_behind(made: Made) -> None:
    made.error = BackendError("there is no GPU")
    for _ in range(2):
        with pytest.raises(BackendError, match="no GPU"):
            DeviceRuntime.of(CUDA0)
        assert not module._shared
    made.error = None
    platform = DeviceRuntime.of(CUDA0)
    made.error = BackendError("another one")
    with pytest.raises(BackendError, match="another one"):
        DeviceRuntime.of(CUDA1)
    assert DeviceRuntime.of(CUDA0) is platform, "one that is there is not made again"
    platform.leave()
    platform.leave()


def together(count: int, step: Callable[[int], object]) -> None:
    """Run ``step`` on threads that begin together."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        barrier.wait(PATIENCE)
        try:
            step(i)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_threads_that_race_get_the_same(made: Made) -> None:
    for _ in range(20):
        found: list[DeviceRuntime] = []
        together(8, lambda _, found=found: found.append(DeviceRuntime.of(CUDA0)))
        assert len(found) == 8
        assert len(set(map(id, found))) == 1
        together(8, lambda i, found=found: found[i].leave())
        assert not module._shared
    assert len(made.devices) == 20


def test_threads_that_come_and_go_always_have_one_that_works(made: Made) -> None:
    before = len(pollers())

    def come_and_go(i: int) -> None:
        for turn in range(30):
            platform = DeviceRuntime.of((CUDA0, CUDA1)[(i + turn) % 2])
            start(platform)
            platform.leave()

    together(6, come_and_go)
    assert not module._shared
    assert len(pollers()) == before
