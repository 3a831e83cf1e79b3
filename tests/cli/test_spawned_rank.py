"""One rank of ``spawn``, in this process."""

import asyncio
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from asynccomm import Comm, PeerLostError
from asynccomm.cli import spawned_rank
from asynccomm.cli.spawning import CALL, PATH, RankResult, result_file
from asynccomm.comm.new_comm import new_comm
from asynccomm.errors import describe_exception


class Odd(Exception):
    """An error that pickle cannot copy."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Unreadable(Odd):
    """An error without a text."""

    def __str__(self) -> str:
        raise TypeError


async def work(comm: Comm, case: str) -> Any:
    """A case by its name."""
    match case:
        case "odd":
            raise Odd(1, 2)
        case "unreadable":
            raise Unreadable(1, 2)
        case "lock":
            return threading.Lock()
        case "error":
            raise LookupError("no such key")
        case _:
            return comm.size


def outcome_of(fn: Any, *args: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RankResult:
    """The outcome of ``fn`` on one rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(spawned_rank, "new_comm", lambda: new_comm(alone=True))
    (folder / PATH).write_bytes(cloudpickle.dumps(list(sys.path)))
    (folder / CALL).write_bytes(cloudpickle.dumps((fn, args, {})))
    code = spawned_rank.main(folder)
    outcome = cloudpickle.loads(result_file(folder, 0).read_bytes())
    assert isinstance(outcome, RankResult)
    assert code == (outcome.error is not None)
    return outcome


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("size", ""),
        ("error", "no such key"),
        ("odd", "Odd: 1 and 2 (TypeError: "),
        ("unreadable", "Unreadable: <exception str() failed> (TypeError: "),
        ("lock", "<unlocked _thread.lock object at "),
    ],
)
def test_the_outcome_appears_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str, words: str
) -> None:
    value, error, trace, _ = outcome_of(work, case, folder=tmp_path, monkeypatch=monkeypatch)
    if case == "size":
        assert (value, error) == (1, None)
        assert not capsys.readouterr().err
    else:
        assert words in capsys.readouterr().err, "for the launcher's summary"
        assert words in str(error)
        assert type(error) is (LookupError if case == "error" else RuntimeError)
        assert words.split(" (")[0] in trace or case == "lock"


@pytest.mark.parametrize("error", [asyncio.CancelledError("by itself"), SystemExit(3), BaseException("odd")], ids=repr)
def test_an_end_by_no_error_is_named(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ends(comm: Comm) -> None:
        raise error

    outcome = outcome_of(ends, folder=tmp_path, monkeypatch=monkeypatch)
    assert type(outcome.error) is RuntimeError
    assert str(outcome.error) == f"fn ended by {describe_exception(error)}"
    assert "in ends\n" in outcome.trace
    assert type(error).__name__ in outcome.trace.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_outcome(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits(comm: Comm) -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)

    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        outcome_of(waits, folder=tmp_path, monkeypatch=monkeypatch)
    assert caught.type is (KeyboardInterrupt if number is signal.SIGINT else SystemExit)
    assert not result_file(tmp_path, 0).exists()


class AsyncCallable:
    """A callable, but no function."""

    async def __call__(self, comm: Comm) -> int:
        return comm.size


def synchronous(comm: Comm) -> int:
    return comm.size


@pytest.mark.parametrize("fn", [lambda comm: work(comm, "size"), AsyncCallable(), partial(work, case="size")])
def test_the_function_may_be_anything_that_returns_an_awaitable(
    fn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome_of(fn, folder=tmp_path, monkeypatch=monkeypatch) == RankResult(1)


def test_a_function_that_returns_no_awaitable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = outcome_of(synchronous, folder=tmp_path, monkeypatch=monkeypatch).error
    assert isinstance(error, TypeError)
    assert str(error).startswith("fn must be a coroutine function, got <function synchronous at ")
    assert str(error).endswith(">, which returned 1")


@pytest.mark.parametrize(
    ("source", "caused"),
    [
        ("raise LOST", True),
        ("raise LookupError", False),
        ("raise RuntimeError('training failed') from LOST", True),
        ("raise RuntimeError from LookupError()", False),
        ("try: raise LOST\nexcept BaseException: raise RuntimeError from ValueError()", False),
        ("try: raise LOST\nexcept BaseException: raise RuntimeError from None", True),
        ("try: raise RuntimeError from LOST\nexcept BaseException: undefined", True),
        ("raise Odd(1, 2) from LOST", True),
        ("raise ExceptionGroup('tasks', [ExceptionGroup('in tasks', [LOST])])", True),
        ("raise ExceptionGroup('tasks', [ExceptionGroup('in tasks', [LOST]), KeyError()])", False),
        ("raise RuntimeError from ExceptionGroup('tasks', [LOST])", True),
        ("error = KeyError(); raise error from error", False),
    ],
)
def test_an_error_that_another_rank_has_caused_is_told_apart(
    source: str, caused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(comm: Comm) -> None:
        exec(source, {"LOST": PeerLostError(1, "its process ended"), "Odd": Odd})

    outcome = outcome_of(fails, folder=tmp_path, monkeypatch=monkeypatch)
    assert outcome.error is not None
    assert outcome.caused is caused
