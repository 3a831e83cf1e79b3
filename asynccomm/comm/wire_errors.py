"""What breaks a comm, as an item of news for the other ranks, and back.

What comes from another rank is not believed to be well-formed: if it is about an error that cannot be read, it is one
that says so. Texts are cut off.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from asynccomm.errors import AbortedError, BackendError, BrokenError, CollectiveMismatchError, PeerLostError

TEXT: Final = 16 << 10  # characters of one text in the news

_log = logging.getLogger("asynccomm")


def encode_error(error: BrokenError) -> dict[str, Any]:
    """What the other ranks are told of an error that this one has met."""
    match error:
        case AbortedError():
            return {"kind": "abort", "reason": error.reason}
        case PeerLostError():
            return {"kind": "lost", "lost": error.rank, "reason": error.detail}
        case CollectiveMismatchError():
            return {"kind": "mismatch", "sides": list(error.args)}
        case BackendError():
            return {"kind": "transport", "reason": f"{type(error).__name__}: {error}"}
        case _:
            return {"kind": "abort", "reason": f"{type(error).__name__}: {error}"}


def decode_error(item: dict[str, Any]) -> BrokenError | None:
    """What a comm breaks with where ``item`` is heard; None: it is not about an error.

    Args:
        item: of which only ``rank``, that of the sender in the comm, is known to be right.
    """
    rank, kind, reason = item["rank"], item.get("kind"), item.get("reason")
    if type(kind) is not str:
        _log.warning("rank %d has news that say not of what", rank)
        return None
    match kind:
        case "abort" if type(reason) is str:
            return AbortedError(rank, reason[:TEXT])
        case "lost" if type(reason) is str and _is_number(item.get("lost"), 0):
            return PeerLostError(item["lost"], reason[:TEXT])
        case "mismatch" if (sides := _sides(item.get("sides"))) is not None:
            return CollectiveMismatchError(*sides)
        case "transport" if type(reason) is str:  # seen by that rank, not caused by it
            return BackendError(f"rank {rank} reports: {reason[:TEXT]}")
        case "abort" | "lost" | "mismatch" | "transport":
            return BackendError(f"rank {rank} reports an error that cannot be read, of the kind {kind!r}")
        case _:
            return None


def _is_number(value: object, least: int) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _sides(sides: object) -> list[Any] | None:
    """What a CollectiveMismatchError is made of; None: it is not."""
    if type(sides) is not list or not 5 <= len(sides) <= 7:
        return None
    seq, rank, op, other_rank, other_op, *sites = sides
    numbers = _is_number(seq, -1) and _is_number(rank, 0) and _is_number(other_rank, 0)
    if not numbers or not all(type(text) is str for text in (op, other_op, *sites)):
        return None
    return [seq, rank, op[:TEXT], other_rank, other_op[:TEXT], *(site[:TEXT] for site in sites)]
