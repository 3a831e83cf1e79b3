"""Everyday values as plain data: all come back alike, and malformed nodes raise."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import pickle
import uuid
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccomm
from asynccomm.serialization import values
from asynccomm.serialization.objects import PayloadKind, clone_out, encode
from asynccomm.serialization.plain import is_plain
from asynccomm.serialization.values import flatten, rebuild, register_safe
from tests.cases import cases

T = TypeVar("T")


@register_safe
class Color(enum.Enum):
    RED = (1, 0)
    GREEN = "green"
    VERT = "green"  # noqa: PIE796


@register_safe
class Level(enum.IntEnum):
    LOW = 1


@register_safe
class Access(enum.Flag):
    READ = 1
    WRITE = 2


@register_safe
class Pair(NamedTuple):
    left: Any
    right: Any = 2


@register_safe
class NamedPair(Pair):
    """Has a dict, unlike the class of ``NamedTuple``."""


@register_safe
@dataclasses.dataclass
class Config:
    steps: int
    out: Path = Path("out")
    more: Any = None
    seen: int = dataclasses.field(default=0, init=False)
    kind: ClassVar[str] = "x"

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise AssertionError("called by a receiver")

    @functools.cached_property
    def doubled(self) -> int:
        return 2 * self.steps


@register_safe
@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    name: str


@register_safe
@dataclasses.dataclass(frozen=True)
class ListKey:
    """A key whose hash and equality depend on lists, dicts and sets; it is told apart by its label."""

    items: Any
    label: int = dataclasses.field(default=0, compare=False)

    def __hash__(self) -> int:
        return hash((type(self.items), len(self.items)))


@register_safe
@dataclasses.dataclass(frozen=True)
class LabelKey:
    """A key that can be compared in cycles, where the hash changes with the list."""

    items: Any = dataclasses.field(compare=False)
    label: int

    def __hash__(self) -> int:
        return hash((type(self.items), len(self.items)))


@register_safe
@dataclasses.dataclass(frozen=True)
class FirstKey:
    """A key whose hash needs the first item of its list."""

    items: list[Any]

    def __hash__(self) -> int:
        return hash(self.items[0])


@register_safe
@dataclasses.dataclass(eq=False)
class Parent:
    children: Any = None


@register_safe
@dataclasses.dataclass(eq=False)
class Child:
    parent: Parent


@register_safe
@dataclasses.dataclass
class Box(Generic[T]):
    item: T


class Unregistered(enum.Enum):
    A = 1


def through(obj: object) -> Any:
    return clone_out(3, encode(PayloadKind.OBJECT, obj)).decode(weights_only=True)


VALUES = [
    date(2024, 2, 29),
    datetime(2024, 2, 29, 23, 59, 58, 123456),
    datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    datetime.max.replace(tzinfo=UTC),
    time(1, 2, 3, 4, timezone(-timedelta(hours=3, seconds=1), "there"), fold=1),
    timedelta(-3, 7, 9),
    UTC,
    timezone(timedelta(hours=1)),
    ZoneInfo("America/Argentina/Buenos_Aires"),
    Path("a/../b"),
    Path("/"),
    PurePosixPath("//x/\udc80"),
    PureWindowsPath("C:\\x/y"),
    PurePath(""),
    Decimal("-0E-30"),
    Decimal("-sNaN123"),
    Decimal("Infinity"),
    Fraction(-(2**200), 3),
    uuid.uuid1(),
    OrderedDict([(2, date(2024, 1, 1)), (1, None)]),
    Color.RED,
    Color.VERT,
    Level.LOW,
    Access.READ,
    Access.READ | Access.WRITE,
    Access(0),
    Pair([1], {"x": Pair(1)}),
    Config(3, Path("x"), more=[Config(4), {Key("a"): Key("b")}]),
    Box(Box(None)),
    {Key("a"), date(2024, 1, 1), (1, frozenset({Level.LOW}))},
    {"mixed": [1, 2.5, (), [], {}, set(), frozenset(), b"x", bytearray(b"y"), 1j, None, Key("k")]},
    [{(date(2024, 1, 1), 1): {"a": [[[Path("deep")]]]}}],
]


@cases("value", VALUES)
def test_values_come_back(value: Any) -> None:
    back = through(value)
    assert type(back) is type(value)
    assert repr(back) == repr(value) or isinstance(value, set)
    if not (isinstance(value, Decimal) and value.is_nan()):
        assert back == value
    for name in ("fold", "tzinfo", "is_safe", "seen"):
        assert getattr(back, name, None) == getattr(value, name, None)


def test_plain_and_simple_members_are_themselves() -> None:
    assert through(Color.VERT) is Color.GREEN
    assert through(UTC) is UTC
    assert through(ZoneInfo("Asia/Tokyo")) is ZoneInfo("Asia/Tokyo")


def test_structure_is_kept() -> None:
    day, items = date(2024, 1, 1), [Path("x")]
    loop: list[Any] = [day, items]
    loop.append((loop, {"self": loop}))
    box: Box[Any] = Box([])
    box.item.append(box)
    first, second, (same, of) = through(loop)[:3]
    assert of["self"] is same
    assert same[1] is second
    pair = through([items, items, day, day])
    assert pair[0] is pair[1]
    assert pair[2] is pair[3]
    assert first == day
    back = through(box)
    assert back.item[0] is back


def test_keys_that_hold_lists_dicts_and_sets() -> None:
    def keys() -> list[Any]:
        return [
            ListKey([(1, 2)]),
            ListKey([(3, 4)]),
            ListKey({ListKey([(5, 6)]): Path("x")}),
            ListKey({ListKey([(7, 8)])}),
            (ListKey([Pair([1, [2]])]), frozenset({ListKey([[]]), ListKey([{}])})),
        ]

    assert through(dict.fromkeys(keys(), 1)) == dict.fromkeys(keys(), 1)
    assert through(OrderedDict.fromkeys(keys(), [2])) == OrderedDict.fromkeys(keys(), [2])
    assert through([set(keys()), frozenset(keys())]) == [set(keys()), frozenset(keys())]
    assert through({FirstKey([Path("x")]): frozenset({FirstKey([date(2024, 1, 1)])})}) == {
        FirstKey([Path("x")]): frozenset({FirstKey([date(2024, 1, 1)])})
    }


def test_a_deep_key_is_rebuilt_without_recursion() -> None:
    deep: Any = [Path("x")]
    for _ in range(5000):
        deep = [deep, {}]
    (back,) = through({ListKey(deep)})
    back = back.items
    for _ in range(5000):
        back = back[0]
    assert back == [Path("x")]


def test_keys_in_cycles() -> None:
    items: list[Any] = [Path("x")]
    key = ListKey(items)
    of: dict[Any, Any] = {key: 1}
    items.append(of)
    for obj in (of, items, key):
        back = next(iter(through([obj, {key}])[1])).items
        (again,) = back[1]
        assert again.items is back
        assert back[1][again] == 1
        assert again in back[1]


@pytest.mark.parametrize("kind", [set, dict.fromkeys])
def test_members_that_lead_back_to_the_object_that_has_them(kind: Callable[[Any], Any]) -> None:
    parent = Parent()
    parent.children = kind([Child(parent), Child(parent)])
    for obj in (parent, next(iter(parent.children)), [parent.children]):
        back = through([obj, parent])[1]
        assert len(back.children) == 2
        assert all(child.parent is back and child in back.children for child in back.children)


def test_a_key_that_depends_on_its_own_set_is_refused() -> None:
    items: list[Any] = [Path("x")]
    members = frozenset({ListKey(items)})
    items.append(members)
    with pytest.raises(asynccomm.PayloadError, match="a key in a frozenset cannot be found: its hash or equality"):
        through(items)


def _keys(of: list[Any]) -> list[Any]:
    return [each for each in of if isinstance(each, (int, Path, ListKey, LabelKey))]


@st.composite
def graphs(draw: st.DrawFn, kind: type, cycles: bool) -> Any:
    """An object made of others, of which some are shared and some are keys; in cycles, where lists are changed last."""
    objects: list[Any] = [1, Path("x")]
    for label in range(draw(st.integers(1, 9))):
        some = draw(st.lists(st.sampled_from(objects), max_size=3))
        held = [each for each in objects if isinstance(each, (list, dict, set, frozenset, tuple))]
        match draw(st.sampled_from(["list", "dict", "OrderedDict", "set", "frozenset", "tuple", "box", "key", "key"])):
            case "list":
                objects.append(list(some))
            case "dict":
                objects.append(dict(zip(_keys(some), reversed(some), strict=False)))
            case "OrderedDict":
                objects.append(OrderedDict.fromkeys(_keys(some), some[-1:]))
            case "set":
                objects.append(set(_keys(some)))
            case "frozenset":
                objects.append(frozenset(_keys(some)))
            case "tuple":
                objects.append(tuple(some))
            case "box":
                objects.append(Box(some))
            case "key":
                objects.append(kind(draw(st.sampled_from(held)) if held else [()], label))
    if cycles:
        for changed in [each for each in objects if type(each) is list and each]:
            changed[-1] = draw(st.sampled_from(objects))
    return draw(st.permutations(objects))


def _check_alike(back: Any, obj: Any, seen: dict[int, Any]) -> None:
    assert type(back) is type(obj)
    if id(obj) in seen:
        assert seen[id(obj)] is back, "a shared object is one object"
        return
    if isinstance(obj, (int, Path)):
        assert back == obj
        return
    if obj != ():
        seen[id(obj)] = back
    if isinstance(obj, (dict, set, frozenset)):
        assert all(key in back for key in back)
    assert len(_parts(back)) == len(_parts(obj))
    for one, other in zip(_parts(back), _parts(obj), strict=True):
        _check_alike(one, other, seen)


def _parts(obj: Any) -> list[Any]:
    if isinstance(obj, dict):
        return [*obj, *obj.values()]
    if isinstance(obj, (set, frozenset)):
        return sorted(obj, key=lambda key: (type(key).__name__, str(getattr(key, "label", key))))
    return (
        list(obj) if isinstance(obj, (list, tuple)) else [getattr(obj, each.name) for each in dataclasses.fields(obj)]
    )


@given(graphs(ListKey, cycles=False))
def test_nested_keys_come_back_as_with_pickle(obj: Any) -> None:
    _check_alike(through(obj), obj, {})
    _check_alike(pickle.loads(pickle.dumps(obj)), obj, {})


@given(graphs(LabelKey, cycles=True))
def test_nested_keys_in_cycles_come_back_or_are_refused(obj: Any) -> None:
    try:
        back = through(obj)
    except asynccomm.PayloadError as exc:
        assert "a key in a frozenset cannot be found" in str(exc)
    except TypeError as exc:
        assert "contains itself" in str(exc)
    else:
        _check_alike(back, obj, {})


def test_no_constructor_runs() -> None:
    config = Config(1)
    config.steps, config.seen = -1, 9
    assert config.doubled == -2, "a cached property is not sent"
    back = through(config)
    assert (back.steps, back.seen) == (-1, 9)
    assert "doubled" not in vars(back)


def test_deep_lists_are_flat() -> None:
    deep: Any = Path("x")
    for _ in range(400):
        deep = [deep, 1]
    back = through(deep)
    for _ in range(400):
        back = back[0]
    assert back == Path("x")


class Zone(tzinfo):
    def utcoffset(self, at: datetime | None) -> timedelta:
        return timedelta(hours=1)


def test_values_that_would_lose_something() -> None:
    config = Config(1)
    config.extra = 1  # type: ignore[attr-defined]
    named = NamedPair(1, 2)
    named.note = "lost"  # type: ignore[attr-defined]
    cyclic: Box[Any] = Box(None)
    cyclic.item = (cyclic,)
    for obj, text in [
        (config, r"Config has attributes beside its fields.*\['extra'\]"),
        (named, r"NamedPair has attributes beside its fields.*\['note'\]"),
        (datetime(2024, 1, 1, tzinfo=Zone()), "the time zone .* is not one of"),
        (cyclic, "a Box contains itself"),
    ]:
        with pytest.raises(TypeError, match=f"obj cannot be sent: .*{text}.*weights_only=False"):
            encode(PayloadKind.OBJECT, [obj])


def test_registered_kinds() -> None:
    assert asynccomm.register_safe is register_safe
    assert register_safe(Key) is Key

    @dataclasses.dataclass
    class Failure(Exception):
        code: int

    for cls in (Failure, int, dict, OrderedDict, torch.nn.Linear, Key("x"), "Key", None, Path):
        with pytest.raises(TypeError, match=r"^cls must be an enum, a NamedTuple, or a dataclass .*add_safe_globals"):
            register_safe(cls)  # type: ignore[type-var]


def test_an_unregistered_class_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{Key.__module__}.Key"
    parcels = [encode(PayloadKind.OBJECT, obj) for obj in (Key("x"), Level.LOW, Pair(1))]
    with pytest.raises(TypeError, match=r"obj .* refuse the class .*Unregistered: call asynccomm.register_safe\(Unreg"):
        encode(PayloadKind.OBJECT, Unregistered.A)
    monkeypatch.setattr(values, "_registered", {})
    for parcel in parcels:
        with pytest.raises(
            asynccomm.PayloadError, match=r"rank 3 .* is not registered here: call asynccomm.register_safe"
        ):
            clone_out(3, parcel).decode(weights_only=True)
    monkeypatch.setattr(values, "_names", {})
    with pytest.raises(TypeError, match=rf"obj cannot be sent, because receivers refuse the class {name}: call"):
        encode(PayloadKind.OBJECT, Key("x"))


def test_a_class_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    parcels = [encode(PayloadKind.OBJECT, obj) for obj in (Key("x"), Level.LOW, Pair(1))]
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in (Key, Level, Pair)]
    others: list[type] = [Config, Color, tuple]
    monkeypatch.setattr(values, "_registered", dict(zip(names, others, strict=True)))
    for parcel, text in zip(parcels, ("other fields", "no member 'LOW'", "other fields"), strict=True):
        with pytest.raises(asynccomm.PayloadError, match=text):
            clone_out(3, parcel).decode(weights_only=True)


MALFORMED: list[Any] = [
    None,
    [()],
    [("list", [1])],
    [("nothing",)],
    [("tuple", [0])],
    [("date", 2024, 13, 1)],
    [("date", "2024")],
    [("tzinfo", ("zone", "../../etc/passwd"))],
    [("tzinfo", ("zone", "/etc/passwd"))],
    [("tzinfo", ("zone", "Nowhere/Atall"))],
    [("tzinfo", ("offset", (9, 0, 0)))],
    [("Fraction", "1e999999999", 1)],
    [("Fraction", 1, 0)],
    [("Decimal", "one")],
    [("UUID", -1, 0)],
    [("path", "Opener", "x")],
    [("rest", 0)],
    [("member", "os.mkdir", "x")],
    [("dataclass", f"{__name__}.Key", ["name"], [])],
    [("dataclass", f"{__name__}.Color", ["__class__"], [0])],
    [1, ("dataclass", f"{__name__}.Key", ["__class__"], [0])],
    [1, ("named tuple", f"{__name__}.Key", [0])],
    [("member", f"{__name__}.Key", "name")],
    [("member", f"{__name__}.Color", "green")],
    [("member", f"{__name__}.Access", "3")],
    [("dict", [0], [])],
    [("set", [0])],
]


def test_malformed_nodes_raise() -> None:
    for nodes in MALFORMED:
        with pytest.raises(Exception):
            rebuild(nodes, 0, [])
            pytest.fail(f"{nodes} was taken", pytrace=False)
    with pytest.raises(IndexError):
        rebuild([1], 1, [])


def test_flat_containers_are_their_own_nodes() -> None:
    numbers = list(range(1000))
    flat = flatten([numbers, tuple(numbers), Path("x")], is_plain)
    assert len(flat.nodes) == 4
    assert flat.nodes[flat.root] == ("list", [1, 2, 3])
    assert not flatten([json, numbers], is_plain).values
    assert flatten([json, numbers], is_plain).rest == [json]
    assert numpy.array_equal(through([numpy.arange(3), Path("x")])[0], [0, 1, 2])
