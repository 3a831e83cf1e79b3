"""The comms of one rank, as subscribers of the control channel, and the news kept for comms not subscribed yet.

Other ranks may create a comm earlier, and fail before this rank has subscribed to it. The news of such a comm are kept.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, final

from asynccomm.control.fingerprints import Fingerprint
from asynccomm.control.transport.schema import JsonObject

EVERY: Final = "*"  # all comms, in place of a comm's key
KEPT_COMMS: Final = 256  # comms not subscribed yet, for which news are kept
KEPT_NEWS: Final = 64  # news kept for each such comm

_log = logging.getLogger("asynccomm")


class Subscriber(Protocol):
    """A comm on one rank, as the control channel sees it. All methods run on the control thread, and must not block."""

    def on_news(self, rank: int, item: JsonObject) -> None:
        """Handle news from ``rank`` of the job."""

    def on_departure(self, rank: int, how: str) -> None:
        """Handle the end of ``rank`` of the job; ``how`` is empty after an orderly leave."""

    def on_request(self, question: JsonObject) -> JsonObject:
        """Answer a request of a rank of the comm, or of a diagnosing process."""

    def take_fingerprints(self) -> tuple[int, Sequence[Fingerprint]]:
        """The size of the comm, and the fingerprints of the collectives issued since the last call."""


@final
class Subscribers:
    """The subscribed comms of one rank. Runs on the control thread.

    Args:
        gone: the reason for each rank of the job that is gone; changes over time.
    """

    def __init__(self, gone: Mapping[int, str]) -> None:
        self._gone = gone
        self._members: dict[str, Subscriber] = {}
        self._kept: OrderedDict[str, list[tuple[int, JsonObject]]] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def subscribe(self, key: str, member: Subscriber) -> None:
        """Deliver the news of comm ``key`` to ``member``, beginning with the news that it has missed."""
        self._members[key] = member
        for rank, how in self._gone.items():
            _guarded(partial(member.on_departure, rank, how), key)
        for rank, item in self._kept.pop(key, ()):
            _guarded(partial(member.on_news, rank, item), key)

    def unsubscribe(self, key: str) -> None:
        """End the subscription of comm ``key``."""
        self._members.pop(key, None)

    def on_news(self, key: str, rank: int, item: JsonObject) -> None:
        """Deliver news from ``rank`` to comm ``key``, or keep them until the comm subscribes."""
        if self.deliver(key, rank, item):
            return
        kept = self._kept.setdefault(key, [])
        if len(kept) < KEPT_NEWS:
            kept.append((rank, item))
        if len(self._kept) > KEPT_COMMS:
            self._kept.popitem(last=False)

    def deliver(self, key: str, rank: int, item: JsonObject) -> bool:
        """Deliver news from ``rank`` to comm ``key`` if it is subscribed. Returns whether it is."""
        member = self._members.get(key)
        if member is not None:
            _guarded(partial(member.on_news, rank, item), key)
        return member is not None

    def on_departure(self, rank: int, how: str) -> None:
        """Deliver the end of ``rank`` of the job to all comms."""
        for key, member in list(self._members.items()):
            _guarded(partial(member.on_departure, rank, how), key)

    def on_request(self, key: str, question: JsonObject) -> JsonObject:
        """The answer of comm ``key``, or of all comms; empty if the comm is not subscribed."""
        if key == EVERY:
            return {"comms": {each: self.on_request(each, question) for each in list(self._members)}}
        member = self._members.get(key)
        if member is None:
            return {}
        try:
            return member.on_request(question)
        except Exception as exc:
            _log.exception("comm %s could not answer a request of the control channel", key)
            return {"problem": f"{type(exc).__name__}: {exc}"}

    def take_fingerprints(self) -> Iterator[tuple[str, int, Sequence[Fingerprint]]]:
        """Key, size and new fingerprints of each comm."""
        for key, member in list(self._members.items()):
            yield key, *member.take_fingerprints()


def _guarded(call: Callable[[], object], key: str) -> None:
    """Make ``call`` for a comm, and log its error: a failing comm must not end the channel of the other comms."""
    try:
        call()
    except Exception:
        _log.exception("comm %s could not handle a message of the control channel", key)
