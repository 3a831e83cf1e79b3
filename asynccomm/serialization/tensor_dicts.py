"""Dicts of tensors as parcels: a schema, which tends to repeat, and values, which do not.

The schema describes the dict: its keys, its nested dicts, lists and tuples as far as they contain tensors, and dtype
and shape of each tensor. All other contents are values, pickled separately.

The sender does not repeat a schema. Per channel (one receiver and tag, or all receivers of a root) the sender numbers
up to SLOTS schemas, sends a schema with its slot the first time, and only the slot from then on. The sender alone
decides which schema to replace. The receiver stores each schema in order of arrival, even from parcels that it refuses,
so sender and receiver always agree.

The head of a parcel::

    form, kind, slot, CRC-32 and bytes of the schema (no bytes: it is in the slot already)
    the schema
    the head of the values' parcel, if there are values

The payload holds the tensors, followed by the payload of the values' parcel.

Nodes of a schema: None is a value, a number a tensor, ``(keys, nodes)`` a dict, a list a list, ``(nodes,)`` a tuple.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from asynccomm.errors import PayloadError
from asynccomm.ops.validation import check_memory
from asynccomm.serialization.objects import PayloadKind, kind_of, reading
from asynccomm.serialization.plain import CODES, DTYPES, NotPlainError, dump_plain, load_plain

SLOTS: Final = 16  # cached schemas per channel
CHANNELS: Final = 64  # channels per peer with cached schemas; channels of further tags work without a cache
LARGEST: Final = 256 << 10  # bytes of a cached schema
EVERYBODY: Final = -1  # peer and tag of the channel of a broadcast

LONG: Final = 100  # items of a container above which a trial pickle is the faster check for tensors

_FORM, _NO_SLOT = 1, 255
_HEAD: Final = struct.Struct("<BBBxII")  # form, kind, slot, CRC-32 of the schema, its bytes

SchemaKey = tuple[int, int]  # peer and tag


@final
class Slices(NamedTuple):
    """The part of each tensor to send when the receivers reassemble the parts."""

    parts: int  #: number of parts that a tensor is divided into
    part: int  #: index of the part to send
    chosen: Mapping[Any, bool]  #: whether to divide, by key; by default all tensors that divide evenly


@final
class DictSkeleton(NamedTuple):
    """A dict of tensors, separated into schema, tensors and values."""

    schema: bytes
    tensors: list[Tensor]  #: to send; with slices, some of them parts
    values: list[object]


@final
class TensorMeta(NamedTuple):
    """One tensor of a schema."""

    dtype: torch.dtype
    on_device: bool  #: whether it is on the comm's device, and that is not the CPU
    shape: tuple[int, ...]
    parts: int  #: 0: sent whole
    part: int

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return math.prod(self.shape) * self.dtype.itemsize // (self.parts or 1)


def describe(tensor_dict: Mapping[Any, object], device: torch.device, slices: Slices | None = None) -> DictSkeleton:
    """Separate a dict into schema, tensors and values. Raises: TypeError and ValueError, naming the entry."""
    work = _SkeletonBuilder(device, slices)
    chosen = slices.chosen if slices is not None else {}
    nodes = []
    try:
        for key, value in tensor_dict.items():
            nodes.append(work.node(value, f"tensor_dict[{key!r}]", chosen.get(key)))
        schema = dump_plain(((tuple(tensor_dict), tuple(nodes)), tuple(work.metas)))
    except NotPlainError as exc:
        raise TypeError(f"keys in tensor_dict must be strings, numbers, or tuples of these, got {exc}") from None
    except RecursionError:
        raise ValueError("tensor_dict is nested too deeply, or in itself") from None
    return DictSkeleton(schema, work.tensors, work.values)


class _SkeletonBuilder:
    """Builds the skeleton of one dict."""

    def __init__(self, device: torch.device, slices: Slices | None) -> None:
        self._device = device
        self._slices = slices
        self._numbers: dict[tuple[int, int], int] = {}
        self.metas: list[tuple[int, bool, tuple[int, ...], int, int]] = []
        self.tensors: list[Tensor] = []
        self.values: list[object] = []

    def node(self, value: Any, name: str, sliced: bool | None) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value, name, sliced)
        kind = type(value)
        mark = len(self.values)
        nodes: list[object] = []
        if kind in (dict, list, tuple) and len(value) > LONG and _is_plain(value):
            pass
        elif kind is dict:
            nodes = [self.node(item, f"{name}[{key!r}]", sliced) for key, item in value.items()]
        elif kind is list or kind is tuple:
            nodes = [self.node(item, f"{name}[{i}]", sliced) for i, item in enumerate(value)]
        if nodes.count(None) == len(nodes):  # no tensors in it
            self.values[mark:] = [value]
            return None
        if kind is dict:
            return tuple(value), tuple(nodes)
        return nodes if kind is list else (tuple(nodes),)

    def _tensor(self, tensor: Tensor, name: str, sliced: bool | None) -> int:
        code = CODES.get(tensor.dtype)
        if tensor.layout is not torch.strided or tensor.is_nested or code is None:
            raise ValueError(f"{name} must be a dense tensor of a common dtype, got {tensor.layout}, {tensor.dtype}")
        check_memory(name, tensor)
        device = tensor.device.type
        if device != "cpu" and device != self._device.type:
            raise ValueError(f"{name} is on {tensor.device}, but the comm is on {self._device}")
        parts, part = (0, 0) if self._slices is None else self._slicing(self._slices, tensor, name, sliced)
        number = self._numbers.get((id(tensor), parts))
        if number is None:
            number = self._numbers[id(tensor), parts] = len(self.metas)
            self.metas.append((code, device != "cpu", tuple(tensor.shape), parts, part))
            tensor = tensor.detach()
            if parts:
                count = tensor.numel() // parts
                tensor = tensor.reshape(-1)[part * count : (part + 1) * count]
            self.tensors.append(tensor)
        return number

    def _slicing(self, slices: Slices, tensor: Tensor, name: str, sliced: bool | None) -> tuple[int, int]:
        if sliced is False or slices.parts == 1 or not tensor.numel():
            return 0, 0
        if tensor.numel() % slices.parts:
            if sliced is None:
                return 0, 0
            raise ValueError(
                f"all_gather_tensors asks to divide {name}, whose {tensor.numel()} elements do not divide evenly among "
                f"{slices.parts} ranks"
            )
        return slices.parts, slices.part


def _is_plain(value: object) -> bool:
    try:
        dump_plain(value)
    except NotPlainError:
        return False
    return True


@final
class Schema:
    """The structure of a dict, as received.

    Args:
        data: the received schema; raises any exception if malformed.
    """

    __slots__ = ("_root", "_values", "metas", "nbytes")

    def __init__(self, data: bytes) -> None:
        self._root, metas = load_plain(data)
        self.metas: list[TensorMeta] = [_meta(*entry) for entry in metas]
        self.nbytes: int = sum([meta.nbytes for meta in self.metas])  #: of the sent tensors
        self._values = 0
        if not _is_dict(self._root):
            raise ValueError("it is no dict")
        self._check(self._root)

    def _check(self, node: Any) -> None:
        if node is None:
            self._values += 1
            return
        if type(node) is int and 0 <= node < len(self.metas):
            return
        if _is_dict(node):
            keys, children = node
            hash(keys)
            if len(keys) != len(children):
                raise ValueError("it has a dict that does not fit its keys")
        elif type(node) is list:
            children = node
        elif type(node) is tuple and len(node) == 1 and type(node[0]) is tuple:
            (children,) = node
        else:
            raise ValueError(f"it has a node {node!r}")
        for child in children:
            self._check(child)

    def build(self, tensors: Sequence[Tensor], values: object) -> dict[Any, Any]:
        """The dict. Raises any exception if ``values`` do not fit the schema."""
        if type(values) is not list or len(values) != self._values:
            raise ValueError("its values do not fit its schema")
        built: dict[Any, Any] = _build(self._root, tensors, iter(values))
        return built


def _meta(code: Any, on_device: Any, shape: Any, parts: Any, part: Any) -> TensorMeta:
    numbers = (code, parts, part, *shape) if type(shape) is tuple else (None,)
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) or type(on_device) is not bool:
        raise ValueError("it has a tensor of no known dtype and shape")
    meta = TensorMeta(DTYPES[code], on_device, shape, parts, part)
    if meta.parts and (meta.part >= meta.parts or math.prod(meta.shape) % meta.parts):
        raise ValueError("it has a tensor that cannot be divided")
    return meta


def _is_dict(node: object) -> bool:
    return type(node) is tuple and len(node) == 2 and type(node[0]) is tuple and type(node[1]) is tuple


def _build(node: Any, tensors: Sequence[Tensor], values: Iterator[object]) -> Any:
    if node is None:
        return next(values)
    if type(node) is int:
        return tensors[node]
    if type(node) is list:
        return [_build(child, tensors, values) for child in node]
    children = [_build(child, tensors, values) for child in node[-1]]
    return dict(zip(node[0], children, strict=True)) if len(node) == 2 else tuple(children)


@final
class SenderSchemaCache:
    """The schemas that the receivers of a comm's dicts have stored. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held until the parcel is submitted: the parcel that defines a slot goes first
        self._peers: dict[int, dict[int, OrderedDict[bytes, int]]] = {}  # by tag; slots by schema, the oldest first

    @contextmanager
    def heading(self, channel: SchemaKey, schema: bytes, *, now: bool = True) -> Iterator[bytes]:
        """The beginning of the head of a parcel, which must be sent inside the ``with`` block unless the block raises.

        Args:
            now: whether the parcel is sent inside the block. Otherwise its head defines no slot, because the parcel may
                be sent out of order, or never.
        """
        if not now:
            yield _heading(_NO_SLOT, schema)
            return
        peer, tag = channel
        with self._lock:
            channels = self._peers.setdefault(peer, {})
            slots = channels.get(tag)
            if slots is None and len(channels) < CHANNELS:
                slots = OrderedDict()
            if slots is None or len(schema) > LARGEST:
                yield _heading(_NO_SLOT, schema)
                return
            slot = slots.get(schema)
            if slot is not None:
                yield _heading(slot, b"")
            else:
                slot = len(slots) if len(slots) < SLOTS else next(iter(slots.values()))
                yield _heading(slot, schema)
                if len(slots) == SLOTS:
                    slots.popitem(last=False)
                slots[schema] = slot
                channels[tag] = slots
            slots.move_to_end(schema)


