"""The lock of the progress engine."""

from __future__ import annotations

import threading

import pytest

from asynccomm.backends.shm.combining_lock import CombiningLock


def always() -> bool:
    return True


def test_a_free_lock_serves_at_once_and_is_free_again() -> None:
    lock = CombiningLock()
    served: list[int] = []
    assert lock.run(always, served.append, lock.release, 7)
    assert lock.run(always, served.append, lock.release, 8)
    assert served == [7, 8]
    assert not lock.requested


def test_the_holder_serves_the_request_of_a_thread_that_finds_the_lock_taken() -> None:
    lock = CombiningLock()
    served: list[str] = []
    ran: list[bool] = []

    def other() -> None:
        ran.append(lock.run(always, served.append, lock.release, "other"))

    def serve(name: str) -> None:
        served.append(name)
        if len(served) == 1:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    assert lock.run(always, serve, lock.release, "holder")
    assert ran == [False]
    assert served == ["holder", "holder"]  # the second time for the other thread


def test_a_request_between_the_last_check_and_the_release_is_served() -> None:
    lock = CombiningLock()
    served: list[int] = []

    def release() -> None:
        if len(served) == 1:
            assert not lock.run(always, served.append, lock.release, 2)  # the lock is still held
        lock.release()

    assert lock.run(always, served.append, release, 1)
    assert served == [1, 1]


def test_a_request_that_may_not_be_served_stays() -> None:
    lock = CombiningLock()
    served: list[int] = []
    assert not lock.run(lambda: False, served.append, lock.release, 1)
    assert not served
    assert lock.requested
    assert lock.acquire(blocking=False)


def test_the_lock_is_released_after_an_exception() -> None:
    lock = CombiningLock()

    def serve() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lock.run(always, serve, lock.release)
    assert lock.acquire(blocking=False)
