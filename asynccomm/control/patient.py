"""Messages to all that wait at the root for others, and the copies of them at its heir. No I/O.

Each rank that leaves, a comm or the job, messages that to all, and usually all ranks leave at about the same time. Such
messages are *patient*: the root sends them as one batch when none has come for ``PATIENT_SECONDS``, and after
``PATIENT_TIMES`` as long at the latest. One message to each rank for each rank that leaves would be too many. The root
has acknowledged leaves that wait. It therefore *entrusts* each waiting message to its heir, the next root, at once: if
the root is lost, the heir sends the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

from asynccomm.control.batches import batches
from asynccomm.control.messages import MessageBatch, RoutedMessage

PATIENT_SECONDS: Final = 0.05  # without further patient messages, until they are sent
PATIENT_TIMES: Final = 8  # times PATIENT_SECONDS that a patient message waits at most
HELD: Final = 4096  # messages at the heir, until it looks for those that the root has sent


@final
class PatientMessages:
    """The messages that wait at the root.

    Args:
        send: called with each message or batch to send to all ranks.
        entrust: called with messages that begin to wait.
        later: calls its argument after ``PATIENT_SECONDS``; None: no message waits for others.
    """

    def __init__(
        self,
        send: Callable[[RoutedMessage | MessageBatch], object],
        entrust: Callable[[Sequence[RoutedMessage]], object],
        later: Callable[[Callable[[], object]], object] | None,
    ) -> None:
        self.waiting: list[RoutedMessage] = []
        self._send, self._entrust, self._later = send, entrust, later
        self._pausing = False  # a batch was sent less than PATIENT_SECONDS ago

    def add(self, message: RoutedMessage) -> None:
        """Send ``message`` now, or with others."""
        self.waiting.append(message)
        if self._later is None:
            self.flush()
        elif self._pausing:
            self._entrust([message])
        else:
            self._send_batch(self._later)

    def flush(self) -> None:
        """Send all waiting messages; also before any other message, so that messages stay in order."""
        if self.waiting:
            messages, self.waiting = self.waiting, []
            for frame in batches(messages):
                self._send(frame)

    def _send_batch(self, later: Callable[[Callable[[], object]], object]) -> None:
        """Send the waiting messages, and none for some time after."""
        self.flush()
        self._pausing = True
        waiting = times = 0

        def resume() -> None:
            nonlocal waiting, times
            before, waiting, times = waiting, len(self.waiting), times + 1
            if not waiting:
                self._pausing = False
            elif waiting > before and times < PATIENT_TIMES:
                later(resume)
            else:
                self._send_batch(later)

        later(resume)


@final
class EntrustedMessages:
    """The messages that wait at the root, at its heir: for the case that the root is lost before it sends them.

    Args:
        is_known: whether the root has sent a message.
    """

    def __init__(self, is_known: Callable[[RoutedMessage], bool]) -> None:
        self._messages: list[RoutedMessage] = []
        self._is_known = is_known
        self._unknown = 0  # the number of messages that were not known at the last look

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: RoutedMessage) -> None:
        """Keep a message."""
        self._messages.append(message)
        if len(self._messages) > HELD + 2 * self._unknown:
            self._messages = [each for each in self._messages if not self._is_known(each)]
            self._unknown = len(self._messages)

    def take(self) -> list[RoutedMessage]:
        """Remove all messages, and return them."""
        messages, self._messages = self._messages, []
        return messages
