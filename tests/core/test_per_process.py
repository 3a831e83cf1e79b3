"""Objects of which each process has one."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from asynccomm.core.per_process import PerProcess


def test_one_object_is_made_when_it_is_first_needed() -> None:
    made: list[object] = []
    start = threading.Barrier(4)

    def make() -> object:
        made.append(object())
        return made[-1]

    one = PerProcess(make)
    assert one.made is None

    def get() -> object:
        start.wait(10)
        return one()

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(get) for _ in range(4)]
        assert {id(each.result()) for each in found} == {id(made[0])}
    assert one.made is made[0]
    assert len(made) == 1


def test_a_forked_child_forgets_the_object_of_its_parent_even_if_one_was_being_made() -> None:
    forgotten: list[int] = []
    one = PerProcess(os.getpid, forgotten.append)
    assert one() == os.getpid()
    with one._making:
        pid = os.fork()
        if not pid:
            right = (forgotten, one(), one.made) == ([os.getppid()], os.getpid(), os.getpid())
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (forgotten, one.made) == ([], os.getpid())
