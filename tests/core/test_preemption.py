"""All ranks learn of a SIGTERM in the same step. The signal: tests/test_runner.py; whole jobs: cli/test_launch.py."""

import os
import signal
from collections.abc import Iterable

import pytest

from asynccomm import Comm
from asynccomm.core.preemption import Preemption, preemption


@pytest.mark.ranks(3)
async def test_all_ranks_learn_of_it_in_the_same_step(comm: Comm) -> None:
    answers = []
    try:
        for step in range(4):
            preemption.requested = preemption.requested or (step, comm.rank) == (2, 1)
            answers.append(await comm.preempted())
    finally:
        preemption.requested = preemption.polled = False
    assert answers == [False, False, True, True]


@pytest.mark.parametrize("raising", [signal.SIG_BLOCK, signal.SIG_SETMASK])
def test_the_exception_of_a_handler_leaves_sigterm_allowed_after_the_next_fork(
    raising: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = signal.pthread_sigmask

    def interrupted(how: int, mask: Iterable[int]) -> set[int]:
        before = change(how, mask)
        if how == raising and (mask or how != signal.SIG_BLOCK):  # not where the mask is only read
            raise KeyboardInterrupt  # of a handler, which Python calls at the end of each change
        return before

    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    watch = Preemption()
    watch._handler = object()
    before = change(signal.SIG_BLOCK, [])
    for interrupts in (True, False):
        monkeypatch.setattr(signal, "pthread_sigmask", interrupted if interrupts else change)
        for step in (watch._hold, watch._release):
            try:
                step()
            except KeyboardInterrupt:
                assert interrupts
        if raising == signal.SIG_SETMASK:
            assert not hasattr(watch._forking, "before"), "the program may have changed its mask before the next fork"
    assert change(signal.SIG_BLOCK, []) == before
