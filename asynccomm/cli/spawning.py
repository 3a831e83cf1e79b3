"""Several ranks from a notebook or a script: a function runs on each under ``asynccomm run``, and returns results.

A process between the caller and the ranks is the launcher; it ends with the caller. The function, its arguments and
the results travel by cloudpickle in a private folder, which the launcher removes where the caller was killed.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Concatenate, Final, NamedTuple, ParamSpec, SupportsIndex, TextIO, TypeVar

import cloudpickle

from asynccomm.comm.comm import Comm
from asynccomm.ops.validation import as_index

P = ParamSpec("P")
T = TypeVar("T")

PATH: Final = "path"  # the file with sys.path, which the function may need to be loaded
CALL: Final = "call"  # the file with the function and its arguments
_RANK: Final = ("-m", "asynccomm.cli.spawned_rank")
_END_SECONDS: Final = 30.0  # for the launcher to end after an interrupt


class RankResult(NamedTuple):
    """The result of one rank, or the error and its traceback."""

    value: Any
    error: BaseException | None = None
    trace: str = ""
    caused: bool = False  #: whether another rank has caused the error; pickle drops the chain that shows it


def result_file(directory: Path, rank: int) -> Path:
    """The file with the outcome of ``rank``, which appears whole."""
    return directory / f"outcome{rank}"


def spawn(
    fn: Callable[Concatenate[Comm, P], Coroutine[Any, Any, T]],
    size: SupportsIndex,
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[T]:
    """Run ``await fn(comm, ...)`` on ``size`` new ranks of this host, and return the results in rank order.

    ::

        async def mean(comm, value):
            return (await comm.all_reduce(torch.tensor(value * comm.rank), asynccomm.ReduceOp.AVG)).item()

        assert asynccomm.spawn(mean, 4, 2.0) == [3.0] * 4

    Blocks, for some seconds at least: each rank is a new process that imports torch. The ranks print to this process's
    ``sys.stdout`` and ``sys.stderr``, with their rank in front of each line. They end when this process does. In
    another thread, as by ``asyncio.to_thread``, the call cannot be interrupted.

    Args:
        fn: a coroutine function, which may be defined in a notebook or a script; its first argument is a comm of all
            ranks, which is closed after it.
        size: number of ranks.
        args, kwargs: the other arguments, the same on all ranks. The ranks get copies.

    Raises:
        ValueError: ``size`` is not a positive integer.
        TypeError: ``fn`` is not callable, or is an async generator function; from a rank, ``fn`` returned no awaitable.
        Exception: the error of a rank, with its traceback as a note; of several, one that no other rank has caused.
        RuntimeError: a rank gave no result, because it was killed or called ``sys.exit()``, for example, or no result
            that can be pickled.
        KeyboardInterrupt: after the ranks have ended; Ctrl-C cancels ``fn`` there.
    """
    ranks = as_index(size)
    if ranks is None or ranks < 1:
        raise ValueError(f"size must be a positive integer, got {size!r}")
    if not callable(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"fn must be a coroutine function, got {fn!r}")
    with tempfile.TemporaryDirectory(prefix="asynccomm-") as folder:
        directory = Path(folder)
        (directory / PATH).write_bytes(cloudpickle.dumps(sys.path))
        (directory / CALL).write_bytes(cloudpickle.dumps((fn, args, kwargs)))
        code = _launch(ranks, directory)
        return _results(ranks, directory, code)


def _launch(size: int, directory: Path) -> int:
    """Run the launcher until it ends, and pass on its output; returns its exit code."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package)))
    tether = [sys.executable, "-P", "-m", "asynccomm.cli.tethered", str(os.getpid()), str(directory)]
    launcher = subprocess.Popen(
        [*tether, "run", "-n", str(size), *_RANK, str(directory)],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on
    )
    with ExitStack() as stack:
        readers: list[threading.Thread] = []
        stack.callback(_join, readers)
        stack.callback(launcher.wait)
        stack.callback(launcher.kill)  # first: a second Ctrl-C ends everything at once
        for source, sink in ((launcher.stdout, sys.stdout), (launcher.stderr, sys.stderr)):
            assert source is not None
            reader = threading.Thread(target=_pass_on, args=(source, sink), daemon=True)
            reader.start()
            readers.append(reader)
        try:
            code = launcher.wait()
        except BaseException:
            launcher.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(_END_SECONDS)
            raise
    return code


def _join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def _pass_on(source: IO[bytes], sink: TextIO | None) -> None:
    with source:
        for line in source:
            if sink is not None:  # None: a process without a console, where print() writes nothing either
                with suppress(Exception):  # a sink that has closed, or raises anything, costs its output, not the run
                    _write(sink, line.decode(errors="replace"))


def _write(sink: TextIO, text: str) -> None:
    try:
        sink.write(text)
    except UnicodeEncodeError:
        encoding = getattr(sink, "encoding", None) or "ascii"  # a notebook's or a test's sink may have none
        sink.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sink.flush()


def _results(size: int, directory: Path, code: int) -> list[Any]:
    outcomes: dict[int, RankResult] = {}
    for rank in range(size):
        path = result_file(directory, rank)
        if path.exists():
            outcomes[rank] = cloudpickle.loads(path.read_bytes())
    failed = [(rank, outcome) for rank, outcome in outcomes.items() if outcome.error is not None]
    failed.sort(key=lambda item: item[1].caused)
    missing = [rank for rank in range(size) if rank not in outcomes]
    if missing and (not failed or failed[0][1].caused):
        cause = failed[0][1].error if failed else None
        raise RuntimeError(f"ranks {missing} gave no result; the launcher ended with exit code {code}") from cause
    if failed:
        rank, (_, error, trace, _) = failed[0]
        assert error is not None
        error.add_note(f"On rank {rank}:\n{trace}")
        raise error
    return [outcomes[rank].value for rank in range(size)]
