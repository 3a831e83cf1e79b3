"""What breaks a comm, as an item of news for the other ranks, and back."""

from __future__ import annotations

from typing import Any

from asynccomm.errors import AbortedError, BackendError, BrokenError, CollectiveMismatchError, PeerLostError

__all__ = ["error_of", "news_of"]


def news_of(error: BrokenError) -> dict[str, Any]:
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


def error_of(item: dict[str, Any]) -> BrokenError | None:
    """What a comm breaks with where ``item`` is heard; None: it is not about an error."""
    match item["kind"]:
        case "abort":
            return AbortedError(item["rank"], item["reason"])
        case "lost":
            return PeerLostError(item["lost"], item["reason"])
        case "mismatch":
            return CollectiveMismatchError(*item["sides"])
        case "transport":  # seen by that rank, not caused by it
            return BackendError(f"rank {item['rank']} reports: {item['reason']}")
        case _:
            return None
