"""The simulated NCCL is used by ranks that are threads: what they share must bear that."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from asynccomm.backends.nccl.api import Config

from .simulation import SimulatedComm, SimulatedNccl

ROUNDS = 10


class Slow(list[SimulatedComm]):
    """Gives other threads their turn before and after each change."""

    def append(self, comm: SimulatedComm) -> None:
        time.sleep(0.001)
        super().append(comm)
        time.sleep(0.001)

    def remove(self, comm: SimulatedComm) -> None:
        time.sleep(0.001)
        super().remove(comm)
        time.sleep(0.001)


@pytest.mark.parametrize("how", ["destroy", "abort"])
def test_the_ranks_of_a_group_come_and_go_at_the_same_time(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    size = 3
    monkeypatch.setattr(SimulatedNccl, "comms", Slow())
    monkeypatch.setattr(SimulatedNccl, "groups", {})
    nccls = [SimulatedNccl() for _ in range(size)]
    unique_ids = [nccls[0].unique_id() for _ in range(ROUNDS)]
    together = Barrier(size)

    def come_and_go(rank: int) -> None:
        try:
            for unique_id in unique_ids:
                comm = nccls[rank].init(size, rank, unique_id, Config())
                together.wait(60)
                getattr(nccls[rank], how)(comm)
        except BaseException:
            together.abort()  # the others would wait for this rank
            raise

    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(come_and_go, rank) for rank in range(size)]
    errors = [rank.exception() for rank in ranks]
    assert errors == [None] * size
    assert SimulatedNccl.comms == []
    assert SimulatedNccl.groups == {}
