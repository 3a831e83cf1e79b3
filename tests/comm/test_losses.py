"""The error of a lost rank names its process."""

import pytest
import torch

from asynccomm import PeerLostError
from asynccomm.backends.base import RankInfo
from asynccomm.comm import session
from asynccomm.comm.losses import located, may_be_recorded
from asynccomm.core.exit_records import VARIABLE, ExitRecords
from asynccomm.testing import loopback_world
from tests.waiting import until

HERE, BESIDE, AWAY = RankInfo(0, "node1", 11), RankInfo(1, "node1", 12), RankInfo(2, "node2", 12)


def test_the_exit_is_told_on_the_launcher_s_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    records = ExitRecords()
    monkeypatch.setenv(VARIABLE, records.path)
    assert may_be_recorded(BESIDE, HERE)
    assert not may_be_recorded(AWAY, HERE)
    records.add(12, -9)
    assert not may_be_recorded(BESIDE, HERE)
    error = located(PeerLostError(1, "its connection ended"), "train", BESIDE, HERE)
    assert str(error) == "rank 1 was lost: it was killed by SIGKILL (comm 'train', process 12 on node1)"
    error = located(PeerLostError(2, "its connection ended"), "train", AWAY, HERE)
    assert str(error) == "rank 2 was lost: its connection ended (comm 'train', process 12 on node2)"
    assert (error.comm, error.host, error.pid) == ("train", "node2", 12)
    records.close()


async def test_a_loss_waits_a_moment_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2, name="train") as comms:
        records = ExitRecords()
        monkeypatch.setenv(VARIABLE, records.path)
        members = comms[0]._session.identity.members
        monkeypatch.setattr(comms[0]._session, "_transport_failed", lambda error: None)
        work = comms[0].all_reduce(torch.ones(1))
        comms[0]._session.break_by(PeerLostError(1, "a test says so"))
        assert not work.done(), "the launcher may have the exit code soon"
        records.add(members[1].pid, -15)
        with pytest.raises(PeerLostError, match="rank 1 was lost: it was killed by SIGTERM") as caught:
            await work
        assert caught.value.pid == members[1].pid
        comms[1]._session.break_by(PeerLostError(0, "a test says so"))
        await until(lambda: comms[1]._session.error is not None)
        records.close()


async def test_a_transport_that_lost_a_rank_waits_for_the_launcher_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2, name="train") as comms:
        records = ExitRecords()
        monkeypatch.setenv(VARIABLE, records.path)
        monkeypatch.setattr(session, "LOST_SECONDS", 0.0)
        monkeypatch.setattr(session, "EXIT_CHECKS", 10_000)
        one = comms[0]._session
        one._transport_failed(PeerLostError(1, "its process ended"))
        looks: list[int] = []
        monkeypatch.setattr(session, "may_be_recorded", lambda *members: looks.append(1) or may_be_recorded(*members))
        await until(lambda: len(looks) > 2)
        assert one.error is None
        records.add(one.identity.members[1].pid, -15)
        await until(lambda: one.error is not None)
        assert "it was killed by SIGTERM" in str(one.error)
        records.close()
