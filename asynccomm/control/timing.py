"""The times that several modules of the control channel must agree on, in seconds."""

from __future__ import annotations

from typing import Final

PING_SECONDS: Final = 0.1  # for an event loop to run a callback before it counts as blocked
SILENT_SECONDS: Final = 3.0  # without any heartbeat, after which a rank counts as stopped
REACH_SECONDS: Final = 5.0  # without any connection to a rank, after which it counts as lost
LINGER_SECONDS: Final = 30.0  # for the other ranks to learn of a commit that a rank holds
