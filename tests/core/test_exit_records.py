"""The file in which a launcher records how its ranks have ended."""

import os

import pytest

from asynccomm.core.exit_records import VARIABLE, ExitRecords, describe_exit, exits_are_recorded, recorded_exit


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-99, "was killed by signal 99")],
)
def test_an_exit_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_a_record_is_read_by_the_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    records = ExitRecords()
    monkeypatch.setenv(VARIABLE, records.path)
    assert exits_are_recorded()
    assert recorded_exit(12) == ""
    records.add(112, 0)
    records.add(12, -9)
    assert recorded_exit(12) == "was killed by SIGKILL"
    records.add(12, 3)  # a later process with the same pid
    assert recorded_exit(12) == "ended with exit code 3"
    assert recorded_exit(112) == "ended with exit code 0"
    records.close()
    records.close()
    assert recorded_exit(12) == "", "the launcher has ended"


def test_without_such_a_launcher_no_exit_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not exits_are_recorded()
    assert recorded_exit(os.getpid()) == ""
