"""The hook that says which rank an uncaught exception is of."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

__all__ = ["RankHook"]


@final
class RankHook:
    """In place of ``sys.excepthook``: what that prints, each line after the rank.

    Args:
        rank: the global one.
        before: the hook that prints.
    """

    def __init__(self, rank: int, before: Callable[..., Any]) -> None:
        self._prefix = f"[rank{rank}]: "
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None, /) -> None:
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            self._before(kind, error, traceback)
        lines = text.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(self._prefix + line if line.strip() else line for line in lines))

    @classmethod
    def install(cls, rank: int) -> RankHook:
        """Put one up, in place of one that is there already."""
        there = sys.excepthook
        hook = cls(rank, there._before if isinstance(there, cls) else there)
        sys.excepthook = hook
        return hook

    def remove(self) -> None:
        """Put back what was there before, unless somebody has put up another one since."""
        if sys.excepthook is self:
            sys.excepthook = self._before
