"""Everyday values as plain data, and back: dates, paths, numbers, numpy arrays, and registered classes.

:func:`flatten` turns an object into a list of nodes, which is plain data in the sense of ``objects.py``: a node is
either a plain value itself, or a tuple of a kind and plain arguments. A container's node has the numbers of its items'
nodes, so that an object that occurs several times stays one object, in cycles, too. :func:`rebuild` makes the object of
the nodes.

Lists, dicts and sets get their number before their items, all other nodes after their items. So rebuilding makes every
node from nodes with lower numbers, and then fills the lists, dicts and sets. If a key or a member of a set holds such a
container, rebuilding goes depth first instead: all containers in a key are filled before the key is hashed.

Security: a receiver builds only the kinds in this module, from checked plain data. Of a registered class it calls no
constructor and no other method, except ``__hash__`` and ``__eq__`` of objects in sets and of keys. Arrays never have
Python objects as elements.

numpy is imported when an array comes, and never by a sender.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final, NamedTuple, TypeVar, final
from zoneinfo import ZoneInfo

import torch

from asynccomm.serialization.arrays import array_of, flat_array, scalar_of

Node = Any  # a plain value that is no tuple, or a tuple of a kind and plain arguments
C = TypeVar("C", bound=type)
_Made = Sequence[Any] | Mapping[int, Any]  # objects by the number of their node

_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_PATHS: Final = {kind.__name__: kind for kind in (PosixPath, PurePosixPath, PureWindowsPath, WindowsPath)}
_ZONE: Final = re.compile(r"[\w+-]+(/[\w+-]+)*", re.ASCII)  # of the database's names: no path leads out of it

_registered: Final[dict[str, type]] = {}
_names: Final[dict[type, str]] = {}


# -- registered classes -----------------------------------------------------------------------------------------------


def register_safe(cls: C) -> C:
    """Allow objects of the class ``cls`` in messages with ``weights_only=True``; also a decorator. On all ranks.

    ::

        @asynccomm.register_safe
        @dataclass
        class Config:
            steps: int

    Args:
        cls: an enum, a dataclass or a NamedTuple. A class with the same name and module replaces an earlier one, as
            when a cell of a notebook runs again.

    A sender sends the name of the class and its fields, of an enum the member's name. A receiver sets the fields
    without ``__init__`` and ``__post_init__``, so it must not rely on their checks; types of fields are not checked
    either. Only the class itself is allowed, not its subclasses.

    Raises: TypeError, if ``cls`` is another class, or a dataclass derived from a built-in class such as Exception or
        dict, which has contents beside the fields. For other classes there is
        ``torch.serialization.add_safe_globals``.
    """
    if not is_registrable(cls):
        raise TypeError(
            f"cls must be an enum, a NamedTuple, or a dataclass without a built-in base class, got {cls!r}; "
            f"for others there is torch.serialization.add_safe_globals()"
        )
    name = f"{cls.__module__}.{cls.__qualname__}"
    _registered[name], _names[cls] = cls, name
    return cls


def is_registrable(cls: object) -> bool:
    """Whether :func:`register_safe` takes ``cls``."""
    if not isinstance(cls, type):
        return False
    if issubclass(cls, enum.Enum) or _is_named_tuple(cls):
        return True
    return dataclasses.is_dataclass(cls) and not any(_is_built_in(base) for base in cls.__mro__[:-1])


def check_registered(objects: Sequence[object], name: str) -> None:
    """Raise TypeError, naming the argument ``name``, if one of ``objects`` is of a class that should be registered."""
    allowed = [safe[0] if isinstance(safe, tuple) else safe for safe in torch.serialization.get_safe_globals()]
    for obj in objects:
        cls = type(obj)
        if is_registrable(cls) and cls not in allowed:
            raise TypeError(
                f"{name} cannot be sent, because receivers refuse the class {cls.__module__}.{cls.__qualname__}: call "
                f"asynccomm.register_safe({cls.__name__}) on all ranks"
            )


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _is_built_in(cls: type) -> bool:
    return not cls.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


def _class_of(name: object) -> type:
    cls = _registered.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"the class {name} is not registered here: call asynccomm.register_safe() on all ranks")
    return cls


# -- flattening -------------------------------------------------------------------------------------------------------


@final
class FlatObject(NamedTuple):
    """An object as plain data."""

    nodes: list[Node]
    root: int  #: number of the object's own node
    rest: list[object]  #: objects that this module does not know
    values: bool  #: whether there are nodes beside plain data and ``rest``


def flatten(obj: object, is_plain: Callable[[object], bool]) -> FlatObject:
    """``obj`` as plain data.

    Args:
        is_plain: whether a value that is no atom and no container is plain data, too: a plain tensor.

    Raises: ValueError, for a value that cannot be sent without loss; RecursionError.
    """
    work = _Flattening(is_plain)
    root = work.number(obj)
    while work.unfilled:
        work.fill(*work.unfilled.popleft())
    return FlatObject(work.nodes, root, work.rest, work.values)


class _Flattening:
    """Makes the nodes of one object."""

    def __init__(self, is_plain: Callable[[object], bool]) -> None:
        self._is_plain = is_plain
        self._numbers: dict[int, int] = {}  # by id
        self._kept: list[object] = []  # an id is valid as long as its object lives
        self.nodes: list[Node] = []
        self.unfilled: deque[tuple[int, Any]] = deque()
        self.rest: list[object] = []
        self.values = False

    def number(self, obj: Any) -> int:
        """The number of the node of ``obj``, which is made unless there is one."""
        number = self._numbers.get(id(obj))
        if number is None:
            self._kept.append(obj)
            kind = type(obj)
            flat = kind in _CONTAINERS and _is_flat(obj)
            if kind in _FILLED and not flat:
                number = len(self.nodes)
                self.nodes.append(None)
                self.unfilled.append((number, obj))
            else:
                self._numbers[id(obj)] = -1
                node = self._node(kind, obj) if not flat else ("same", obj) if kind is tuple else obj
                number = len(self.nodes)
                self.nodes.append(node)
            self._numbers[id(obj)] = number
        elif number < 0:
            raise ValueError(f"a {type(obj).__name__} contains itself")
        return number

    def _node(self, kind: type, obj: Any) -> Node:
        if kind in _ATOMS or self._is_plain(obj):
            return obj
        if kind is tuple or kind is frozenset:
            return kind.__name__, self._all(obj)
        if kind in _names:
            self.values = True
            return self._of_class(kind, _names[kind], obj)
        write = _WRITERS.get(kind)
        node = flat_array(obj) if write is None else write(obj)
        if node is None:
            self.rest.append(obj)
            return "rest", len(self.rest) - 1
        self.values = True
        return node

    def _of_class(self, kind: type, name: str, obj: Any) -> Node:
        if isinstance(obj, enum.Enum):
            known = kind.__members__.get(obj._name_) is obj  # type: ignore[attr-defined]
            return "member", name, obj._name_ if known else obj._value_
        fields = [] if isinstance(obj, tuple) else [field.name for field in dataclasses.fields(obj)]
        extra = [
            attribute
            for attribute in getattr(obj, "__dict__", {}).keys() - fields
            if not isinstance(getattr(kind, attribute, None), functools.cached_property)
        ]
        if extra:
            raise ValueError(f"a {name} has attributes beside its fields, which would be lost: {sorted(extra)}")
        if isinstance(obj, tuple):
            return "named tuple", name, self._all(obj)
        return "dataclass", name, fields, self._all([getattr(obj, field) for field in fields])

    def fill(self, number: int, obj: Any) -> None:
        """Make the node of a list, dict or set, at its reserved number."""
        name = type(obj).__name__
        node: Node
        if isinstance(obj, dict):
            node = name, self._all(obj), self._all(obj.values())
            if isinstance(obj, OrderedDict):  # the state of a module has attributes
                self.values = True
                node = *node, list(vars(obj)), self._all(vars(obj).values())
        else:
            node = name, self._all(obj)
        self.nodes[number] = node

    def _all(self, items: Any) -> list[int]:
        return [self.number(item) for item in items]


def _is_flat(container: Any) -> bool:
    """Whether all items are atoms, so that the container is its own node."""
    items = chain(container, container.values()) if isinstance(container, dict) else container
    return _ATOMS.issuperset(map(type, items))


def _written_zone(zone: tzinfo | None) -> Node:
    """A time zone as plain data; raises ValueError for one of another library."""
    if type(zone) is timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return "offset", _days(offset), *name
    if type(zone) is ZoneInfo and zone.key is not None:
        return "zone", zone.key
    if zone is not None:
        raise ValueError(f"the time zone {zone!r} is not one of datetime.timezone or zoneinfo.ZoneInfo(key)")
    return None


def _days(delta: timedelta) -> tuple[int, int, int]:
    return delta.days, delta.seconds, delta.microseconds


def _clock(at: datetime | time) -> tuple[int, ...]:
    return at.hour, at.minute, at.second, at.microsecond, at.fold


_CONTAINERS: Final = frozenset({list, tuple, dict, set, frozenset})
_FILLED: Final = frozenset({list, dict, set, OrderedDict})
_WRITERS: Final[dict[type, Callable[[Any], Node]]] = {
    date: lambda day: ("date", day.year, day.month, day.day),
    datetime: lambda at: ("datetime", (at.year, at.month, at.day), _clock(at), _written_zone(at.tzinfo)),
    time: lambda at: ("time", _clock(at), _written_zone(at.tzinfo)),
    timedelta: lambda delta: ("timedelta", *_days(delta)),
    timezone: lambda zone: ("tzinfo", _written_zone(zone)),
    ZoneInfo: lambda zone: ("tzinfo", _written_zone(zone)),
    Decimal: lambda number: ("Decimal", str(number)),
    Fraction: lambda number: ("Fraction", number.numerator, number.denominator),
    uuid.UUID: lambda number: ("UUID", number.int, number.is_safe.value),
    **dict.fromkeys(_PATHS.values(), lambda path: ("path", type(path).__name__, str(path))),
}


# -- rebuilding -------------------------------------------------------------------------------------------------------


def rebuild(nodes: object, root: object, rest: Sequence[object]) -> Any:
    """The object of :func:`flatten`. Raises any exception if the arguments are not its output."""
    if type(nodes) is not list or type(root) is not int:
        raise ValueError("it has no nodes")
    made: list[Any] = []
    unfilled: list[tuple[Any, Any]] = []
    holders: set[int] = set()  # numbers of the lists, dicts and sets, and of the objects that hold them
    may_be_keys = False  # whether some of these objects are hashable
    for number, node in enumerate(nodes):
        if type(node) is not tuple:
            made.append(node)
        elif (kind := node[0]) in _EMPTY:
            made.append(_EMPTY[kind]())
            unfilled.append((made[-1], node))
            holders.add(number)
        elif kind in _OF_NODES:
            if not holders.isdisjoint(node[-1]):
                if kind == "frozenset":
                    return _rebuild_depth_first(nodes, root, rest)
                holders.add(number)
                may_be_keys = True
            made.append(_OF_NODES[kind](made, *node[1:]))
        elif kind == "rest":
            made.append(rest[node[1]])
        else:
            made.append(_READERS[kind](*node[1:]))
    if may_be_keys and any(node[0] != "list" and not holders.isdisjoint(node[1]) for _, node in unfilled):
        return _rebuild_depth_first(nodes, root, rest)
    for container, node in unfilled:
        _fill(container, made, *node[1:])
    return made[root]


def _rebuild_depth_first(nodes: Sequence[Any], root: int, rest: Sequence[object]) -> Any:
    """The same object, where keys hold lists, dicts or sets: each is filled before the keys that hold it are hashed."""
    order, cyclic = _depth_first(nodes, root)
    made = {number: _EMPTY[nodes[number][0]]() for number in order if _kind(nodes[number]) in _EMPTY}
    late: list[int] = []  # containers that hold an object which holds them
    for number in order:
        node = nodes[number]
        if number not in made:
            for each in _unmade(nodes, made, number):
                of_nodes = _OF_NODES.get(_kind(nodes[each]))
                made[each] = _leaf(nodes[each], rest) if of_nodes is None else of_nodes(made, *nodes[each][1:])
        elif _kind(node) not in _EMPTY:
            continue  # made already, for an object that it holds in turn, through a container
        elif made.keys() >= set(_numbers_in(node)):
            _fill(made[number], made, *node[1:])
        else:
            late.append(number)
    for number in late:
        _fill(made[number], made, *nodes[number][1:])
    if cyclic:  # keys that hold their own dict or set were hashed before all that they hold was filled
        hashed = [number for number in order if _kind(nodes[number]) in _HASHED]
        for number in hashed:
            if nodes[number][0] in _EMPTY:
                made[number].clear()
                _fill(made[number], made, *nodes[number][1:])
        for number in hashed:
            _check_keys(made[number], _picked(made, nodes[number][1]))
    return made[root]


def _depth_first(nodes: Sequence[Any], root: int) -> tuple[list[int], bool]:
    """The numbers of the nodes, each after those of its items, and whether an object holds itself."""
    ended: dict[int, None] = {}
    entered: set[int] = set()
    cyclic = False
    stack = [root]
    while stack:
        number = stack.pop()
        if number < 0:
            ended[~number] = None
        elif number not in entered:
            entered.add(number)
            stack.append(~number)
            stack.extend(_numbers_in(nodes[number]))
        elif number not in ended:
            cyclic = True
    return list(ended), cyclic


def _unmade(nodes: Sequence[Any], made: _Made, number: int) -> list[int]:
    """The number, and those of the nodes that must be made before, in the order in which to make them."""
    found, stack = {number}, [number]
    while stack:
        for each in _numbers_in(nodes[stack.pop()]):
            if each not in made and each not in found:
                found.add(each)
                stack.append(each)
    return sorted(found)  # the items of all but containers, which are made already, have lower numbers


def _numbers_in(node: Any) -> Iterable[int]:
    """The numbers of the items of a node, also of keys, values and attributes."""
    kind = _kind(node)
    if kind in _EMPTY:
        return chain.from_iterable((*node[1:3], *node[4:]))
    return node[-1] if kind in _OF_NODES else ()


def _kind(node: Any) -> Any:
    return node[0] if type(node) is tuple else None


def _leaf(node: Any, rest: Sequence[object]) -> Any:
    """The object of a node that has no numbers of others."""
    if type(node) is not tuple:
        return node
    return rest[node[1]] if node[0] == "rest" else _READERS[node[0]](*node[1:])


def _check_keys(container: Any, keys: Sequence[Any]) -> None:
    if len(container) != len(keys) or not all(key in container for key in keys):
        raise ValueError(
            f"a key in a {type(container).__name__} cannot be found: its hash or equality depends on an "
            f"object that holds the {type(container).__name__}"
        )


def _fill(container: Any, made: _Made, items: Any, values: Any = (), names: Any = (), more: Any = ()) -> None:
    found = _picked(made, items)
    if isinstance(container, list):
        container.extend(found)
    elif isinstance(container, set):
        container.update(found)
    else:
        container.update(zip(found, _picked(made, values), strict=True))
        if names:  # of an OrderedDict's attributes
            vars(container).update(zip(names, _picked(made, more), strict=True))


def _picked(made: _Made, numbers: Any) -> list[Any]:
    return [made[number] for number in numbers]


def _member(name: object, value: object) -> enum.Enum:
    cls = _class_of(name)
    if not issubclass(cls, enum.Enum):
        raise ValueError(f"the class {name} is no enum here")
    if isinstance(value, str) and value in cls.__members__:
        return cls.__members__[value]
    if issubclass(cls, enum.Flag) and type(value) is int:
        return cls(value)  # of several members
    raise ValueError(f"the enum {name} has no member {value!r} here")


def _named_tuple(made: _Made, name: object, items: Any) -> Any:
    cls = _class_of(name)
    if not _is_named_tuple(cls) or len(cls._fields) != len(items):  # type: ignore[attr-defined]
        raise ValueError(f"the class {name} has other fields here")
    return tuple.__new__(cls, _picked(made, items))


def _dataclass(made: _Made, name: object, fields: Any, values: Any) -> Any:
    cls = _class_of(name)
    if not dataclasses.is_dataclass(cls) or [field.name for field in dataclasses.fields(cls)] != fields:
        raise ValueError(f"the class {name} has other fields here")
    obj = object.__new__(cls)
    for field, value in zip(fields, _picked(made, values), strict=True):
        object.__setattr__(obj, field, value)  # also of a frozen class
    return obj


def _zone(zone: Any) -> tzinfo | None:
    match zone:
        case None:
            return None
        case ("offset", (int() as days, int() as seconds, int() as microseconds), *name):
            return timezone(timedelta(days, seconds, microseconds), *name)
        case ("zone", str() as key) if _ZONE.fullmatch(key):
            return ZoneInfo(key)
        case _:
            raise ValueError(f"it has a time zone {zone!r}")


def _time(clock: Any, zone: Any) -> time:
    hour, minute, second, microsecond, fold = clock
    return time(hour, minute, second, microsecond, _zone(zone), fold=fold)


def _fraction(numerator: object, denominator: object) -> Fraction:
    if type(numerator) is not int or type(denominator) is not int:  # a text could stand for a huge number
        raise ValueError("it has a fraction that is none")
    return Fraction(numerator, denominator)


_EMPTY: Final[dict[object, Callable[[], Any]]] = {"list": list, "dict": dict, "set": set, "OrderedDict": OrderedDict}
_HASHED: Final = frozenset({"dict", "set", "OrderedDict", "frozenset"})
_OF_NODES: Final[dict[object, Callable[..., Any]]] = {
    "tuple": lambda made, items: tuple(_picked(made, items)),
    "frozenset": lambda made, items: frozenset(_picked(made, items)),
    "named tuple": _named_tuple,
    "dataclass": _dataclass,
}
_READERS: Final[dict[object, Callable[..., Any]]] = {
    "same": lambda obj: obj,
    "member": _member,
    "date": date,
    "datetime": lambda day, clock, zone: datetime.combine(date(*day), _time(clock, zone)),
    "time": _time,
    "timedelta": timedelta,
    "tzinfo": _zone,
    "Decimal": lambda text: Decimal(str(text)),
    "Fraction": _fraction,
    "array": array_of,
    "scalar": scalar_of,
    "UUID": lambda number, safe: uuid.UUID(int=number, is_safe=uuid.SafeUUID(safe)),
    "path": lambda kind, text: _PATHS[kind](str(text)),
}
