"""Ranks of several hosts find the way to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import hosts
from tests.many_hosts.jobs import Job


def test_two_hosts_of_two_ranks_meet_without_any_hint(job: Job, tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (one, two):
        ranks = job.world([one, one, two, two], "use")
        found = [rank.sees("works") for rank in ranks]
        assert all(rank.ends() == 0 for rank in ranks)
    assert [each["rank"] for each in found] == [0, 1, 2, 3]
    assert found[0]["addresses"] == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]
    assert found[0]["hosts"] == ["node0", "node0", "node1", "node1"]


@pytest.mark.exhaustive
def test_ranks_need_not_be_laid_out_host_by_host(job: Job, tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (one, two):
        ranks = job.world([one, two, one], "use")
        assert [rank.ends() for rank in ranks] == [0, 0, 0], [rank.text for rank in ranks]


def test_hosts_with_ipv6_only(job: Job, tmp_path: Path) -> None:
    with hosts(2, tmp_path, ipv4=False) as (one, two):
        ranks = job.world([one, two], "use")
        assert [rank.ends() for rank in ranks] == [0, 0], [rank.text for rank in ranks]
        assert ranks[0].sees("works")["addresses"] == ["fd00::1", "fd00::2"]


def test_a_store_by_a_name_that_is_loopback_on_its_own_host(job: Job, tmp_path: Path) -> None:
    """As Debian writes it into /etc/hosts: the way to the store gives the first host no address."""
    with hosts(2, tmp_path) as (one, two):
        (tmp_path / "own").write_text("127.0.0.1 localhost\n127.0.1.1 node0\n")
        (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.0.0.1 node0\n")
        one.run("mount", "--bind", str(tmp_path / "own"), "/etc/hosts")
        ranks = job.world([one, two], "use", master="node0")
        assert [rank.ends() for rank in ranks] == [0, 0], [rank.text for rank in ranks]
        assert ranks[1].sees("works")["addresses"] == ["10.0.0.1", "10.0.0.2"]


def test_hosts_of_one_name_are_told_apart(job: Job, tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (one, two):
        two.run("hostname", "node0")
        ranks = job.world([one, two, two], "use")
        assert [rank.ends() for rank in ranks] == [0, 0, 0], [rank.text for rank in ranks]
        assert ranks[0].sees("works")["hosts"] == ["node0", "node0#2", "node0#2"]


def test_the_interface_of_the_environment_is_used(job: Job, tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (one, two):
        for number, host in enumerate((one, two)):
            host.run("ip", "link", "add", "fast0", "link", "eth0", "type", "macvlan")
            host.run("ip", "address", "add", f"10.1.0.{number + 1}/24", "dev", "fast0")
            host.run("ip", "link", "set", "fast0", "up")
        ranks = job.world([one, two], "use", environment={"GLOO_SOCKET_IFNAME": "fast0"})
        assert [rank.ends() for rank in ranks] == [0, 0], [rank.text for rank in ranks]
        assert ranks[0].sees("works")["addresses"] == ["10.1.0.1", "10.1.0.2"]


def test_a_way_that_is_loopback_only_is_an_error_that_says_what_to_set(job: Job, tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (one, two):
        ranks = job.world([one, two], environment={"GLOO_SOCKET_IFNAME": "lo"})
        for rank in ranks:
            failed = rank.sees("failed")
            assert failed["error"] == "BackendError"
            assert failed["seconds"] < 5
            assert failed["text"].startswith(
                "rank 0 of 2: host 'node0' would use 127.0.0.1 (lo), because GLOO_SOCKET_IFNAME='lo' names it; "
                "other hosts cannot reach it: set GLOO_SOCKET_IFNAME, or hints={'interface': ...}, to one of "
                "eth0 (10.0.0.1)"
            )
