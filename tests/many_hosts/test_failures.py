"""Failures between hosts: the right error, the right ranks, within the time that asynccomm/control/README.md gives."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts import Host, has_netem, hosts
from tests.many_hosts.jobs import PROGRAM, Job, Rank

SILENT_HOST = 11.0 + 4.0  # seconds until a silent host is lost, and until this is known on a loaded machine
AT_ONCE = 3.0


def running(job: Job, placing: Sequence[Host], *steps: str) -> list[Rank]:
    ranks = job.world(placing, "until_loss", *steps, options={"timeout": 40})
    for rank in ranks:
        rank.sees("steps")
    time.sleep(0.2)  # into the midst of the collectives
    return ranks


def check(survivors: Sequence[Rank], lost: Sequence[int], since: float, limit: float) -> None:
    """All survivors lose one of the ``lost`` ranks, and go on as the same comm."""
    for rank in survivors:
        found = rank.sees("lost")
        assert found["error"] == "PeerLostError", found
        assert found["rank"] in lost, found
        assert found["at"] - since < limit, found
    left = [rank.sees("shrunk")["ranks"] for rank in survivors]
    assert left == [left[0]] * len(survivors)
    assert not set(left[0]) & set(lost)
    assert [rank.sees("works")["size"] for rank in survivors] == [len(survivors)] * len(survivors)
    assert [rank.ends() for rank in survivors] == [0] * len(survivors), [rank.text for rank in survivors]


def test_a_host_with_all_its_ranks_killed(job: Job, tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (one, two):
        ranks = running(job, [one, one, two, two], "shrink", "use")
        since = time.monotonic()
        for rank in ranks[2:]:
            rank.send(signal.SIGKILL)
        check(ranks[:2], [2, 3], since, AT_ONCE)


def test_the_host_of_the_store_killed(job: Job, tmp_path: Path) -> None:
    with hosts(3, tmp_path) as (one, two, three):
        ranks = running(job, [one, two, three], "shrink=quorum", "use")
        since = time.monotonic()
        ranks[0].send(signal.SIGKILL)
        check(ranks[1:], [0], since, AT_ONCE)


def test_a_link_that_is_down(job: Job, tmp_path: Path) -> None:
    """The majority goes on with quorum; the host alone is left out."""
    with hosts(3, tmp_path) as (one, two, three):
        ranks = running(job, [one, two, three], "shrink=quorum", "use")
        since = time.monotonic()
        three.down()
        check(ranks[:2], [2], since, SILENT_HOST)
        alone = ranks[2].sees("lost")
        assert alone["error"] == "PeerLostError"
        assert alone["at"] - since < SILENT_HOST
        assert ranks[2].sees("left out")["error"] == "QuorumError"


@pytest.mark.exhaustive
@pytest.mark.parametrize("silent", [0, 2])
def test_packets_lost_one_way(job: Job, tmp_path: Path, silent: int) -> None:
    """The host ``silent`` reaches no other; all others reach it."""
    with hosts(3, tmp_path) as made:
        ranks = running(job, made, "shrink=quorum", "use")
        since = time.monotonic()
        for other in made:
            if other is not made[silent]:
                made[silent].lose_towards(other)
        check([rank for number, rank in enumerate(ranks) if number != silent], [silent], since, SILENT_HOST)


@pytest.mark.exhaustive
def test_the_link_of_the_store_and_the_root_down(job: Job, tmp_path: Path) -> None:
    with hosts(3, tmp_path) as (one, two, three):
        ranks = running(job, [one, one, two, three, three], "shrink=quorum", "use")
        since = time.monotonic()
        one.down()
        check(ranks[2:], [0, 1], since, SILENT_HOST)


@pytest.mark.exhaustive
def test_a_frozen_host(job: Job, tmp_path: Path) -> None:
    """Its system goes on answering, so its ranks are late, not lost."""
    with hosts(2, tmp_path) as (one, two):
        ranks = job.world([one, one, two, two], "until_loss", "shrink", "use", options={"timeout": 4})
        for rank in ranks:
            rank.sees("steps")
        for rank in ranks[2:]:
            rank.send(signal.SIGSTOP)
        for rank in ranks[:2]:
            found = rank.sees("lost")
            assert found["error"] in ("CollectiveTimeoutError", "AbortedError"), found  # of this rank or the other
            assert all(f"rank {number}: " in found["text"] for number in (2, 3)), found
        assert [rank.sees("shrunk")["ranks"] for rank in ranks[:2]] == [[0, 1]] * 2
        assert [rank.ends() for rank in ranks[:2]] == [0, 0]
        for rank in ranks[2:]:
            rank.send(signal.SIGCONT)
            rank.sees("lost")
            assert rank.sees("left out")["error"] == "LeftOutError"


@pytest.mark.exhaustive
def test_delay_and_jitter_are_no_failure(job: Job, tmp_path: Path) -> None:
    if not has_netem():
        pytest.skip("the kernel has no netem")
    with hosts(2, tmp_path) as (one, two):
        for host in (one, two):
            host.shape("netem", "delay", "30ms", "20ms")
        ranks = job.world([one, two, two], "use", "use")
        assert [rank.ends() for rank in ranks] == [0, 0, 0], [rank.text for rank in ranks]


@pytest.mark.exhaustive
def test_a_slow_link_is_no_failure(job: Job, tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (one, two):
        for host in (one, two):
            host.shape("tbf", "rate", "20mbit", "burst", "10kb", "latency", "400ms")
        ranks = job.world([one, two], "use")
        assert [rank.ends() for rank in ranks] == [0, 0], [rank.text for rank in ranks]


def test_a_process_of_a_new_host_joins(job: Job, tmp_path: Path) -> None:
    with hosts(3, tmp_path) as (one, two, three):
        ranks = job.world([one, two], "admit", "use")
        for rank in ranks:
            rank.sees("waits")
        common = {"MASTER_ADDR": one.address, "MASTER_PORT": "29500", "OPTIONS": '{"timeout": 30}', "JOIN": "1"}
        newcomer = job.start(three, PROGRAM, "use", environment=common)
        assert newcomer.ends() == 0, newcomer.text
        assert [rank.ends() for rank in ranks] == [0, 0], [rank.text for rank in ranks]
        assert newcomer.sees("works")["hosts"] == ["node0", "node1", "node2"]


def test_a_process_of_a_second_host_cannot_join_a_comm_of_one_host(job: Job, tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (one, two):
        rank = job.world([one], "admit")[0]
        rank.sees("waits")
        common = {"MASTER_ADDR": one.address, "MASTER_PORT": "29500", "OPTIONS": '{"timeout": 30}', "JOIN": "1"}
        failed = job.start(two, PROGRAM, environment=common).sees("failed")
        assert failed["error"] == "RendezvousError"
        assert failed["text"] == (
            "comm 'main' has all its ranks on host 'node0', and only processes there can join it; this is 'node1'"
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [1, 2])
def test_a_link_with_several_ranks_behind_it_is_down(job: Job, tmp_path: Path, lost: int) -> None:
    with hosts(3, tmp_path) as made:
        placing = [made[0], made[0], made[1], made[2], made[1], made[2], made[0]]
        ranks = running(job, placing, "shrink=quorum", "use")
        since = time.monotonic()
        made[lost].down()
        gone = [number for number, host in enumerate(placing) if host is made[lost]]
        check([rank for number, rank in enumerate(ranks) if number not in gone], gone, since, SILENT_HOST)
