"""The protocol without a network: what goes out, what comes in, and what must never be believed."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.errors import StoreError, StoreProtocolError
from asynccomm.store.codec import MAX_KEY, MAX_KEYS, MAX_VALUE, Codec, Status
from tests.cases import cases
from tests.sampling import examples

Exchange = tuple[Callable[[Codec], int], bytes, list[Any]]  # request, the server's answer, the values expected

i64 = st.integers(-(2**63), 2**63 - 1)
u32 = st.integers(0, 2**32 - 1)
blobs = st.binary(max_size=40)
keys = st.text(st.characters(codec="utf-8"), max_size=10)


def blob(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data


def number(value: int) -> bytes:
    return struct.pack("=q", value)


exchanges: st.SearchStrategy[Exchange] = st.one_of(
    st.tuples(keys, blobs).map(lambda a: (lambda c: c.set(*a), b"", [])),
    st.tuples(keys, blobs).map(lambda a: (lambda c: c.append(*a), b"", [])),
    st.dictionaries(keys, blobs, max_size=3).map(lambda a: (lambda c: c.multi_set(a), b"", [])),
    st.just((lambda c: c.multi_get([]), b"", [])),
    blobs.map(lambda v: (lambda c: c.get("k"), blob(v), [v])),
    blobs.map(lambda v: (lambda c: c.compare_set("k", b"a", b"b"), blob(v), [v])),
    i64.map(lambda v: (lambda c: c.add("k", 1), number(v), [v])),
    i64.map(lambda v: (lambda c: c.num_keys(), number(v), [v])),
    st.booleans().map(lambda v: (lambda c: c.check(["k"]), bytes([not v]), [v])),
    st.booleans().map(lambda v: (lambda c: c.delete("k"), number(v), [v])),
    u32.map(lambda v: (lambda c: c.ping(v), struct.pack("=I", v), [v])),
    st.lists(blobs, min_size=1, max_size=4).map(
        lambda v: (lambda c: c.multi_get(["k"] * len(v)), b"".join(map(blob, v)), [v])
    ),
    st.lists(keys, max_size=4).map(
        lambda v: (lambda c: c.list_keys(), number(len(v)) + b"".join(blob(b"/" + k.encode()) for k in v), [v])
    ),
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


@examples(200)
@given(st.lists(exchanges, max_size=8), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_split_of_the_stream_gives_the_same_replies(script: list[Exchange], places: list[int]) -> None:
    codec = Codec()
    expected = []
    for request, _, values in script:
        assert request(codec) == len(values)
        expected += values
    assert codec.outstanding == len(expected)
    replies = []
    for piece in cut(b"".join(answer for _, answer, _ in script), places):
        replies += codec.receive_data(piece)
    assert replies == expected
    assert codec.outstanding == 0


@examples(300)
@given(st.lists(exchanges, max_size=6), st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=6))
def test_garbage_is_refused_for_good_or_understood(script: list[Exchange], pieces: list[bytes]) -> None:
    codec = Codec()
    asked = sum(request(codec) for request, _, _ in script)
    got = 0
    for i, piece in enumerate(pieces):
        try:
            got += len(codec.receive_data(piece))
        except StoreProtocolError:
            for later in [*pieces[i:], b""]:
                with pytest.raises(StoreProtocolError):
                    codec.receive_data(later)
            return
        assert got + codec.outstanding == asked
    assert asked, "bytes that answer nothing were accepted"


@cases(
    "request_, answer, message",
    [
        (lambda c: c.check(["k"]), b"\x02", "status byte"),
        (lambda c: c.wait(["k"]), b"\x07", "status byte"),
        (lambda c: c.wait(["k"]), b"\x01", "nobody cancelled"),
        (lambda c: c.get("k"), b"\xff" * 8, "announced"),
        (lambda c: c.multi_get(["k"]), b"\xff" * 8, "announced"),
        (lambda c: c.list_keys(), number(-1), "announced"),
        (lambda c: c.list_keys(), number(2**62), "announced"),
        (lambda c: c.delete("k"), number(2), "0 or 1"),
        (lambda c: c.ping(7), struct.pack("=I", 8), "no TCPStore"),
        (lambda c: c.check(["k"]), b"\x00\x00", "answer no request"),
        (lambda c: c.set("k", b"v"), b"\x00", "answer no request"),
    ],
)
def test_each_kind_of_nonsense_is_named(request_: Callable[[Codec], int], answer: bytes, message: str) -> None:
    codec = Codec()
    request_(codec)
    with pytest.raises(StoreProtocolError, match=message):
        codec.receive_data(answer)
    with pytest.raises(StoreProtocolError, match="failed before"):
        codec.receive_data(b"")


def test_requests_have_the_bytes_that_torch_sends() -> None:
    def sent(request: Callable[[Codec], int]) -> bytes:
        codec = Codec()
        request(codec)
        return codec.data_to_send()

    key = blob(b"/k")
    two = struct.pack("=Q", 2) + key + blob(b"/l")
    assert sent(lambda c: c.hello(5)) == b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x0d" + struct.pack("=I", 5)
    assert sent(lambda c: c.set("k", "é")) == b"\x01" + key + blob("é".encode())
    assert sent(lambda c: c.compare_set("k", b"a", b"")) == b"\x02" + key + blob(b"a") + blob(b"")
    assert sent(lambda c: c.get("k")) == b"\x03" + key
    assert sent(lambda c: c.add("k", -1)) == b"\x04" + key + number(-1)
    assert sent(lambda c: c.check(["k", "l"])) == b"\x05" + two
    assert sent(lambda c: c.wait(["k", "l"])) == b"\x06" + two
    assert sent(lambda c: c.num_keys()) == b"\x07"
    assert sent(lambda c: c.delete("k")) == b"\x08" + key
    assert sent(lambda c: c.append("k", bytearray(b"x"))) == b"\x09" + key + blob(b"x")
    assert sent(lambda c: c.multi_get(["k", "l"])) == b"\x0a" + two
    assert sent(lambda c: c.multi_set({"k": b"v"})) == b"\x0b" + struct.pack("=Q", 1) + key + blob(b"v")
    assert sent(lambda c: c.wait(["k"]) and c.cancel_wait()) == b"\x06" + struct.pack("=Q", 1) + key + b"\x0c"
    assert sent(lambda c: c.list_keys()) == b"\x11"
    assert sent(lambda c: c.barrier("k", 3)) == b"\x12" + key + number(3)


def test_requests_of_one_turn_leave_in_one_piece() -> None:
    codec = Codec()
    for i in range(10):
        codec.add("k", i)
    assert codec.unsent == 10 * len(b"\x04" + blob(b"/k") + number(0))
    assert len(codec.data_to_send()) > 0
    assert codec.data_to_send() == b""
    assert codec.unsent == 0


@cases("pieces", [[b"\x00"], [b"\x01"], [b"\x00\x01"], [b"\x00", b"\x01"]])
def test_a_cancelled_wait_reads_its_answer_whatever_won_the_race(pieces: list[bytes]) -> None:
    codec = Codec()
    codec.wait(["k"])
    if pieces != [b"\x00"]:
        codec.cancel_wait()
    replies = [reply for piece in pieces for reply in codec.receive_data(piece)]
    assert replies == [Status.WAIT_CANCELED if pieces == [b"\x01"] else Status.STOP_WAITING]
    codec.check(["k"])
    assert codec.receive_data(b"\x00") == [True]


def test_a_cancelled_wait_must_be_answered_as_cancelled() -> None:
    codec = Codec()
    codec.wait(["k"])
    codec.cancel_wait()
    with pytest.raises(StoreProtocolError, match="another STOP_WAITING"):
        codec.receive_data(b"\x00\x00")


def test_barriers_are_answered_with_a_status() -> None:
    codec = Codec()
    codec.barrier("k", 2)
    assert codec.receive_data(b"\x00") == [Status.STOP_WAITING]


def test_torchs_own_keys_are_not_listed() -> None:
    codec = Codec()
    codec.list_keys()
    assert codec.receive_data(number(2) + blob(b"init/") + blob(b"/a/b")) == [["a/b"]]


@cases(
    "request_, limit",
    [
        (lambda c: c.set("k" * (MAX_KEY + 1), b""), MAX_KEY),
        (lambda c: c.get("é" * MAX_KEY), MAX_KEY),
        (lambda c: c.set("k", bytes(MAX_VALUE + 1)), MAX_VALUE),
        (lambda c: c.append("k", bytes(MAX_VALUE + 1)), MAX_VALUE),
        (lambda c: c.compare_set("k", b"", bytes(MAX_VALUE + 1)), MAX_VALUE),
        (lambda c: c.check(["k"] * (MAX_KEYS + 1)), MAX_KEYS),
        (lambda c: c.wait(["k"] * (MAX_KEYS + 1)), MAX_KEYS),
        (lambda c: c.multi_get(["k"] * (MAX_KEYS + 1)), MAX_KEYS),
    ],
)
def test_what_the_server_would_drop_us_for_is_refused_here(request_: Callable[[Codec], int], limit: int) -> None:
    codec = Codec()
    with pytest.raises(StoreError, match=f"limit of {limit}"):
        request_(codec)
    assert codec.data_to_send() == b""
    assert codec.outstanding == 0


@cases(
    "request_, error, message",
    [
        (lambda c: c.multi_set({"k": bytes(300 << 10)}), StoreError, "too much for one multi_set"),
        (lambda c: c.add("k", 2**63), ValueError, "64-bit"),
        (lambda c: c.add("k", True), ValueError, "64-bit"),
        (lambda c: c.add("k", 1.5), ValueError, "64-bit"),
        (lambda c: c.set(b"k", b""), TypeError, "key must be a str"),
        (lambda c: c.set("k", 3), TypeError, "value must be bytes or str"),
        (lambda c: c.check("abc"), TypeError, "list of keys"),
    ],
)
def test_mistakes_are_named_and_nothing_is_sent(
    request_: Callable[[Codec], int], error: type[Exception], message: str
) -> None:
    codec = Codec()
    with pytest.raises(error, match=message):
        request_(codec)
    assert codec.data_to_send() == b""
    assert codec.outstanding == 0
