"""The errors of pushing weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from asynccomm.errors import AsyncCommError

SEVERAL = 4  # names that an error lists for each difference


@final
class LayoutError(AsyncCommError):
    """The weights of a server do not fit those of the trainers. Both sides raise it, before any weights are sent.

    Args:
        server: the server's label.
        problems: for each kind of difference the tensors, with shapes or dtypes of both sides.
    """

    def __init__(self, server: str, problems: Mapping[str, Sequence[str]]) -> None:
        super().__init__(server, problems)
        self.server, self.problems = server, problems

    def __str__(self) -> str:
        found = "; ".join(f"{kind}: {_several(names)}" for kind, names in self.problems.items())
        return f"the weights of server {self.server!r} do not fit those of the trainers: {found}"


@final
class PushAbandonedError(AsyncCommError):
    """A push ended before all trainers had sent their part. The servers go on with the version before.

    Args:
        version: the version that was to be pushed.
        reason: the cause, with the number of the trainer.
    """

    def __init__(self, version: int, reason: str) -> None:
        super().__init__(version, reason)
        self.version, self.reason = version, reason

    def __str__(self) -> str:
        return f"the push of version {self.version} was abandoned: {self.reason}"


def _several(names: Sequence[str]) -> str:
    return ", ".join(names[:SEVERAL]) + (f" and {len(names) - SEVERAL} more" if len(names) > SEVERAL else "")
