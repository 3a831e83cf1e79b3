"""Prediction of the next collective: programs repeat their calls.

A prediction depends only on the earlier calls. As long as the ranks make the same calls, they make the same
predictions; where the calls begin to differ, at most one group of ranks still follows the prediction.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

REMEMBERED: Final = 4096  # pairs of calls with a known successor: more than a training step has


class Predicted(NamedTuple):
    """The collective that a rank will probably call next."""

    heading: bytes
    needs_every_rank: bool
    confirmed: bool  #: followed the same two calls twice in a row


@final
class Predictor:
    """The calls of one rank so far, by their headings.

    A heading describes a call completely, except for its number. The prediction is the call that followed the last two
    calls twice in a row.
    """

    def __init__(self) -> None:
        self._successors: dict[tuple[bytes, bytes], Predicted] = {}
        self._last = b"", b""
        self._long: set[bytes] = set()

    def predict(self) -> Predicted | None:
        """The next call, if there is a confirmed prediction."""
        successor = self._successors.get(self._last)
        return successor if successor is not None and successor.confirmed else None

    def record(self, heading: bytes, needs_every_rank: bool) -> None:
        """Record a call, in the order of calls."""
        last = self._last
        known = self._successors.get(last)
        again = known is not None and known.heading == heading
        if known is None or not (again and known.confirmed):
            if known is None and len(self._successors) >= REMEMBERED:  # at the same call on all ranks
                self._successors.clear()
            self._successors[last] = Predicted(heading, needs_every_rank, again)
        self._last = last[1], heading

    def is_long(self, heading: bytes) -> bool:
        """Whether the contributions to such a call did not fit into frames before."""
        return heading in self._long

    def note_long(self, heading: bytes) -> None:
        """Record that the contributions to such a call do not fit into frames."""
        if len(self._long) >= REMEMBERED:
            self._long.clear()
        self._long.add(heading)
