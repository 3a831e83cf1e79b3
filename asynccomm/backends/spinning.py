"""The decision whether a wait begins with a spin: it does if the last wait was short.

The next wait is probably as long as the last one. A spin that fails costs less than the wait that follows it, and a
rank that does not spin takes longer for its calls, so that the spins of the others fail, too. One short wait must
therefore be enough to make a rank spin again.
"""

from __future__ import annotations

import time
from typing import Final

SHORT_WAIT_SECONDS: Final = 5e-4  # of a wait that begins with a spin: several times as long as a spin and a wake-up
_BYTE_SECONDS: Final = 1e-9  # that memory takes at most for a byte


def waited(started: float, nbytes: int = 0) -> float:
    """The seconds that an operation has waited since its call, without those that its data may take to move."""
    return time.monotonic() - started - nbytes * _BYTE_SECONDS
