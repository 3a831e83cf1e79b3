"""The times of the control channel that several modules must agree on, in seconds."""

from __future__ import annotations

from typing import Final

HEARTBEAT_SECONDS: Final = 1.0  # between heartbeats
PING_SECONDS: Final = 0.1  # for an event loop to run a callback before it counts as blocked
SILENT_SECONDS: Final = 3.0  # without any heartbeat, after which a rank counts as stopped
REACH_SECONDS: Final = 5.0  # without any connection to a rank, after which it counts as lost
ANSWER_SECONDS: Final = 1.0  # for ranks to answer a request
CONNECT_SECONDS: Final = 20.0  # for the members of a decision to connect
PATIENCE_SECONDS: Final = 30.0  # for a member to report that it has connected, or to report to a new root
LINGER_SECONDS: Final = 30.0  # for the other ranks to learn of a commit that a rank holds
RETRY_SECONDS: Final = 0.005  # between attempts at a local socket for which the kernel has no room
