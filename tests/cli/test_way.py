import json
import re
import socket
from pathlib import Path

import pytest

from asynccomm.backends import addresses
from asynccomm.cli import way as module
from asynccomm.cli.main import main
from asynccomm.cli.way import find_way, store_address
from asynccomm.store.routes import InterfaceAddress
from tests.hosts import hosts
from tests.many_hosts.jobs import Job

TO_SET = "set GLOO_SOCKET_IFNAME, or hints={'interface': ...}, to one of eth0 (10.0.0.5)"


@pytest.fixture(autouse=True)
def one_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [InterfaceAddress("eth0", "10.0.0.5")]
    for each in (addresses, module):
        monkeypatch.setattr(each, "reachable_addresses", lambda: found)
        monkeypatch.setattr(each, "address_towards", lambda host, port: None if host == "127.0.0.1" else "10.0.0.5")
        monkeypatch.setattr(each, "interface_of", lambda address: "eth0" if address == "10.0.0.5" else "lo")


def test_the_way_has_its_reason() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.2", 0))
        port = silent.getsockname()[1]
        found = find_way("127.0.0.2", port, {})
    assert found.problem == ""
    assert found.facts["store"] == f"127.0.0.2:{port}"
    assert (found.facts["address"], found.facts["interface"]) == ("10.0.0.5", "eth0")
    assert found.facts["because"] == "it leads to the store"
    assert found.facts["answers"] == "no: Connection refused"


def test_a_host_that_does_not_resolve_is_a_problem() -> None:
    found = find_way("nowhere.invalid", 29500, {})
    assert found.problem.startswith("the store's host 'nowhere.invalid' does not resolve: ")
    assert str(found.facts["answers"]).startswith("no: ")


def test_a_store_that_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert find_way("127.0.0.1", server.getsockname()[1], {}).facts["answers"] == "yes"


def test_loopback_is_a_problem_that_says_its_repair() -> None:
    found = find_way("127.0.0.2", 1, {"GLOO_SOCKET_IFNAME": "lo"})
    assert found.facts["address"] is None
    assert re.fullmatch(
        f"host '.*' would use 127.0.0.1 .lo., because GLOO_SOCKET_IFNAME='lo' names it; .*: {re.escape(TO_SET)}",
        found.problem,
    )


@pytest.mark.parametrize(
    "url", ["store", "store:29500", "tcp://store", "tcp://:1", "http://store:1", "tcp://store:99999", "tcp://[::1:5"]
)
def test_a_store_without_an_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--store", url])
    assert caught.value.code == 2
    assert f"argument --store: must be tcp://host:port, got {url!r}" in capsys.readouterr().err
    assert store_address("tcp://[fd00::1]:29500") == ("fd00::1", 29500)


def test_the_doctor_of_a_host_says_its_address(tmp_path: Path) -> None:
    job = Job(tmp_path)
    try:
        with hosts(2, tmp_path) as (one, two):
            doctor = job.start(two, "-m", "asynccomm.cli.main", "doctor", "--json", "--store", f"tcp://{one.address}:7")
            doctor.ends()
            facts = json.loads(doctor.text)["sections"]["way_to_the_store"]["facts"]
    finally:
        job.close()
    assert (facts["address"], facts["interface"]) == ("10.0.0.2", "eth0")
    assert facts["because"] == "it leads to the store"
