"""The messages of agreed ordering: what goes in comes out, little is little, and nonsense is one error."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.batching.ordering.codec import (
    BATCH_END,
    FULL,
    MAX_RUN,
    MAX_TAG,
    MAX_TEXT,
    MISMATCH,
    MessageReader,
    MessageWriter,
    Mismatch,
    OpRequest,
    OrderMessageError,
    ResponseCache,
    op_request,
)
from tests.cases import cases

u64 = st.integers(0, 2**64 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
notices: st.SearchStrategy[OpRequest] = st.tuples(texts, st.tuples(u64, u64), texts, st.integers(0, 2**63 - 1))
ids = st.one_of(st.integers(0, 100), st.integers(0, 2**40))


def plain(number: int = 0) -> OpRequest:
    return (f"tag {number}", (number, 0), "text", 8)


def written(*numbers: int) -> bytes:
    writer = MessageWriter()
    for number in numbers:
        writer.known(number)
    return writer.written()


def read(message: bytes) -> list[int]:
    return list(MessageReader(message))


@given(st.lists(st.one_of(ids, st.tuples(ids, st.integers(0, 3 * MAX_RUN)), notices, st.just("cut")), max_size=30))
def test_what_is_written_is_read(script: list[int | tuple[int, int] | OpRequest | str]) -> None:
    writer = MessageWriter()
    expected: list[object] = []
    for entry in script:
        match entry:
            case int():
                writer.known(entry)
                expected.append(entry)
            case (int() as first, int() as count):
                for number in range(first, first + count):
                    writer.known(number)
                    expected.append(number)
            case "cut":
                writer.cut()
                expected.append(BATCH_END)
            case _:
                writer.announced(entry)
                expected.append(entry)
    reader = MessageReader(writer.written())
    assert [reader.announced() if token == FULL else token for token in reader] == expected


@given(st.lists(texts, max_size=5))
def test_decisions_in_full_are_tags(tags: list[str]) -> None:
    writer = MessageWriter()
    for tag in tags:
        writer.decided(tag)
    reader = MessageReader(writer.written())
    assert [(token, reader.tag()) for token in reader] == [(FULL, tag) for tag in tags]


@given(texts, st.integers(0, 2**31), texts, st.integers(0, 2**31), texts)
def test_a_mismatch_travels_whole(tag: str, rank: int, text: str, other: int, other_text: str) -> None:
    writer = MessageWriter()
    writer.mismatch(Mismatch(tag, rank, text, other, other_text))
    reader = MessageReader(writer.written())
    assert next(iter(reader)) == MISMATCH
    assert reader.mismatch().args == (tag, rank, text, other, other_text)


def test_a_mismatch_names_both_sides_and_survives_pickle() -> None:
    found = pickle.loads(pickle.dumps(Mismatch("layer3", 1, "all_reduce", 4, "broadcast")))
    assert str(found) == "operations tagged 'layer3' differ: rank 1 has all_reduce, rank 4 has broadcast"


def test_known_operations_take_a_byte_each_or_less() -> None:
    fifty = list(range(3000, 3050))
    assert len(written(*fifty)) == 4  # where to begin, and how many
    assert len(written(7, 8, 9)) == 3
    assert len(written(*range(10 * MAX_RUN))) == 1 + 2 * 10
    for seed in range(100):
        random.Random(seed).shuffle(fifty)
        assert len(written(*fifty)) <= 51


def test_long_texts_are_cut_and_long_tags_refused() -> None:
    tag = "é" * (MAX_TAG // 2)
    text = "😀" * (MAX_TEXT + 1)
    said = op_request(tag, (1, 2), text, 3)
    assert said == (tag, (1, 2), text[: MAX_TEXT - 3] + "...", 3)
    assert op_request(tag, (1, 2), text[:-1], 3)[2] == text[:-1]
    writer = MessageWriter()
    writer.announced(op_request(tag, (1, 2), text[:-1], 3))  # the largest there is
    reader = MessageReader(writer.written())
    assert [reader.announced() for _ in reader] == [(tag, (1, 2), text[:-1], 3)]
    with pytest.raises(ValueError, match="at most 1024 bytes in UTF-8, got 1025"):
        op_request(tag + "a", (1, 2), "", 3)


def test_half_a_character_in_a_text_is_no_reason_to_fail() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        op_request("\udcff", (1, 2), "", 3)
    writer = MessageWriter()
    writer.announced(op_request("tag", (1, 2), "all\udcff_reduce", 3))
    reader = MessageReader(writer.written())
    assert [reader.announced()[2] for _ in reader] == ["all?_reduce"]
    reader = MessageReader(writer.written().replace(b"?", b"\xff"))
    assert [reader.announced()[2] for _ in reader] == ["all\N{REPLACEMENT CHARACTER}_reduce"]


@cases(
    "message, text",
    [
        (b"\x80", "a number does not end"),
        (b"\xff" * 9 + b"\x01", "a number does not end"),
        (b"\x01", "a number does not end"),
        (b"\x01\x00", "0 ids in a row"),
        (b"\x01\x41", "65 ids in a row"),
        (b"\x05", "an id is negative"),
        (b"\x00\x02a", "the message is cut off"),
        (b"\x00\x01\xff", "a tag is no UTF-8"),
        (b"\x00\x81\x08" + bytes(2000), "a text of 1025 bytes"),
        (b"\x00\x01a" + bytes(15), "the message is cut off"),
        (b"\x00\x01a" + bytes(16), "a number does not end"),
        (b"\x00\x01a" + bytes(17) + b"\x81\x20" + bytes(9000), "a text of 4097 bytes"),
        (b"\x03\x00\x00\x00\x00\x00\x00", "more follows a mismatch"),
    ],
)
def test_each_kind_of_nonsense_is_named(message: bytes, text: str) -> None:
    with pytest.raises(OrderMessageError, match=text):
        read_all(message)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(message: bytes) -> None:
    try:
        count = read_all(message)
    except OrderMessageError:
        return
    assert count <= MAX_RUN * len(message)


def read_all(message: bytes) -> int:
    """How many tokens it has."""
    reader = MessageReader(message)
    count = 0
    for token in reader:
        count += 1
        if token == FULL:
            reader.announced()
        elif token == MISMATCH:
            reader.mismatch()
    return count


def test_a_book_forgets_the_oldest() -> None:
    book = ResponseCache(3)
    for number in range(5):
        book.add(plain(number))
    assert book.end == 5
    assert book.notices == {number: plain(number) for number in (2, 3, 4)}
    assert book.ids == {plain(number): number for number in (2, 3, 4)}
    assert book.known(2) == plain(2)
    for gone in (1, 5):
        with pytest.raises(OrderMessageError, match=f"{gone} is no operation's id"):
            book.known(gone)


def test_a_second_id_outlives_the_first() -> None:
    book = ResponseCache(2)
    for said in (plain(7), plain(8), plain(7), plain(9)):
        book.add(said)
    assert book.ids == {plain(7): 2, plain(9): 3}


@given(st.lists(st.integers(0, 6), max_size=30), st.lists(st.integers(0, 6), max_size=10))
def test_what_a_longer_book_must_have_too(said: list[int], unheard: list[int]) -> None:
    behind = ResponseCache(4)
    for number in said:
        behind.add(plain(number))
    ahead = copy.deepcopy(behind)
    for number in unheard:
        ahead.add(plain(number))
    oldest = behind.oldest(len(unheard))
    for number, told in behind.notices.items():
        assert (ahead.notices.get(number) == told) == (number >= oldest)
