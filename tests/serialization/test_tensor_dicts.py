"""Dicts of tensors, taken apart and put together; and what sender and receiver remember of each other."""

import collections
import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.errors import PayloadError
from asynccomm.serialization import tensor_dicts
from asynccomm.serialization.objects import PayloadKind, encode
from asynccomm.serialization.tensor_dicts import (
    CHANNELS,
    LARGEST,
    SLOTS,
    ReceiverSchemaCache,
    Schema,
    SenderSchemaCache,
    Slices,
    describe,
)
from tests.cases import cases
from tests.sampling import examples

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")


def rebuilt(tensor_dict: dict[Any, Any]) -> dict[Any, Any]:
    described = describe(tensor_dict, CPU)
    return Schema(described.schema).build(described.tensors, described.values)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


T = torch.arange(6.0)


@cases(
    "tensor_dict",
    [
        {},
        {"a": 1},
        {"a": T, "b": T.view(2, 3).t(), "c": torch.empty(0, 2)},
        {"z": 1, "a": T, "m": {"k": 2, "t": T.int(), "e": {}}, "l": [T, None, (T, 3)], "n": [1, [2]]},
        {1: T, (1, "x"): T, None: 3, True and 2.5: T},
        {"o": collections.OrderedDict(a=1), "s": {1}},
        {"one": (T,), "two": (T, T), "three": ((), (T,))},
        {"long": list(range(200)), "with": [*range(200), T], "other": [collections.OrderedDict()] * 200},
    ],
    ids=str,
)
def test_a_dict_comes_back(tensor_dict: dict[Any, Any]) -> None:
    assert same(rebuilt(tensor_dict), tensor_dict)


def test_a_tensor_in_two_places_is_sent_once() -> None:
    described = describe({"a": T, "b": [T]}, CPU)
    assert len(described.tensors) == 1
    back = rebuilt({"a": T, "b": [T]})
    assert back["a"] is back["b"][0]


def test_what_has_no_tensors_in_it_is_no_part_of_the_schema() -> None:
    one = describe({"t": T, "x": [1, 2], "y": {"a": 1}, "step": 1}, CPU)
    two = describe({"t": T + 1, "x": [[], [], {}], "y": None, "step": "two"}, CPU)
    assert one.schema == two.schema
    assert one.values == [[1, 2], {"a": 1}, 1]
    for other in ({"t": T.int()}, {"t": T[1:]}, {"u": T}, {"t": [T]}, {"t": (T,)}, {True: T}, {1: T}, {1.0: T}):
        assert describe({"t": T}, CPU).schema != describe(other, CPU).schema
    assert len({describe({key: T}, CPU).schema for key in (True, 1, 1.0)}) == 3


def test_what_cannot_be_taken_apart() -> None:
    with pytest.raises(TypeError, match="keys in tensor_dict must be"):
        describe({PayloadKind.OBJECT: T}, CPU)
    with pytest.raises(ValueError, match=r"tensor_dict\['a'\]\[1\]\['b'\] must be a dense tensor"):
        describe({"a": [1, {"b": torch.eye(2).to_sparse()}]}, CPU)
    with pytest.raises(ValueError, match=r"tensor_dict\['a'\] is on meta, but the comm is on cpu"):
        describe({"a": torch.empty(1, device="meta")}, CPU)
    loop: dict[str, Any] = {"t": T}
    loop["self"] = loop
    with pytest.raises(ValueError, match="nested too deeply, or in itself"):
        describe(loop, CPU)


def test_parameters_are_sent_as_data() -> None:
    described = describe({"p": torch.nn.Parameter(T)}, CPU)
    assert not described.tensors[0].requires_grad
    assert Schema(described.schema).metas[0].shape == (6,)


