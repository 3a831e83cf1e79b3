"""One rank's record of the messages to all: none is lost, and none handled twice, when connections change. No I/O.

Each sender numbers its messages to all, and repeats each message until the root has returned it; each rank keeps the
last ``LOGGED`` messages to all for ranks that connect later. A rank ignores a numbered message that it has already
seen.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from typing import Final, final

from asynccomm.control.messages import RoutedMessage

LOGGED: Final = 64  # messages to all that are kept for ranks that connect later
REPEATED: Final = 4096  # messages that are repeated until the root returns them


@final
class BroadcastLog:
    """The messages to all that a rank has seen, and those that it has sent up and not seen again."""

    def __init__(self) -> None:
        self.recent: deque[RoutedMessage] = deque(maxlen=LOGGED)  #: the last messages
        self.added: int = 0  #: the number of all messages that ``recent`` has had
        self._numbered = 0  # messages of this rank
        self._last: dict[int, int] = {}  # by rank, the number of its last message
        self._unacked: OrderedDict[tuple[int, int], RoutedMessage] = OrderedDict()  # sent up, not returned by the root

    def number(self) -> int:
        """The number of the next message of this rank."""
        self._numbered += 1
        return self._numbered

    def repeat(self, message: RoutedMessage, number: int) -> None:
        """Repeat ``message``, which is sent up with ``number``, until the root returns it."""
        for source in message.sources:
            self._unacked[source, number] = message if not message.also else message.of([source])
            if len(self._unacked) > REPEATED:
                self._unacked.popitem(last=False)

    @property
    def repeated(self) -> list[RoutedMessage]:
        """The messages to send again after a change of connections."""
        return [*self._unacked.values()]

    def knows(self, message: RoutedMessage) -> bool:
        """Whether ``message`` has a number and was seen before, from all its sources."""
        return message.number is not None and not self._new_sources(message, message.number)

    def add(self, message: RoutedMessage) -> RoutedMessage | None:
        """Record a message. Returns it, of the sources from which it is new; None: it is known."""
        number = message.number
        if number is None:
            return message
        if self._unacked:
            for source in message.sources:
                self._unacked.pop((source, number), None)
        sources = self._new_sources(message, number)
        if not sources:
            return None
        self._last.update(dict.fromkeys(sources, number))
        fresh = message if len(sources) == len(message.sources) else message.of(sources)
        self.recent.append(fresh)
        self.added += 1
        return fresh

    def _new_sources(self, message: RoutedMessage, number: int) -> list[int]:
        """The sources from which a message with ``number`` is new."""
        last, sources = self._last, message.sources
        if min(map(last.get, sources, itertools.repeat(0))) >= number:  # of thousands of sources, usually all or none
            return []
        return [source for source in sources if last.get(source, 0) < number]
