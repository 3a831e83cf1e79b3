"""Objects as parcels: what comes back, what is refused, and that garbage is only ever a PayloadError."""

import collections
import contextlib
import dataclasses
import enum
import io
import math
import os
import pickle
import struct
import time
import zlib
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.errors import PayloadError
from asynccomm.ops import Parcel
from asynccomm.serialization import objects
from asynccomm.serialization.objects import (
    DTYPES,
    INLINE,
    IncomingObject,
    NotPlainError,
    PayloadKind,
    clone_out,
    encode,
    kind_of,
    pack_value,
    unpack_value,
)
from tests.cases import cases
from tests.sampling import examples


def through(obj: object, *, weights_only: bool = True, sent_safely: bool = False) -> Any:
    return clone_out(3, encode(PayloadKind.OBJECT, obj, weights_only=sent_safely)).decode(weights_only=weights_only)


def form_of(obj: object) -> int:
    return encode(PayloadKind.OBJECT, obj).head[0] & 0x7F


class Opener:
    """Pickles as a call that leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


class Mode(enum.Enum):
    FAST = 1


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


PLAIN = [
    None,
    True,
    0,
    -(2**70),
    1.5,
    1.5 - 2j,
    [1j, b"", {"z": {2 + 0j: 1}}],
    "ü\ud800",
    b"\0x",
    bytearray(b"abc"),
    [],
    (),
    {},
    set(),
    frozenset({1, "x"}),
    {"a": [1, (2, {3})], 4: {None: b""}, (1, 2): -0.0},
    "x" * (INLINE + 1),
    list(range(INLINE)),
]


@cases("obj", PLAIN, ids=[f"{type(obj).__name__}-{i}" for i, obj in enumerate(PLAIN)])
def test_plain_data_comes_back_without_torch(obj: object) -> None:
    assert form_of(obj) == 1
    back = through(obj)
    assert back == obj
    assert type(back) is type(obj)
    assert repr(back) == repr(obj), "the sign of zero, and types within"


def test_structure_is_kept() -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    back = through({"a": inner, "b": inner})
    assert back["a"] is back["b"]
    assert back["a"][1] is back["a"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.arange(12, dtype=torch.uint8).view(3, 4).to(dtype)
    assert form_of([tensor]) == 1
    (back,) = through([tensor])
    assert back.dtype == dtype
    assert back.shape == (3, 4)
    assert back.view(torch.uint8).equal(tensor.view(torch.uint8))


@cases(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.ones(1).expand(5),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=lambda t: f"{tuple(t.shape)} {t.stride()}",
)
def test_tensors_of_every_shape(tensor: torch.Tensor) -> None:
    back = through(tensor)
    assert back.shape == tensor.shape
    assert back.dtype == tensor.dtype
    assert back.equal(tensor.resolve_conj().resolve_neg())
    assert back.is_contiguous()


def test_complex_numbers_beside_tensors() -> None:
    obj = {"t": torch.ones(2), "z": 1 - 2j, "b": b""}
    assert form_of(obj) == 1
    back = through(obj)
    assert back["z"] == 1 - 2j
    assert back["t"].tolist() == [1, 1]


def test_a_tensor_in_two_places_stays_one() -> None:
    tensor = torch.ones(1000)
    parcel = encode(PayloadKind.OBJECT, {"a": tensor, "b": [tensor]})
    assert parcel.nbytes == 4000
    back = through({"a": tensor, "b": [tensor]})
    assert back["a"] is back["b"][0]
    assert back["a"].data_ptr() != tensor.data_ptr()


def test_tensors_are_not_pickled_but_sent_as_they_are() -> None:
    tensor = torch.ones(100_000)
    parcel = encode(PayloadKind.OBJECT, {"t": tensor})
    assert len(parcel.head) < 100
    assert [t.data_ptr() for t in parcel.tensors] == [tensor.data_ptr()]


def test_a_payload_is_received_into_the_tensors_themselves() -> None:
    parcel = encode(PayloadKind.OBJECT, {"t": torch.ones(10)})
    incoming = IncomingObject(0, parcel.head, parcel.nbytes)
    incoming.places[0].fill_(7)
    back = incoming.decode(weights_only=True)
    assert back["t"].data_ptr() == incoming.places[0].data_ptr()


def test_memory_is_ordinary_also_in_inference_mode() -> None:
    with torch.inference_mode():
        back = through([torch.ones(3)])[0]
    back.requires_grad_()
    assert not back.is_inference()


def test_large_pickles_are_in_the_payload() -> None:
    for obj in ("x" * (1 << 20), {"o": collections.OrderedDict(a="x" * (1 << 20))}):
        parcel = encode(PayloadKind.OBJECT, obj)
        assert len(parcel.head) < 100
        assert parcel.nbytes > 1 << 20
        assert through(obj) == obj
    obj = ["x" * (1 << 20), torch.ones(3)]
    assert through(obj)[0] == obj[0]
    assert through(obj)[1].equal(torch.ones(3))


def test_what_torch_takes_needs_no_trust() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    obj = {"p": parameter, "d": torch.float16, "s": torch.Size([1]), "g": torch.ones(2, requires_grad=True)}
    assert form_of(obj) == 2
    back = through(obj, sent_safely=True)
    assert type(back["p"]) is torch.nn.Parameter
    assert back["d"] is torch.float16
    assert back["g"].requires_grad
    assert form_of(torch.ones(2, requires_grad=True)) == 2, "as plain data it would lose that"
    assert form_of(torch.ones(2, 2).to_sparse()) == 2
    assert form_of(torch.ones(2, device="meta")) == 2


def test_values_beside_what_torch_takes() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    view = parameter[1:]
    state = torch.nn.Linear(2, 3).state_dict()
    obj = {"day": date(2024, 2, 29), "both": [parameter, parameter, view], "state": state, "dtype": torch.bfloat16}
    assert form_of(obj) == 3
    back = through(obj, sent_safely=True)
    assert back["day"] == date(2024, 2, 29)
    assert back["dtype"] is torch.bfloat16
    first, second, part = back["both"]
    assert type(first) is torch.nn.Parameter
    assert first is second
    assert part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr(), "one torch.save for all"
    assert type(back["state"]) is collections.OrderedDict
    assert back["state"]._metadata == state._metadata  # type: ignore[attr-defined]
    assert back["state"]["weight"].equal(state["weight"])


def test_a_sender_refuses_what_receivers_would() -> None:
    @dataclasses.dataclass
    class Settings:
        steps: int

    for obj in (Settings(1), [Settings(1)], {"at": date(2024, 1, 1), "s": Settings(1)}):
        with pytest.raises(
            TypeError, match=r"^item cannot .* class .*Settings: call asynccomm.register_safe\(Settings\) on"
        ):
            encode(PayloadKind.OBJECT, obj, "item")
    with torch.serialization.safe_globals([(Mode, f"{Mode.__module__}.Mode")]):
        assert through([Mode.FAST], sent_safely=True) == [Mode.FAST]
    with pytest.raises(TypeError, match="register_safe"):
        encode(PayloadKind.OBJECT, Mode.FAST)
    point = f"{Point.__module__}.Point"
    for obj in (Point(1), [date(2024, 1, 1), Point(1)]):
        with pytest.raises(
            TypeError, match=rf"^item cannot .* {point}: allow it by .*add_safe_globals.*weights_only=False"
        ):
            encode(PayloadKind.OBJECT, obj, "item")
        with torch.serialization.safe_globals([Point]):
            encode(PayloadKind.OBJECT, obj, "item")
    assert through([date(2024, 1, 1), Point(7)], weights_only=False)[1].x == 7
    with pytest.raises(
        TypeError, match=r"item cannot be sent: it has a numpy array of dtype object, .*weights_only=False"
    ):
        encode(PayloadKind.OBJECT, numpy.array([None]), "item")
    assert through(numpy.array([None]), weights_only=False)[0] is None


def test_a_class_needs_trust_or_to_be_allowed() -> None:
    with pytest.raises(PayloadError, match=r"from rank 3 is refused.*Point.*weights_only=False.*add_safe_globals"):
        through(Point(5))
    assert through(Point(5), weights_only=False).x == 5
    with torch.serialization.safe_globals([Point]):
        assert through([Point(6)])[0].x == 6


def test_code_of_the_sender_runs_only_when_trusted(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match=r"unsupported GLOBAL posix.mkdir"):
        through(Opener(tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    through(Opener(tmp_path / "b"), weights_only=False)
    assert (tmp_path / "b").exists()


def forged(body: bytes, form: int = 1, metas: bytes = b"", count: int = 0) -> bytes:
    return struct.pack("<BBIIQ", form, PayloadKind.OBJECT, zlib.crc32(body), count, len(body)) + metas + body


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_pickle_that_calls_is_not_plain(tmp_path: Path, weights_only: bool) -> None:
    for protocol in range(6):
        body = pickle.dumps(Opener(tmp_path / "x"), protocol)
        with pytest.raises(PayloadError, match=r"names posix.mkdir"):
            IncomingObject(1, forged(body), 0).decode(weights_only=weights_only)
    assert not (tmp_path / "x").exists()


def test_a_pickle_cannot_name_tensors_that_are_not_there() -> None:
    for number in (0, 1, -1, True, "0", None):

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj: object, number: object = number) -> object:
                return number if obj == "tensor" else None

        buffer = io.BytesIO()
        Pickler(buffer, 5).dump(["tensor"])
        if number is not None:
            with pytest.raises(PayloadError, match="has no tensor"):
                IncomingObject(1, forged(buffer.getvalue()), 0).decode(weights_only=True)


def test_what_cannot_be_pickled_is_a_type_error_that_names_it() -> None:
    deep: list[Any] = []
    for _ in range(200_000):
        deep = [deep]
    for obj in (lambda: 0, [torch.ones(1), lambda: 0], (x for x in ()), deep, [deep, torch.ones(1)]):
        with pytest.raises(TypeError, match=r"^item cannot be sent, because it cannot be pickled: "):
            encode(PayloadKind.OBJECT, obj, "item")
    while deep:
        deep = deep.pop()


def test_too_many_tensors_for_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_HEAD", 1000)
    with pytest.raises(ValueError, match="item has too many tensors to be sent: 300"):
        encode(PayloadKind.OBJECT, [torch.ones(()) for _ in range(300)], "item")


def test_a_failing_unpickler_is_a_payload_error() -> None:
    class Fails:
        def __reduce__(self) -> tuple[Any, ...]:
            return int, ("no number",)

    with pytest.raises(PayloadError, match="from rank 3 cannot be unpickled: ValueError"):
        through(Fails(), weights_only=False)


def test_memory_is_taken_only_when_the_lengths_agree() -> None:
    huge = struct.pack("<BB2Q", 1, 2, 1 << 30, 1 << 30)
    with pytest.raises(PayloadError, match="head does not fit its length"):
        IncomingObject(1, forged(b"", metas=huge, count=1), 16)
    with pytest.raises(PayloadError, match="head does not fit its length"):
        IncomingObject(1, struct.pack("<BBIIQ", 0x81, PayloadKind.OBJECT, 0, 0, 1 << 50), 16)
    with pytest.raises(PayloadError, match="cannot be read"):  # nothing to send, but no tensor either
        IncomingObject(1, forged(b"", metas=struct.pack("<BB3Q", 1, 3, 0, *[(1 << 64) - 1] * 2), count=1), 0)
    begin = time.monotonic()
    with pytest.raises(PayloadError):
        IncomingObject(1, struct.pack("<BBIIQ", 1, PayloadKind.OBJECT, 0, (1 << 32) - 1, 0), 0)
    assert time.monotonic() - begin < 1


def test_damage_is_seen() -> None:
    parcel = encode(PayloadKind.OBJECT, {"a": "hello"})
    head = parcel.head.replace(b"hello", b"hellp")
    with pytest.raises(PayloadError, match=r"rank 1 .* it is damaged"):
        IncomingObject(1, head, 0).decode(weights_only=True)
    parcel = encode(PayloadKind.OBJECT, "x" * (1 << 20))  # no sum is made of what is large
    incoming = IncomingObject(1, parcel.head, parcel.nbytes)
    with pytest.raises(PayloadError, match="rank 1 sent cannot be read"):
        incoming.decode(weights_only=True)


def test_kinds() -> None:
    for kind in PayloadKind:
        assert kind_of(0, encode(kind, 1).head) is kind
        assert kind_of(0, pack_value(kind, 1)) is kind
        assert kind.sender
    for head in (b"", b"\1", b"\1\0", b"\1\xff"):
        with pytest.raises(PayloadError, match="rank 5"):
            kind_of(5, head)


def test_sealed_values() -> None:
    assert unpack_value(0, pack_value(PayloadKind.STATE, (["a"], [1.5]))) == (["a"], [1.5])
    with pytest.raises(NotPlainError, match="Tensor"):
        pack_value(PayloadKind.STATE, torch.ones(1))
    with pytest.raises(NotPlainError, match="Point"):
        pack_value(PayloadKind.STATE, Point(1))
    head = pack_value(PayloadKind.STATE, ["hello"])
    for bad in (head[:-1], head[:4], b"", head.replace(b"hello", b"hellp"), b"\2" + head[1:]):
        with pytest.raises(PayloadError, match="rank 4"):
            unpack_value(4, bad)


SAMPLES = [
    {"a": [1, 2.5, "x"], "t": torch.ones(3, 2), "u": torch.zeros(4, dtype=torch.int8)},
    [collections.OrderedDict(a=torch.ones(2))],
    "x" * (INLINE + 10),
    [torch.ones(()), torch.empty(0, 3)],
]
PARCELS = [encode(PayloadKind.OBJECT, sample) for sample in SAMPLES]


def take(head: bytes, parcel: Parcel) -> None:
    try:
        incoming = IncomingObject(0, head, parcel.nbytes)
        assert sum(t.nbytes for t in incoming.places) == parcel.nbytes
        left = b"".join(bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for t in parcel.tensors)
        for place in incoming.places:
            part, left = left[: place.nbytes], left[place.nbytes :]
            if part:
                place.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
        incoming.decode(weights_only=True)
    except PayloadError:
        pass


@examples(400)
@given(st.sampled_from(PARCELS), st.data())
def test_mutated_heads_are_payload_errors(parcel: Parcel, data: st.DataObject) -> None:
    head = bytearray(parcel.head)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(head), 60) - 1))
        head[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del head[data.draw(st.integers(0, len(head))) :]
    take(bytes(head), parcel)


@examples(300)
@given(st.binary(max_size=80))
def test_garbage_heads_are_payload_errors(head: bytes) -> None:
    for start in (b"", b"\1\1", b"\2\1", b"\x81\1"):
        with pytest.raises(PayloadError):
            IncomingObject(0, start + head, 1 << 20)
        with pytest.raises(PayloadError):
            unpack_value(0, start + head)


@examples(200)
@given(st.binary(max_size=40))
def test_garbage_bodies_are_payload_errors(body: bytes) -> None:
    if not any(code in body for code in b"rp"):  # PUT with a large number makes CPython take gigabytes
        for form in (1, 2):
            with contextlib.suppress(PayloadError):
                IncomingObject(0, forged(body, form), 0).decode(weights_only=True)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda children: (
        st.lists(children) | st.lists(children).map(tuple) | st.dictionaries(st.text() | st.integers(), children)
    ),
    max_leaves=20,
)


@examples(200)
@given(plain)
def test_any_plain_data(obj: object) -> None:
    assert form_of(obj) == 1
    assert repr(through(obj)) == repr(obj)
    assert math.isnan(through(math.nan))
