"""The names of arguments in the errors of faces that have other names than the comm's methods."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, final

# Before an argument's name stands none of these words: "tensor must be a dense tensor" has one name of an argument, and
# "rank must have room, but there are 8 bytes on rank 1" one, too
_NOUN: Final = "".join(rf"(?<!\b{word} )" for word in ("a", "an", "the", "one", "dense", "on"))


@final
class Renamed:
    """Context manager for calls of a comm: a TypeError or ValueError names the face's argument.

    Args:
        names: the face's names, by the comm's, also of items of lists ("extras[0]").
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.rename(error)

    def rename(self, error: BaseException | None) -> None:
        """Replace the names in the error's text."""
        if not self._names or not isinstance(error, (TypeError, ValueError)):
            return
        text = error.args[0] if len(error.args) == 1 else None
        if isinstance(text, str):
            described, got, value = text.partition(" got ")  # values stay as they are
            longest_first = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True)))
            renamed = re.sub(rf"{_NOUN}(?<![\w.])({longest_first})(?!\w)", lambda m: self._names[m[0]], described)
            error.args = (renamed + got + value,)
