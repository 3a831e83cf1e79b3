"""Messages between processes: their classes are their schema.

:func:`dumps` writes a message as JSON, and :func:`decode` checks the JSON of any process and converts it. Rules on
several fields are in ``__post_init__``, which raises ValueError.

Python's ``json`` reads and writes the text, because msgspec's own codec refuses the lone surrogates in file names.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any, Final, TypeAlias

import msgspec

SHOWN: Final = 200  # characters of a malformed value that an error shows

JsonObject: TypeAlias = dict[str, Any]

_encoder: Final = json.JSONEncoder(separators=(",", ":"))
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = SHOWN


class MessageError(ValueError):
    """A value from another process that is not the expected message; the text names the field and the value."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of messages and their parts. A field with a default may be missing."""


class TaggedMessage(Message, frozen=True, tag=True, tag_field="kind"):
    """Base class of messages that are told apart by the name of their class."""


def dumps(message: object) -> str:
    """``message`` as JSON: a message, or a JSON value that contains messages."""
    return _encoder.encode(msgspec.to_builtins(message))


def loads(kind: Any, text: bytes | str) -> Any:
    """The value of type ``kind`` in a JSON text. Raises: MessageError."""
    try:
        data = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as exc:
        raise MessageError(f"no JSON: {exc}, got {shown(text)}") from None
    return decode(kind, data)


def decode(kind: Any, data: object) -> Any:
    """The value of type ``kind`` in a JSON value. Raises: MessageError."""
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise MessageError(f"{exc!s:.{SHOWN}}, got {shown(data)}") from None


def shown(data: object) -> str:
    """A malformed value for an error, of limited length."""
    try:
        text = _repr.repr(data)
    except ValueError:  # Python writes no integer of thousands of digits
        text = f"an {type(data).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
