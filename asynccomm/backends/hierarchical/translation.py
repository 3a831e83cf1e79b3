"""Errors of a backend among some ranks of a comm, in terms of the comm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from asynccomm.backends.base import ConnectionEndedError
from asynccomm.backends.hierarchical.labels import call_behind
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError, PeerLostError

_UNKNOWN: Final = "tag unknown here"  # in the text of a collective with a label that is new to this rank
_END: Final = re.compile(r"\b(dst|src)=(\d+)")
_RANK: Final = re.compile(r"\brank([ =])(\d+)\b")


def translated(error: BrokenError, ranks: Sequence[int]) -> BrokenError:
    """``error`` with the comm's numbers and calls.

    Args:
        ranks: the comm's number of each rank of the backend.
    """
    match error:
        case PeerLostError(rank=rank, detail=detail):
            return PeerLostError(ranks[rank], detail)
        case CollectiveMismatchError(seq=seq, rank=rank, other_rank=other):
            mine, theirs = _call(error.op, ranks), _call(error.other_op, ranks)
            if mine == theirs:
                theirs = f"{theirs}, of other sizes or dtypes"
            return CollectiveMismatchError(seq, ranks[rank], mine, ranks[other], theirs)
        case ConnectionEndedError(rank=rank, reason=reason, op=op, message=message):
            return ConnectionEndedError(ranks[rank], reason, _call(op, ranks), message)
        case BackendError():
            new = BackendError(_RANK.sub(lambda found: f"rank{found[1]}{_number(found[2], ranks)}", str(error)))
            new.__cause__ = error.__cause__
            return new
        case _:
            return error


def _call(step: str, ranks: Sequence[int]) -> str:
    if _UNKNOWN in step:
        return "another call"
    if step.startswith(("send", "recv", "stream")):
        return _END.sub(lambda found: f"{found[1]}={_number(found[2], ranks)}", step)
    return call_behind(step)


def _number(text: str, ranks: Sequence[int]) -> int:
    number = int(text)
    return ranks[number] if number < len(ranks) else number
