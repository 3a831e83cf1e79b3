"""Encodes the error that breaks a comm as a message for the other ranks, and decodes it.

Messages from other ranks are validated: an unreadable error of a known kind is decoded as a BackendError about it.
Texts are cut at ``TEXT`` characters, by the sender, because a message may not be too long, and by the receiver.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from asynccomm.errors import AbortedError, BackendError, BrokenError, CollectiveMismatchError, PeerLostError

TEXT: Final = 16 << 10  # characters of one text in a message

_log = logging.getLogger("asynccomm")


def encode_error(error: BrokenError) -> dict[str, Any]:
    """The message about an error of this rank for the other ranks."""
    match error:
        case AbortedError():
            return {"kind": "abort", "reason": error.reason[:TEXT]}
        case PeerLostError():
            return {"kind": "lost", "lost": error.rank, "reason": error.detail[:TEXT]}
        case CollectiveMismatchError():
            return {"kind": "mismatch", "sides": [x[:TEXT] if isinstance(x, str) else x for x in error.args]}
        case BackendError():
            return {"kind": "transport", "reason": f"{type(error).__name__}: {error}"[:TEXT]}
        case _:
            return {"kind": "abort", "reason": f"{type(error).__name__}: {error}"[:TEXT]}


def decode_error(item: dict[str, Any]) -> BrokenError | None:
    """The error that breaks the comm of the receiver of ``item``; None: ``item`` is not about an error.

    Args:
        item: the message; only its ``rank``, the sender's rank in the comm, is known to be right.
    """
    rank, kind, reason = item["rank"], item.get("kind"), item.get("reason")
    if type(kind) is not str:
        _log.warning("rank %d sent a message without a kind", rank)
        return None
    match kind:
        case "abort" if type(reason) is str:
            return AbortedError(rank, reason[:TEXT])
        case "lost" if type(reason) is str and _is_number(item.get("lost"), 0):
            return PeerLostError(item["lost"], reason[:TEXT])
        case "mismatch" if (sides := _sides(item.get("sides"))) is not None:
            return CollectiveMismatchError(*sides)
        case "transport" if type(reason) is str:  # the sender has seen the error, not caused it
            return BackendError(f"rank {rank} reports: {reason[:TEXT]}")
        case "abort" | "lost" | "mismatch" | "transport":
            return BackendError(f"rank {rank} reports an error that cannot be read, of the kind {kind!r}")
        case _:
            return None


def _is_number(value: object, least: int) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _sides(sides: object) -> list[Any] | None:
    """The arguments of a CollectiveMismatchError, validated; None: invalid."""
    if type(sides) is not list or not 5 <= len(sides) <= 7:
        return None
    seq, rank, op, other_rank, other_op, *sites = sides
    numbers = _is_number(seq, -1) and _is_number(rank, 0) and _is_number(other_rank, 0)
    if not numbers or not all(type(text) is str for text in (op, other_op, *sites)):
        return None
    return [seq, rank, op[:TEXT], other_rank, other_op[:TEXT], *(site[:TEXT] for site in sites)]
