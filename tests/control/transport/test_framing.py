"""Frames: whatever is cut, long, deep or no text at all."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.control.transport import framing
from asynccomm.control.transport.framing import HELLO_BYTES, MESSAGE_BYTES, Decoder, encode
from asynccomm.control.transport.schema import JsonObject, MessageError
from tests.cases import cases

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES: Any = st.dictionaries(st.text(), VALUES, max_size=4)


def framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def all_of(decoder: Decoder) -> list[JsonObject]:
    found = []
    while (message := decoder.next()) is not None:
        found.append(message)
    return found


@given(st.lists(MESSAGES, max_size=4), st.lists(st.integers(0, 4000), max_size=8))
def test_messages_arrive_however_they_are_cut(messages: list[JsonObject], cuts: list[int]) -> None:
    data = b"".join(map(encode, messages))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder, found = Decoder(MESSAGE_BYTES), []
    for start, end in itertools.pairwise(places):
        decoder.feed(data[start:end])
        found += all_of(decoder)
    assert found == json.loads(json.dumps(messages))


def test_byte_by_byte() -> None:
    decoder = Decoder()
    data = encode({"a": "ü"}) + encode({"b": 2})
    found = []
    for number in range(len(data)):
        decoder.feed(data[number : number + 1])
        found += all_of(decoder)
    assert found == [{"a": "ü"}, {"b": 2}]


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_arbitrary_bytes_are_messages_or_garbled(parts: list[bytes]) -> None:
    decoder = Decoder()
    for part in parts:
        decoder.feed(part)
        try:
            for message in all_of(decoder):
                assert isinstance(message, dict)
        except MessageError:
            return


@given(st.binary(max_size=200))
def test_arbitrary_contents_are_messages_or_garbled(data: bytes) -> None:
    decoder = Decoder()
    decoder.feed(framed(data))
    try:
        message = decoder.next()
    except MessageError:
        return
    assert isinstance(message, dict)


@cases(
    "data, why",
    [
        (b"", "no JSON"),
        (b"hello", "no JSON"),
        (b"\xff\xfe{}", "no JSON"),
        (b'{"a": "\xed\xa0\x80"}', "no JSON"),
        (b"{} {}", "no JSON"),
        (b"[" * 900, "no JSON"),
        (b'{"a":' * 180 + b"1", "no JSON"),
        (b'{"a":' + b"9" * 1000 + b"}" * 2, "no JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b'"text"', "Expected `object`, got `str`"),
        (b"null", "Expected `object`, got `null`"),
        (b"7", "Expected `object`, got `int`"),
    ],
)
def test_what_is_no_message(data: bytes, why: str) -> None:
    decoder = Decoder()
    decoder.feed(framed(data))
    with pytest.raises(MessageError, match=why):
        decoder.next()


@cases("data", [b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' + b"9" * 20_000 + b"}"])
def test_what_would_be_too_much_for_the_parser_is_garbled(data: bytes) -> None:
    decoder = Decoder(MESSAGE_BYTES)
    decoder.feed(framed(data))
    with pytest.raises(MessageError):
        decoder.next()


@cases("length", [HELLO_BYTES + 1, MESSAGE_BYTES, 2**31, 2**32 - 1])
def test_a_length_beyond_the_limit_is_refused_before_anything_comes(length: int) -> None:
    decoder = Decoder()
    decoder.feed(struct.pack(">I", length))
    with pytest.raises(MessageError, match=f"a message has at most {HELLO_BYTES} bytes, got {length}"):
        decoder.next()


def test_the_limit_can_be_raised() -> None:
    decoder = Decoder()
    decoder.feed(encode({"a": 1}))
    assert decoder.next() == {"a": 1}
    decoder.limit = MESSAGE_BYTES
    decoder.feed(encode({"a": "x" * HELLO_BYTES}))
    assert decoder.next() == {"a": "x" * HELLO_BYTES}


def test_what_is_too_long_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MESSAGE_BYTES", 10)
    assert encode({"a": 100}) == framed(b'{"a":100}')
    with pytest.raises(ValueError, match="a control message has at most 10 bytes, got 12"):
        encode({"a": 100000})


def test_text_that_is_none_is_sent_all_the_same() -> None:
    decoder = Decoder()
    decoder.feed(encode({"a": "x\ud800y"}))  # of a file's name, say
    assert decoder.next() == {"a": "x\ud800y"}
