"""Messages of the control channel as bytes: a length of four bytes, highest first, then a JSON object in UTF-8.

Nothing that arrives is believed: whatever is no message is a :class:`GarbledError`, and a length beyond the limit is
refused before anything is kept for it.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final, final

MESSAGE_BYTES: Final = 4 << 20  # stacks of a process with many threads, many fingerprints
HELLO_BYTES: Final = 1024  # what a stranger may send
_LENGTH: Final = struct.Struct(">I")

ControlMessage = dict[str, Any]


class GarbledError(ValueError):
    """Bytes that are no message."""


def encode(message: ControlMessage) -> bytes:
    """``message`` as a frame. Raises: ValueError if it is too long."""
    data = json.dumps(message, separators=(",", ":")).encode(errors="replace")
    if len(data) > MESSAGE_BYTES:
        raise ValueError(f"a control message of {len(data)} bytes, where {MESSAGE_BYTES} are the limit")
    return _LENGTH.pack(len(data)) + data


@final
class Decoder:
    """Finds the messages in what comes over one connection.

    Args:
        limit: bytes of a message at most; may be raised later.
    """

    __slots__ = ("_data", "limit")

    def __init__(self, limit: int = HELLO_BYTES) -> None:
        self.limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        self._data += data

    def next(self) -> ControlMessage | None:
        """The next message; None if it is not whole yet. Raises: GarbledError."""
        have = self._data
        if len(have) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(have)
        if length > self.limit:
            raise GarbledError(f"a message of {length} bytes, where {self.limit} are the limit")
        end = _LENGTH.size + length
        if len(have) < end:
            return None
        try:
            message = json.loads(have[_LENGTH.size : end].decode())
        except (ValueError, RecursionError) as exc:
            raise GarbledError(f"no JSON: {exc}") from None
        del have[:end]
        if not isinstance(message, dict):
            raise GarbledError(f"a message is an object, not {type(message).__name__}")
        return message
