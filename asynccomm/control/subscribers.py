"""The comms of one rank, seen by the control channel: what is said to them, and what is kept for those still to come.

Others may be quicker to make a comm, and give up before this rank has enrolled it: what concerns it is kept.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, final

from asynccomm.control.fingerprints import Fingerprint
from asynccomm.control.transport.framing import ControlMessage

EVERY: Final = "*"  # in place of a comm's key
KEPT_COMMS: Final = 256  # comms that are not enrolled yet, for which news are kept
KEPT_NEWS: Final = 64  # of each

_log = logging.getLogger("asynccomm")


class Subscriber(Protocol):
    """A comm on one rank, seen by the control channel. All methods are called on the control thread; none may wait."""

    def hear(self, rank: int, item: ControlMessage) -> None:
        """``rank`` of the job has news."""

    def lose(self, rank: int, how: str) -> None:
        """``rank`` of the job is gone; ``how`` is empty if it left in good order."""

    def answer(self, question: ControlMessage) -> ControlMessage:
        """What a rank of the comm, or somebody who looks on, wants to know."""

    def fingerprints(self) -> tuple[int, Sequence[Fingerprint]]:
        """The size of the comm, and the fingerprints of the collectives issued since this was last called."""


@final
class Subscribers:
    """Those of one rank. On the control thread.

    Args:
        gone: ranks of the job that are, and how; it changes.
    """

    def __init__(self, gone: Mapping[int, str]) -> None:
        self._gone = gone
        self._members: dict[str, Subscriber] = {}
        self._kept: OrderedDict[str, list[tuple[int, ControlMessage]]] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def subscribe(self, key: str, member: Subscriber) -> None:
        """From now on, ``member`` hears what concerns the comm of that key; at once, what it has missed."""
        self._members[key] = member
        for rank, how in self._gone.items():
            _guarded(partial(member.lose, rank, how), key)
        for rank, item in self._kept.pop(key, ()):
            _guarded(partial(member.hear, rank, item), key)

    def unsubscribe(self, key: str) -> None:
        """It does not any more."""
        self._members.pop(key, None)

    def hear(self, key: str, rank: int, item: ControlMessage) -> None:
        """``rank`` has news for a comm, which may come later."""
        if self.tell(key, rank, item):
            return
        kept = self._kept.setdefault(key, [])
        if len(kept) < KEPT_NEWS:
            kept.append((rank, item))
        if len(self._kept) > KEPT_COMMS:
            self._kept.popitem(last=False)

    def tell(self, key: str, rank: int, item: ControlMessage) -> bool:
        """The same for a comm that is here. Returns whether it is."""
        member = self._members.get(key)
        if member is not None:
            _guarded(partial(member.hear, rank, item), key)
        return member is not None

    def lose(self, rank: int, how: str) -> None:
        """``rank`` of the job is gone."""
        for key, member in list(self._members.items()):
            _guarded(partial(member.lose, rank, how), key)

    def answer(self, key: str, question: ControlMessage) -> ControlMessage:
        """What the comm of that key answers, or all of them; nothing if it is not here."""
        if key == EVERY:
            return {"comms": {each: self.answer(each, question) for each in list(self._members)}}
        member = self._members.get(key)
        if member is None:
            return {}
        try:
            return member.answer(question)
        except Exception as exc:
            _log.exception("comm %s could not answer a question of the control channel", key)
            return {"problem": f"{type(exc).__name__}: {exc}"}

    def fingerprints(self) -> Iterator[tuple[str, int, Sequence[Fingerprint]]]:
        """Key, size and new fingerprints of each comm."""
        for key, member in list(self._members.items()):
            yield key, *member.fingerprints()


def _guarded(call: Callable[[], object], key: str) -> None:
    """A comm that cannot take something must not end the channel of the others."""
    try:
        call()
    except Exception:
        _log.exception("comm %s could not take a message of the control channel", key)
