"""The name of the host, which tests may change."""

import socket

import pytest

from asynccomm.core.hosts import PRETENDED, host_name, pretends


def test_the_host_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRETENDED, raising=False)
    assert host_name() == socket.gethostname()
    assert not pretends()


def test_a_process_may_pretend_to_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETENDED, "elsewhere")
    assert host_name() == "elsewhere"
    assert pretends()
