"""All ranks learn of a SIGTERM in the same step. The signal: tests/test_runner.py; whole jobs: cli/test_launch.py."""

import pytest

from asynccomm import Comm
from asynccomm.core.preemption import preemption


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
