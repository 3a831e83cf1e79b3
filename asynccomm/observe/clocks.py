"""The difference between the clocks of two ranks, from requests that the other one answers with its time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, final


@final
class ClockOffset(NamedTuple):
    """Seconds to add to this rank's clock to get the other rank's, and how far that may be wrong."""

    seconds: float = 0.0
    uncertainty: float = 0.0


def estimate(samples: Iterable[tuple[float, float, float]], *, same_host: bool) -> ClockOffset | None:
    """The offset by the sample with the shortest way there and back; None without a sample.

    The answer was made some time between request and reply, so the offset is known to half of that time.

    Args:
        samples: this rank's time of the request, the other rank's time, this rank's time of the reply.
        same_host: whether both seem to run on one host, where all processes share a clock; an estimate that agrees
            with that is replaced by 0.
    """
    best = min(samples, key=lambda sample: sample[2] - sample[0], default=None)
    if best is None:
        return None
    asked, theirs, replied = best
    found = ClockOffset(theirs - (asked + replied) / 2, (replied - asked) / 2)
    return ClockOffset() if same_host and abs(found.seconds) <= found.uncertainty else found
