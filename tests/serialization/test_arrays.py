"""numpy's arrays and scalars: dtypes, orders and shapes come back; Python objects never travel."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy
import pytest
import torch

from asynccomm.errors import PayloadError
from asynccomm.serialization.arrays import array_of, flat_array, scalar_of
from asynccomm.serialization.objects import PayloadKind, clone_out, encode
from tests.cases import cases

RECORD = numpy.dtype([("a", "<f4"), ("b", "S3", (2,)), ("c", [("d", "M8[ns]")])], align=True)
DTYPES = ["?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "g", "F", "D", "G"]
DTYPES += [">i2", ">f8", "M8[ns]", "M8[D]", "m8[us]", "U5", ">U2", "S3", "V4"]


def through(obj: object) -> Any:
    return clone_out(3, encode(PayloadKind.OBJECT, obj)).decode(weights_only=True)


def same(back: Any, array: Any) -> None:
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert numpy.array_equal(back, array)


def sample(dtype: Any) -> Any:
    if numpy.dtype(dtype).kind in "?cfgU" or dtype is RECORD:  # some have bytes without a meaning
        return numpy.arange(6).reshape(2, 3).astype(dtype) if dtype is not RECORD else numpy.zeros((2, 3), RECORD)
    return numpy.arange(6 * numpy.dtype(dtype).itemsize, dtype=numpy.uint8).view(dtype).reshape(2, 3)


@cases("dtype", [*DTYPES, RECORD], str)
def test_every_dtype(dtype: Any) -> None:
    array = sample(dtype)
    for each in (
        array,
        array.T,
        array[::-1, ::2],
        array[0, 0:0],
        array[1, 1:2].reshape(()),
        numpy.asfortranarray(array),
    ):
        back = through([each])[0]
        same(back, each)
        assert back.flags.writeable
        assert back.flags.f_contiguous or not each.flags.f_contiguous, "the order is kept"
    if numpy.dtype(dtype).kind not in "V":
        scalar = array[1, 2]
        back = through([scalar])[0]
        assert type(back) is type(scalar) or dtype in "qQ", "two names for one type"
        assert back == scalar


@cases(
    "scalar", [numpy.str_(""), numpy.str_("a\0"), numpy.bytes_(b"a\0"), numpy.void(b"ab"), numpy.zeros((), RECORD)[()]]
)
def test_scalars(scalar: Any) -> None:
    back = through([scalar])[0]
    assert type(back) is type(scalar)
    assert back == scalar


def test_memory_is_shared_with_the_message() -> None:
    array = numpy.arange(10_000.0)
    parcel = encode(PayloadKind.OBJECT, {"array": array})
    assert len(parcel.head) < 400
    assert [tensor.data_ptr() for tensor in parcel.tensors] == [array.ctypes.data]
    back = through([array, array])
    assert back[0] is back[1]


def test_a_read_only_array_is_copied_without_a_warning() -> None:
    array = numpy.broadcast_to(numpy.float32(3), (2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(through([array])[0], array)


class Sub(numpy.ndarray):
    pass


def test_arrays_that_cannot_be_sent() -> None:
    overlapping = numpy.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]})
    for dtype, text in [
        (object, "dtype object, a dtype with references to Python objects"),
        ([("a", "i4"), ("b", object)], "references to Python objects"),
        (overlapping, "numpy cannot describe"),
        (numpy.dtypes.StringDType(), "references to Python objects"),
        ((numpy.record, [("a", "i4")]), "a dtype without a portable description"),
    ]:
        with pytest.raises(TypeError, match=f"obj cannot be sent: .*{text}.*; pass weights_only=False"):
            encode(PayloadKind.OBJECT, [numpy.zeros(2, dtype)])
    assert flat_array(numpy.zeros(2).view(Sub)) is None
    assert flat_array("text") is None


def memory(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


MALFORMED: list[tuple[Any, ...]] = [
    ("|O", (1,), "C", memory(8)),
    ("O,i4", (1,), "C", memory(12)),
    ([("a", "|O")], (1,), "C", memory(8)),
    ([("a", [("b", "|O", (1,))])], (1,), "C", memory(8)),
    (numpy.object_, (1,), "C", memory(8)),
    ("<f8", (2,), "C", memory(8)),
    ("<f8", (-1,), "C", memory(8)),
    ("<f8", (-1, -1), "C", memory(8)),
    ("<f8", (1,), "C", memory(16)[::2]),
    ("<f8", (1,), "C", torch.zeros(8, dtype=torch.int8)),
    ("<f8", (1,), "C", torch.zeros(8, 1, dtype=torch.uint8)),
    ("<f8", (1,), "C", b"12345678"),
    ("<f8", (1,), "Z", memory(8)),
    ("<U0", (1 << 40,), "C", memory(0)),
    ("V0", (1 << 40,), "C", memory(0)),
    ([], (1 << 40,), "C", memory(0)),
    ("<f8", (1 << 70, 0), "C", memory(0)),
    ("nonsense", (1,), "C", memory(8)),
]


def test_malformed_nodes_raise() -> None:
    for node in MALFORMED:
        with pytest.raises((ValueError, TypeError)):
            array_of(*node)
            pytest.fail(f"{node} was taken", pytrace=False)
    for description, data in [
        ("|O", b"12345678"),
        ("<f8", b"1"),
        ("<f8", "12345678"),
        ("S", "x"),
        ("U", b"x"),
        ("V0", b""),
    ]:
        with pytest.raises((ValueError, TypeError)):
            scalar_of(description, data)


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    parcels = [encode(PayloadKind.OBJECT, obj) for obj in (numpy.zeros(2), numpy.float32(1))]
    monkeypatch.setitem(sys.modules, "numpy", None)
    for parcel in parcels:
        with pytest.raises(PayloadError, match=r"rank 3 .* has a numpy array, but numpy is not installed here"):
            clone_out(3, parcel).decode(weights_only=True)
    assert flat_array(1) is None