class Fake(torch.Tensor):
    """On a GPU, if asked."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:1")


def test_the_schema_says_whether_a_tensor_was_on_a_device() -> None:
    described = describe({"c": T, "g": T.as_subclass(Fake)}, GPU)
    assert [meta.on_device for meta in Schema(described.schema).metas] == [False, True]


# -- slices -----------------------------------------------------------------------------------------------------------


def test_slices() -> None:
    tensor_dict = {
        "a": torch.arange(6),
        "odd": torch.arange(5),
        "no": torch.arange(4),
        "e": torch.empty(0),
        "d": {"x": T},
    }
    described = describe(tensor_dict, CPU, Slices(2, 1, {"no": False, "elsewhere": True}))
    assert [t.tolist() for t in described.tensors] == [[3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 3], [], [3, 4, 5]]
    metas = Schema(described.schema).metas
    assert [(m.parts, m.part) for m in metas] == [(2, 1), (0, 0), (0, 0), (0, 0), (2, 1)]
    assert [m.nbytes for m in metas] == [24, 40, 32, 0, 12]
    with pytest.raises(ValueError, match=r"divide tensor_dict\['odd'\], whose 5 elements do not divide evenly among 2"):
        describe(tensor_dict, CPU, Slices(2, 1, {"odd": True}))
    assert len(describe({"a": T, "b": T}, CPU, Slices(2, 0, {"b": False})).tensors) == 2, "once whole, once in parts"


def test_one_part_is_no_slicing() -> None:
    assert describe({"a": T}, CPU, Slices(1, 0, {})).schema == describe({"a": T}, CPU).schema


# -- what is remembered -----------------------------------------------------------------------------------------------


class Line:
    """A sender and a receiver."""

    def __init__(self) -> None:
        self.sent, self.received = SenderSchemaCache(), ReceiverSchemaCache()

    def send(self, schema: bytes, tag: int = 0) -> int:
        with self.sent.heading((1, tag), schema) as heading:
            assert self.received.read((0, tag), heading + b"rest")[1] == b"rest"
        return len(heading)


def schema(n: int) -> bytes:
    return describe({"a": torch.empty(n)}, CPU).schema


def test_a_schema_is_sent_once() -> None:
    line = Line()
    assert line.send(schema(1)) > 30
    for _ in range(3):
        assert line.send(schema(1)) == 12
    assert line.send(schema(1), tag=1) > 30, "another channel"
    assert line.send(schema(2)) > 30
    assert line.send(schema(1)) == line.send(schema(2)) == 12


def test_the_receiver_has_what_the_sender_thinks_it_has() -> None:
    line = Line()
    seen = []
    torch.manual_seed(0)
    for n in torch.randint(0, SLOTS + 4, (400,)).tolist():
        with line.sent.heading((1, 0), schema(n)) as heading:
            got, _ = line.received.read((0, 0), heading)
        assert got.metas[0].shape == (n,)
        seen.append(len(heading) == 12)
    assert 200 < sum(seen) < 390


def test_the_least_recently_used_is_forgotten() -> None:
    line = Line()
    for n in range(SLOTS):
        line.send(schema(n))
    line.send(schema(0))
    line.send(schema(100))
    assert line.send(schema(0)) == 12
    assert line.send(schema(1)) > 12


def test_what_was_not_sent_does_not_count() -> None:
    line = Line()
    with pytest.raises(KeyError), line.sent.heading((1, 0), schema(1)):
        raise KeyError
    assert line.send(schema(1)) > 12
    assert line.send(schema(1)) == 12


def test_memory_is_bounded() -> None:
    line = Line()
    for tag in range(CHANNELS + 10):
        line.send(schema(1), tag)
    assert line.send(schema(1), CHANNELS - 1) == 12
    assert line.send(schema(1), CHANNELS) > 12
    large = describe({"k" * LARGEST: T}, CPU).schema
    assert line.send(large) > LARGEST
    assert line.send(large) > LARGEST
    greedy = tensor_dicts._heading(0, schema(1))
    for tag in range(1000, 2000):
        try:
            line.received.read((0, tag), greedy)
        except PayloadError as exc:
            assert "that is too much" in str(exc)
            break
    else:
        pytest.fail("a receiver must not keep whatever it is told")
    with pytest.raises(PayloadError, match="that is too much"):
        line.received.read((0, 0), tensor_dicts._heading(0, large))


def test_a_slot_that_was_never_filled() -> None:
    with pytest.raises(PayloadError, match=r"rank 2 sent a dict of tensors like one that has not come here \(slot 3\)"):
        ReceiverSchemaCache().read((2, 0), tensor_dicts._heading(3, b""))


def test_a_missed_parcel_counts() -> None:
    line = Line()
    with line.sent.heading((1, 0), schema(1)) as heading:
        line.received.missed((0, 0), heading)
    assert line.send(schema(1)) == 12
    line.received.missed((0, 0), encode(PayloadKind.OBJECT, 1).head)
    line.received.missed((0, 0), b"garbage")


HEADS = [
    tensor_dicts._heading(slot, describe(d, CPU).schema) + encode(PayloadKind.TENSOR_DICT, [1, 2]).head
    for slot in (0, 255)
    for d in ({"a": T, "b": [T.int(), 1, (T,)]}, {"x": {"y": T}})
]


@examples(400)
@given(st.sampled_from(HEADS), st.data())
def test_mutated_heads_are_payload_errors(head: bytes, data: st.DataObject) -> None:
    mutated = bytearray(head)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    del mutated[data.draw(st.integers(0, len(head))) :]
    with contextlib.suppress(PayloadError):
        ReceiverSchemaCache().read((0, 0), bytes(mutated))


META = (9, False, (2,), 0, 0)


@cases(
    "value",
    [
        None,
        (),
        ((("a",), (0,)),),
        ([0], (META,)),
        ((("a",), (1,)), (META,)),
        ((("a",), (-1,)), (META,)),
        ((("a",), (True,)), (META,)),
        ((("a", "b"), (0,)), (META,)),
        ((([],), (0,)), (META,)),
        ((("a",), ("x",)), (META,)),
        ((("a",), ((0, 1, 2),)), (META,)),
        ((("a",), (([0],),)), (META,)),
        ((("a",), (0,)), ((99, False, (2,), 0, 0),)),
        ((("a",), (0,)), ((-1, False, (2,), 0, 0),)),
        ((("a",), (0,)), ((9, 0, (2,), 0, 0),)),
        ((("a",), (0,)), ((9, False, [2], 0, 0),)),
        ((("a",), (0,)), ((9, False, (-2,), 0, 0),)),
        ((("a",), (0,)), ((9, False, (2.0,), 0, 0),)),
        ((("a",), (0,)), ((9, False, (1 << 64,), 0, 0),)),
        ((("a",), (0,)), ((9, False, (3,), 2, 0),)),
        ((("a",), (0,)), ((9, False, (4,), 2, 2),)),
        ((("a",), (0,)), ((9, False, (4,), -1, 0),)),
    ],
    ids=repr,
)
def test_a_schema_is_checked(value: object) -> None:
    head = tensor_dicts._heading(0, tensor_dicts.dump_plain(value))
    with pytest.raises(PayloadError, match="rank 7 sent cannot be read"):
        ReceiverSchemaCache().read((7, 0), head)


def test_values_must_fit() -> None:
    found = Schema(describe({"a": T, "x": 1}, CPU).schema)
    for values in ([], [1, 2], (1,), None):
        with pytest.raises(ValueError, match="values do not fit"):
            found.build([T], values)
