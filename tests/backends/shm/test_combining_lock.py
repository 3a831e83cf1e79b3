"""The lock of the progress engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from asynccomm.backends.shm.combining_lock import ANY_TIME, AT_ONCE, CombiningLock, within
from tests.interrupts import interrupted


def always() -> bool:
    return True


def nothing(*results: object) -> tuple[()]:
    return ()


def run(lock: CombiningLock, serve: Callable[..., object], *args: object) -> bool:
    return lock.run(always, serve, nothing, nothing, *args)


def test_a_free_lock_serves_at_once_and_is_free_again() -> None:
    lock = CombiningLock()
    served: list[int] = []
    assert run(lock, served.append, 7)
    assert run(lock, served.append, 8)
    assert served == [7, 8]
    assert not lock.requested
    assert not lock.locked()


def test_results_are_taken_with_the_lock_and_finished_without() -> None:
    lock = CombiningLock()
    seen: list[object] = []

    def take() -> tuple[int, str]:
        seen.append(lock.locked())
        return 1, "result"

    def finish(number: int, text: str) -> None:
        seen.extend([number, text, lock.locked()])

    assert lock.hold(ANY_TIME, nothing, take, finish)
    assert seen == [True, 1, "result", False]
    with pytest.raises(ZeroDivisionError):
        lock.hold(AT_ONCE, lambda: 1 // 0, take, finish)
    assert seen == [True, 1, "result", False] * 2


def test_a_taken_lock_is_not_held() -> None:
    lock = CombiningLock()
    found: list[bool] = []

    def serve() -> None:
        found.extend(lock.hold(each, nothing, nothing, nothing) for each in (AT_ONCE, within(0.001)))

    assert lock.hold(within(1), serve, nothing, nothing)
    assert found == [False, False]
    assert not lock.locked()


def test_the_holder_serves_the_request_of_a_thread_that_finds_the_lock_taken() -> None:
    lock = CombiningLock()
    served: list[str] = []
    ran: list[bool] = []

    def other() -> None:
        ran.append(run(lock, served.append, "other"))

    def serve(name: str) -> None:
        served.append(name)
        if len(served) == 1:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    assert run(lock, serve, "holder")
    assert ran == [False]
    assert served == ["holder", "holder"]  # the second time for the other thread


def test_a_request_between_the_last_check_and_the_release_is_served() -> None:
    lock = CombiningLock()
    served: list[int] = []

    def take() -> tuple[()]:
        if len(served) == 1:
            assert not run(lock, served.append, 2)  # the lock is still held
        return ()

    assert lock.run(always, served.append, take, nothing, 1)
    assert served == [1, 1]


def test_a_request_that_may_not_be_served_stays() -> None:
    lock = CombiningLock()
    served: list[int] = []
    assert not lock.run(lambda: False, served.append, nothing, nothing, 1)
    assert not served
    assert lock.requested
    assert not lock.locked()


def test_the_lock_is_released_after_an_exception() -> None:
    lock = CombiningLock()

    def fail(*_: object) -> tuple[()]:
        raise KeyboardInterrupt

    for serve, take, finish in ((fail, nothing, nothing), (nothing, fail, nothing), (nothing, nothing, fail)):
        with pytest.raises(KeyboardInterrupt):
            lock.run(always, serve, take, finish)
        assert not lock.locked()


def test_a_signal_leaves_the_lock_released_wherever_it_arrives() -> None:
    lock = CombiningLock()

    def check() -> None:
        assert not lock.locked()

    interrupted(2000, lambda: run(lock, nothing), check)
