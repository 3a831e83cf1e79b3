"""The comms of a torch group: made when they are needed, and ended."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from asynccomm import AbortedError, ClosedError, Comm
from asynccomm.blocking.loop_thread import detached
from asynccomm.comm import flight
from asynccomm.interop.group_comms import GroupComms
from asynccomm.testing.local import loopback_world
from tests.waiting import until

CPU = torch.device("cpu")


def comms_of_one(store: dist.Store | None = None) -> GroupComms:
    return GroupComms("alone", dist.HashStore() if store is None else store, 0, 1, timedelta(seconds=30))


def test_one_comm_for_each_type_of_device() -> None:
    comms = comms_of_one()
    assert comms.all() == []
    comm = comms.of(torch.ones(1))
    assert comms.connect(CPU) is comm
    assert comms.any() is comm
    assert comms.all() == [comm]
    assert (comm.name, comm.size, comm.options.timeout) == ("alone/cpu", 1, 30)
    comms.set_timeout(timedelta(seconds=5))
    assert comm.options.timeout == 5
    comms.extend_timeout(timedelta(seconds=2))
    comms.close()
    comms.close()
    with pytest.raises(ClosedError):
        comm.barrier()
    with pytest.raises(ClosedError, match="group 'alone' was closed"):
        comms_closed_connects(comms)


async def test_a_signal_writes_the_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flight.DIRECTORY, str(tmp_path))
    monkeypatch.setenv(flight.SIGNAL, "USR2")
    before = signal.getsignal(signal.SIGUSR2)
    comms = comms_of_one()
    try:
        comms.any()
        os.kill(os.getpid(), signal.SIGUSR2)
        await until(lambda: (tmp_path / "rank_0").exists())
    finally:
        signal.signal(signal.SIGUSR2, before)
        comms.close()


def comms_closed_connects(comms: GroupComms) -> None:
    comms._comms.clear()
    comms.connect(CPU)


def test_the_process_may_end_first() -> None:
    comms = comms_of_one()
    comm = comms.any()
    comms.end_of_process()
    with pytest.raises(ClosedError):
        comm.barrier()


def test_what_is_in_flight_is_stopped_by_an_abort() -> None:
    comms = comms_of_one()
    work = comms.any().recv(torch.ones(1), 0)
    comms.abort("enough")
    with pytest.raises(AbortedError, match="enough"):
        work.wait()
    comms.close()


async def test_given_ones_stay_open() -> None:
    async with loopback_world(2) as given:
        comms = GroupComms("over", None, 0, 2, timedelta(seconds=30), [given[0]])
        assert comms.of(torch.ones(1)) is given[0]
        with detached():
            comms.close()
        works = [comm.all_reduce(torch.ones(1)) for comm in given]
        assert [(await work).item() for work in works] == [2, 2]
        with pytest.raises(ClosedError, match="cuda"):
            GroupComms("over", None, 0, 2, timedelta(seconds=30), [given[0]]).connect(torch.device("cuda"))


def test_closing_in_a_forked_child_waits_for_nobody() -> None:
    comms = comms_of_one()
    comm: Comm = comms.any()
    child = os.fork()
    if child == 0:
        try:
            comms.close()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    comm.barrier().wait()
    comms.close()