def _heading(slot: int, schema: bytes) -> bytes:
    return _HEAD.pack(_FORM, PayloadKind.TENSOR_DICT, slot, zlib.crc32(schema), len(schema)) + schema


@final
class ReceiverSchemaCache:
    """The schemas of a comm's received dicts."""

    def __init__(self) -> None:
        self._sources: dict[int, dict[int, dict[int, Schema]]] = {}  # by tag, then by slot

    def read(self, channel: SchemaKey, head: bytes) -> tuple[Schema, bytes]:
        """The schema of a parcel received on ``channel``, and the rest of its head. Raises: PayloadError."""
        source, tag = channel
        with reading(source):
            form, kind, slot, crc, size = _HEAD.unpack_from(head)
            if form != _FORM or kind != PayloadKind.TENSOR_DICT or (slot >= SLOTS and slot != _NO_SLOT):
                raise ValueError("it is no dict of tensors")
            data, rest = head[_HEAD.size : _HEAD.size + size], head[_HEAD.size + size :]
            if len(data) != size or zlib.crc32(data) != crc:
                raise ValueError("it is damaged")
            if size:
                schema = Schema(data)
                if slot != _NO_SLOT:
                    self._keep(source, tag, slot, schema, size)
                return schema, rest
            known = self._sources.get(source, {}).get(tag, {}).get(slot)
        if known is None:
            raise PayloadError(f"rank {source} sent a dict of tensors like one that has not come here (slot {slot})")
        return known, rest

    def _keep(self, source: int, tag: int, slot: int, schema: Schema, size: int) -> None:
        channels = self._sources.setdefault(source, {})
        if size > LARGEST or (tag not in channels and tag != EVERYBODY and len(channels) > CHANNELS):
            raise ValueError("it is to be remembered, but that is too much")
        channels.setdefault(tag, {})[slot] = schema

    def missed(self, channel: SchemaKey, head: bytes) -> None:
        """Store the schema of a parcel refused by its receive on ``channel``: later parcels may refer to it."""
        with suppress(PayloadError):
            if kind_of(channel[0], head) is PayloadKind.TENSOR_DICT:
                self.read(channel, head)
