"""One rank of ``spawn``, in this process."""

import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from asynccomm import Comm
from asynccomm.cli import spawned_rank
from asynccomm.cli.spawning import CALL, PATH, RankResult, result_file
from asynccomm.comm.new_comm import new_comm


class Odd(Exception):
    """An error that pickle cannot copy."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


async def work(comm: Comm, case: str) -> Any:
    """A case by its name."""
    match case:
        case "odd":
            raise Odd(1, 2)
        case "lock":
            return threading.Lock()
        case "error":
            raise LookupError("no such key")
        case _:
            return comm.size


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("size", ""),
        ("error", "no such key"),
        ("odd", "Odd: 1 and 2 (TypeError: "),
        ("lock", "<unlocked _thread.lock object at "),
    ],
)
def test_the_outcome_appears_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str, words: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(spawned_rank, "new_comm", lambda: new_comm(alone=True))
    (tmp_path / PATH).write_bytes(cloudpickle.dumps(list(sys.path)))
    (tmp_path / CALL).write_bytes(cloudpickle.dumps((work, (case,), {})))
    assert spawned_rank.main(tmp_path) == (case != "size")
    value, error, trace = outcome = cloudpickle.loads(result_file(tmp_path, 0).read_bytes())
    assert isinstance(outcome, RankResult)
    if case == "size":
        assert (value, error) == (1, None)
        assert not capsys.readouterr().err
    else:
        assert words in capsys.readouterr().err, "for the launcher's summary"
        assert words in str(error)
        assert type(error) is (LookupError if case == "error" else RuntimeError)
        assert words.split(" (")[0] in trace or case == "lock"
