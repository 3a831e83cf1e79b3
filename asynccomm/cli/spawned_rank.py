"""One rank of ``spawn``: calls the function, and writes the outcome into the folder that it is given."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import cloudpickle

from asynccomm.cli.spawning import CALL, PATH, RankResult, result_file
from asynccomm.comm.new_comm import new_comm
from asynccomm.core.preemption import preemption
from asynccomm.errors import BrokenError, describe_exception
from asynccomm.runner import run


def main(directory: Path) -> int:
    """Run this rank; returns the exit code."""
    process = os.getpid()
    sys.path[:] = cloudpickle.loads((directory / PATH).read_bytes())
    try:
        fn, args, kwargs = cloudpickle.loads((directory / CALL).read_bytes())
        outcome = RankResult(run(_call(fn, args, kwargs)))
    except BaseException as exc:
        if os.getpid() != process:
            raise  # a forked child of the function ends, which has no outcome
        if isinstance(exc, Exception):
            outcome = _failure(exc, exc)
        elif isinstance(exc, KeyboardInterrupt) or preemption.cancelled:
            raise  # a signal ends this rank
        else:  # sys.exit() or a cancellation: the caller would end, if ``spawn`` raised these there
            outcome = _failure(exc, RuntimeError(f"fn ended by {describe_exception(exc)}"))
    if os.getpid() != process:
        return 0
    try:
        data = cloudpickle.dumps(outcome)
        cloudpickle.loads(data)
    except Exception as exc:  # an error in place of an outcome that cannot travel
        value, error, trace, caused = outcome
        text = f"{value!r} cannot be returned" if error is None else describe_exception(error)
        error = RuntimeError(f"{text} ({describe_exception(exc)})")
        outcome = RankResult(None, error, trace or f"{error}\n", caused)
        data = cloudpickle.dumps(outcome)
    path = result_file(directory, int(os.environ["RANK"]))
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)
    if outcome.error is None:
        return 0
    print(describe_exception(outcome.error), file=sys.stderr)  # spawn raises it with its traceback
    return 1


async def _call(fn: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    async with new_comm() as comm:
        made = fn(comm, *args, **kwargs)
        if not inspect.isawaitable(made):
            raise TypeError(f"fn must be a coroutine function, got {fn!r}, which returned {made!r}")
        return await made


def _failure(exc: BaseException, error: Exception) -> RankResult:
    """The outcome of a call that ended by ``exc``, for which ``spawn`` is to raise ``error``."""
    return RankResult(None, error, "".join(traceback.format_exception(exc)), _is_caused(exc))


def _is_caused(error: BaseException) -> bool:
    """Whether another rank has caused ``error``, or the error behind it; of a group, all of its errors."""
    seen = set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:  # `raise error from error` makes a circle
        if isinstance(link, BaseExceptionGroup):
            return all(map(_is_caused, link.exceptions))
        if isinstance(link, BrokenError):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
