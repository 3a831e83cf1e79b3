"""Messages of the control channel as bytes: four bytes of length, big-endian, then a JSON object in UTF-8.

Received bytes are not trusted: bytes that are no message raise :class:`MessageError`, and a length beyond the limit is
refused before any memory is used for it.
"""

from __future__ import annotations

import struct
from typing import Final, final

from asynccomm.control.transport.schema import JsonObject, MessageError, dumps, loads

MESSAGE_BYTES: Final = 4 << 20  # room for the stacks of many threads, or for many fingerprints
HELLO_BYTES: Final = 1024  # limit for an unauthenticated peer
_LENGTH: Final = struct.Struct(">I")


def encode(message: object) -> bytes:
    """``message`` as a frame. Raises: ValueError if it is too long."""
    data = dumps(message).encode()
    if len(data) > MESSAGE_BYTES:
        raise ValueError(f"a control message has at most {MESSAGE_BYTES} bytes, got {len(data)}")
    return _LENGTH.pack(len(data)) + data


@final
class Decoder:
    """Splits the bytes of one connection into messages.

    Args:
        limit: the largest message in bytes; may be raised later.
    """

    __slots__ = ("_data", "limit")

    def __init__(self, limit: int = HELLO_BYTES) -> None:
        self.limit: int = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._data += data

    def next(self) -> JsonObject | None:
        """The next message; None: it is incomplete. Raises: MessageError."""
        have = self._data
        if len(have) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(have)
        if length > self.limit:
            raise MessageError(f"a message has at most {self.limit} bytes, got {length}")
        end = _LENGTH.size + length
        if len(have) < end:
            return None
        message: JsonObject = loads(JsonObject, bytes(have[_LENGTH.size : end]))
        del have[:end]
        return message
