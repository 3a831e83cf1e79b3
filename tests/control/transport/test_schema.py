"""Values of other processes are decoded, or raise one short error that names the field and the value."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from msgspec import Meta

from asynccomm.control.transport.connection import Tokens
from asynccomm.control.transport.schema import (
    SHOWN,
    Message,
    MessageError,
    TaggedMessage,
    decode,
    dumps,
    loads,
    shown,
)


class Point(TaggedMessage, frozen=True):
    x: Annotated[int, Meta(ge=0, le=9)]


class Label(TaggedMessage, frozen=True):
    text: Annotated[str, Meta(max_length=3)] = ""


class Drawing(Message, frozen=True):
    shapes: tuple[Point | Label, ...]
    by_number: dict[int, Label]

    def __post_init__(self) -> None:
        if len(self.shapes) < len(self.by_number):
            raise ValueError(f"more names than {len(self.shapes)} shapes")


def test_there_and_back() -> None:
    drawing = Drawing((Point(3), Label("\ud800")), {7: Label("a")})
    text = dumps(drawing)
    assert text == (
        '{"shapes":[{"kind":"Point","x":3},{"kind":"Label","text":"\\ud800"}],"by_number":{"7":{"kind":"Label","text":"a"}}}'
    )
    assert loads(Drawing, text) == loads(Drawing, text.encode()) == drawing
    assert loads(Label, '{"kind":"Label"}') == Label()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shapes": [{"kind": "Point", "x": 10}]}, r"`int` <= 9 - at `\$.shapes\[0\].x`, got .*10"),
        ({"shapes": [{"kind": "Point", "x": True}]}, r"got `bool` - at `\$.shapes\[0\].x`"),
        ({"shapes": [{"kind": "Circle"}]}, "Invalid value 'Circle'"),
        ({"shapes": [{"x": 1}]}, "missing required field `kind`"),
        ({"by_number": {"x": {}}}, "Expected `int`, got `str`"),
        ({"by_number": {"7": {"kind": "Label"}}}, "more names than 0 shapes, got"),
        ({"other": 1}, "unknown field `other`"),
    ],
)
def test_errors_name_the_field_and_the_value(change: dict[str, Any], text: str) -> None:
    with pytest.raises(MessageError, match=text):
        decode(Drawing, {"shapes": [], "by_number": {}, **change})


@pytest.mark.parametrize("text", [b"", b"\xff", b"{", b"[" * 100_000, b"9" * 10_000])
def test_no_json(text: bytes) -> None:
    with pytest.raises(MessageError, match="no JSON"):
        loads(Drawing, text)


def test_secrets_are_not_shown() -> None:
    assert "secret" not in repr(Tokens("secret", "secret"))


def test_an_error_is_short() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for value in ("x" * 10_000, deep, 10**5000, list(range(10_000)), {"x" * 1000: "y" * 1000}):
        assert len(shown(value)) <= SHOWN + 3
        with pytest.raises(MessageError) as caught:
            decode(Drawing, value)
        assert len(str(caught.value)) < 3 * SHOWN
