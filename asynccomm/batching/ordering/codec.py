"""The messages of agreed ordering between ranks and coordinator, as bytes.

Messages in both directions are a sequence of tokens, each a varint::

    0      an operation in full: announced with all its fields, decided by its tag
    1 n    the n ids that follow the last one
    2      end of a batch
    3      a mismatch, and nothing else
    4 + z  an operation by its id, as the zigzag difference to the id before (0 at the beginning of a message)

Operations with an id cost one byte each, or less if their ids are consecutive. :class:`ResponseCache` assigns the ids.
A received message is fully checked: the reader decodes it, or raises :class:`OrderMessageError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, final

CAPACITY: Final = 4096  # operations with an id: more than a model has gradients
MAX_TAG: Final = 1024  # bytes of UTF-8
MAX_TEXT: Final = 1024  # characters of a description; longer ones are truncated
MAX_RUN: Final = 64  # ids in one token: limits the work that a small message can cause

FULL, BATCH_END, MISMATCH = -1, -2, -3  # yielded by a MessageReader in place of an id

_FULL, _RUN, _CUT, _MISMATCH, _IDS = range(5)
_STEP = _IDS + 2  # the id after the last one
_CODES: Final = {_FULL: FULL, _CUT: BATCH_END, _MISMATCH: MISMATCH}
_WHAT: Final = struct.Struct("<QQ")
_VARINT_BITS: Final = 63

OpRequest = tuple[str, tuple[int, int], str, int]
"""All that others need to know of an operation: its tag, what it is in two words, the same in words, its bytes."""


class OrderMessageError(ValueError):
    """A message that no rank of this agreement can have written."""


class Mismatch(Exception):
    """Two ranks issued operations under one tag that do not fit each other.

    Args:
        tag: the tag of both.
        rank, text: the rank that announced first, and its operation.
        other_rank, other_text: the other rank, and its operation.
    """

    def __init__(self, tag: str, rank: int, text: str, other_rank: int, other_text: str) -> None:
        super().__init__(tag, rank, text, other_rank, other_text)
        self.tag, self.rank, self.text, self.other_rank, self.other_text = tag, rank, text, other_rank, other_text

    def __str__(self) -> str:
        return (
            f"operations tagged {self.tag!r} differ: rank {self.rank} has {self.text}, "
            f"rank {self.other_rank} has {self.other_text}"
        )


def op_request(tag: str, what: tuple[int, int], text: str, nbytes: int) -> OpRequest:
    """A request that can be encoded. Raises: ValueError."""
    if len(tag.encode()) > MAX_TAG:
        raise ValueError(f"tag must have at most {MAX_TAG} bytes in UTF-8, got {len(tag.encode())}")
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 3] + "..."
    return tag, what, text, nbytes


@final
class ResponseCache:
    """The operations that have an id: the last ``capacity`` that got one. Ids count from 0 and are never reused.

    An operation gets its id when it is decided in full. Decisions are the same on all ranks and arrive in the same
    order, so every rank assigns and evicts the same ids, without further messages.
    """

    __slots__ = ("_capacity", "end", "ids", "notices")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.notices: dict[int, OpRequest] = {}
        self.ids: dict[OpRequest, int] = {}
        self.end: int = 0  #: the next id

    def add(self, notice: OpRequest) -> None:
        """Assign the next id, and evict the oldest."""
        self.notices[self.end] = notice
        self.ids[notice] = self.end
        oldest = self.end - self._capacity
        if oldest >= 0:
            gone = self.notices.pop(oldest)
            if self.ids[gone] == oldest:  # it may have a newer id
                del self.ids[gone]
        self.end += 1

    def oldest(self, unheard: int) -> int:
        """The oldest id still in a cache that has up to ``unheard`` more entries than this one."""
        return self.end + unheard - self._capacity

    def known(self, number: int) -> OpRequest:
        """The operation with this id. Raises: OrderMessageError."""
        try:
            return self.notices[number]
        except KeyError:
            raise OrderMessageError(f"{number} is no operation's id") from None


@final
class MessageWriter:
    """Encodes a message."""

    __slots__ = ("_last", "_out", "_run")

    def __init__(self) -> None:
        self._out = bytearray()
        self._last = 0
        self._run = 0  # consecutive ids not written yet

    def known(self, number: int) -> None:
        """Write an operation by its id."""
        step = number - self._last
        self._last = number
        if step != 1 or self._run == MAX_RUN:
            self._end_run()
        if step == 1:
            self._run += 1
        else:
            self._number(_IDS + (step << 1 if step >= 0 else ~(step << 1)))

    def announced(self, notice: OpRequest) -> None:
        """Write an operation in full, for the coordinator."""
        tag, what, text, nbytes = notice
        self._token(_FULL)
        self._text(tag)
        self._out += _WHAT.pack(*what)
        self._number(nbytes)
        self._text(text)

    def decided(self, tag: str) -> None:
        """Write a decision on the oldest operation under ``tag``, which gets the next id."""
        self._token(_FULL)
        self._text(tag)

    def cut(self) -> None:
        """End a batch; the end of the message ends the last one."""
        self._token(_CUT)

    def mismatch(self, found: Mismatch) -> None:
        self._token(_MISMATCH)
        self._text(found.tag)
        for rank, text in ((found.rank, found.text), (found.other_rank, found.other_text)):
            self._number(rank)
            self._text(text)

    def written(self) -> bytes:
        """The encoded message."""
        self._end_run()
        return bytes(self._out)

    def _token(self, token: int) -> None:
        self._end_run()
        self._out.append(token)

    def _end_run(self) -> None:
        if self._run > 2:
            self._out += bytes((_RUN, self._run))
        elif self._run:
            self._out += bytes((_STEP,)) * self._run
        self._run = 0

    def _number(self, value: int) -> None:
        while value > 127:
            self._out.append(value & 127 | 128)
            value >>= 7
        self._out.append(value)

    def _text(self, text: str) -> None:
        data = text.encode(errors="replace")
        self._number(len(data))
        self._out += data


@final
class MessageReader:
    """Decodes a message: iteration yields ids, and FULL, BATCH_END and MISMATCH.

    After FULL the caller calls ``announced`` or ``tag``, after MISMATCH ``mismatch``.

    Raises: OrderMessageError, from any method.
    """

    __slots__ = ("_at", "_data")

    def __init__(self, message: bytes) -> None:
        self._data = message
        self._at = 0

    def __iter__(self) -> Iterator[int]:
        last = 0
        while self._at < len(self._data):
            token = self._number()
            if token >= _IDS:
                step = token - _IDS
                last += ~(step >> 1) if step & 1 else step >> 1
                if last < 0:
                    raise OrderMessageError("an id is negative")
                yield last
            elif token == _RUN:
                run = self._number()
                if not 0 < run <= MAX_RUN:
                    raise OrderMessageError(f"{run} ids in a row")
                yield from range(last + 1, last + run + 1)
                last += run
            else:
                yield _CODES[token]

    def announced(self) -> OpRequest:
        """The operation announced in full."""
        tag = self.tag()
        first, second = _WHAT.unpack(self._take(_WHAT.size))
        nbytes = self._number()
        text = self._text()
        if len(text) > MAX_TEXT:
            raise OrderMessageError(f"a text of {len(text)} characters, where {MAX_TEXT} are the limit")
        return tag, (first, second), text, nbytes

    def tag(self) -> str:
        """The tag of the decided operation, which is its oldest."""
        try:
            return self._blob(MAX_TAG).decode()
        except UnicodeDecodeError:
            raise OrderMessageError("a tag is no UTF-8") from None

    def mismatch(self) -> Mismatch:
        tag = self.tag()
        found = Mismatch(tag, self._number(), self._text(), self._number(), self._text())
        if self._at < len(self._data):
            raise OrderMessageError("more follows a mismatch")
        return found

    def _number(self) -> int:
        data, at = self._data, self._at
        value = shift = 0
        while at < len(data) and shift < _VARINT_BITS:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                self._at = at
                return value
            shift += 7
        raise OrderMessageError("a number does not end")

    def _text(self) -> str:
        return self._blob(4 * MAX_TEXT).decode(errors="replace")

    def _blob(self, limit: int) -> bytes:
        size = self._number()
        if size > limit:
            raise OrderMessageError(f"a text of {size} bytes, where {limit} are the limit")
        return self._take(size)

    def _take(self, size: int) -> bytes:
        start = self._at
        self._at += size
        if self._at > len(self._data):
            raise OrderMessageError("the message is cut off")
        return self._data[start : self._at]
