"""Objects as parcels, readable without trusting the sender.

The sender chooses one of three forms.

- PLAIN: None, bools, numbers, strings, bytes, lists, tuples, dicts and sets, of exactly these types, and dense tensors.
  The body is a pickle that names no class or function except complex. Tensors travel outside of the pickle, as the
  parcel's payload, and are received straight into their memory. A tensor that occurs several times in the object is one
  tensor on the receiver, too.
- VALUES: the types of ``values.py`` (dates, paths, arrays, registered classes) as well. The body is a plain pickle of
  their nodes, and of the bytes of one ``torch.save`` for all objects of other types.
- TORCH: all other objects, by ``torch.save``. Receivers read them with ``torch.load(weights_only=True)`` unless their
  callers trust the sender; a sender refuses an object that they would refuse.

A body of more than INLINE bytes is the first part of the payload instead of the last part of the head, because the
receiver collects a head before it can refuse the parcel. Tensors arrive on the CPU.

The head of a parcel::

    form, kind, CRC-32 of the body or 0, number of tensors, bytes of the body
    dtype, dimensions and shape of each tensor
    the body, unless the form says that it is in the payload

Guarantees: the receiver allocates memory only if the head agrees with the length of the payload. With ``weights_only``
no sender can make a receiver run code of the sender's choice; a hostile sender can still exhaust the receiver's memory,
or its stack by deep nesting. Damaged data raises PayloadError.
"""

from __future__ import annotations

import enum
import io
import math
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.errors import PayloadError
from asynccomm.ops import Parcel
from asynccomm.ops.parcels import MAX_HEAD
from asynccomm.ops.validation import check_memory
from asynccomm.serialization.plain import (
    CODES,
    DTYPES,
    NotPlainError,
    dump_plain,
    is_plain,
    load_plain,
    pickled,
)
from asynccomm.serialization.values import FlatObject, check_registered, flatten, rebuild

INLINE: Final = 64 << 10  # largest body, in bytes, that is part of the head

_PLAIN, _TORCH, _VALUES, _OUT = 1, 2, 3, 0x80  # forms, and the flag of a body in the payload
_FORMS: Final = {form | out for form in (_PLAIN, _TORCH, _VALUES) for out in (0, _OUT)}
_PREFIX: Final = struct.Struct("<BBIIQ")  # form, kind, CRC-32 of the body, number of tensors, bytes of the body
_SEAL: Final = struct.Struct("<BBI")  # form, kind, CRC-32 of the rest
_TRUST: Final = "pass weights_only=False on all ranks if they trust one another with running any code"


class PayloadKind(enum.IntEnum):
    """The content of a parcel, so that a receive can report a parcel of another kind."""

    OBJECT = 1
    OBJECT_LIST = 2
    TENSOR_DICT = 3
    STATE = 4
    ITEM = 5  #: of a stream
    END = 6  #: of a stream
    FAILURE = 7  #: early end of a stream

    @property
    def sender(self) -> str:
        """The method that sends this kind to one rank."""
        return _SENDERS[self]


_SENDERS: Final = {
    PayloadKind.OBJECT: "send_object",
    PayloadKind.OBJECT_LIST: "send_object_list",
    PayloadKind.TENSOR_DICT: "send_tensor_dict",
    PayloadKind.STATE: "broadcast_state",
    PayloadKind.ITEM: "sink().put",
    PayloadKind.END: "sink().close",
    PayloadKind.FAILURE: "a sink that failed",
}


@contextmanager
def reading(source: int) -> Iterator[None]:
    """Turn every exception inside into a PayloadError that names rank ``source`` as the sender."""
    try:
        yield
    except PayloadError:
        raise
    except Exception as exc:
        raise _unreadable(source, exc) from exc


def _unreadable(source: int, exc: Exception) -> PayloadError:
    return PayloadError(f"what rank {source} sent cannot be read: {type(exc).__name__}: {exc}")


# -- writing ----------------------------------------------------------------------------------------------------------


def encode(kind: PayloadKind, obj: object, name: str = "obj", *, weights_only: bool = True) -> Parcel:
    """``obj`` as a parcel, which shares the memory of tensors on the CPU and of numpy's arrays.

    Args:
        weights_only: whether receivers refuse all objects that are not known to be safe; this refuses them at once.

    Raises: TypeError, naming the argument ``name``, if it cannot be pickled, or would be refused; ValueError if it has
        too many tensors, or one without memory.
    """
    form = _PLAIN
    try:
        buffer, tensors = pickled(obj)
    except NotPlainError:
        form, buffer, tensors = _of_other_types(obj, name, weights_only)
    except Exception as exc:  # usually too deep
        raise _cannot_pickle(name, exc) from exc
    return _parcel(form, kind, buffer, tensors, name)


def _of_other_types(obj: object, name: str, weights_only: bool) -> tuple[int, io.BytesIO, list[Tensor]]:
    """The form of an object that is not plain, its body, and its tensors."""
    try:
        flat = flatten(obj, is_plain)
        whole = bool(flat.rest) and not (weights_only and flat.values)
    except Exception as exc:
        if weights_only:
            raise TypeError(f"{name} cannot be sent: {exc}; {_TRUST}") from exc
        flat, whole = FlatObject([], 0, [], False), True
    if weights_only:
        check_registered(flat.rest, name)
    if whole:
        return _TORCH, _torch_saved(obj, flat.rest, name, weights_only), []
    saved = _torch_saved(flat.rest, flat.rest, name, weights_only).getvalue() if flat.rest else None
    return _VALUES, *pickled((flat.nodes, flat.root, saved))


def _parcel(form: int, kind: PayloadKind, buffer: io.BytesIO, tensors: Sequence[Tensor], name: str) -> Parcel:
    body = buffer.getvalue()
    for tensor in tensors:
        check_memory(f"a tensor in {name}", tensor)
    metas = [_meta(tensor) for tensor in tensors]
    payload = [tensor.detach() if tensor.device.type == "cpu" else tensor.detach().cpu() for tensor in tensors]
    if len(body) > INLINE:
        payload.insert(0, torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
        form |= _OUT
    # no CRC for a large body: it would take longer than the rest of the encoding
    prefix = _PREFIX.pack(form, kind, 0 if form & _OUT else zlib.crc32(body), len(tensors), len(body))
    head = b"".join((prefix, *metas, b"" if form & _OUT else body))
    if len(head) > MAX_HEAD:
        raise ValueError(f"{name} has too many tensors to be sent: {len(tensors)}")
    return Parcel(head, tuple(payload))


def _meta(tensor: Tensor) -> bytes:
    shape = tensor.shape
    return struct.pack(f"<BB{len(shape)}Q", CODES[tensor.dtype], len(shape), *shape)


def _torch_saved(obj: object, rest: Sequence[object], name: str, weights_only: bool) -> io.BytesIO:
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        buffer.seek(0)
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(buffer) if weights_only else []
    except Exception as exc:
        raise _cannot_pickle(name, exc) from exc
    if refused:
        kinds = {f"{type(item).__module__}.{type(item).__qualname__}" for item in rest}
        names = ", ".join(sorted(kinds.intersection(refused)) or sorted(refused))
        raise TypeError(
            f"{name} cannot be sent, because receivers refuse {names}: allow it by "
            f"torch.serialization.add_safe_globals() on all ranks, or {_TRUST}"
        )
    return buffer


def _cannot_pickle(name: str, exc: Exception) -> TypeError:
    return TypeError(f"{name} cannot be sent, because it cannot be pickled: {type(exc).__name__}: {exc}")


def pack_value(kind: PayloadKind, value: object) -> bytes:
    """A head that holds one plain value without tensors. Raises: NotPlainError."""
    body = dump_plain(value)
    return _SEAL.pack(_PLAIN, kind, zlib.crc32(body)) + body


# -- reading ----------------------------------------------------------------------------------------------------------


def kind_of(source: int, head: bytes) -> PayloadKind:
    """The kind of the parcel with this head. Raises: PayloadError."""
    with reading(source):
        return PayloadKind(head[1])


def unpack_value(source: int, head: bytes) -> Any:
    """The value passed to :func:`pack_value`. Raises: PayloadError."""
    with reading(source):
        form, _, crc = _SEAL.unpack_from(head)
        body = head[_SEAL.size :]
        if form != _PLAIN or zlib.crc32(body) != crc:
            raise ValueError("it is damaged")
        return load_plain(body)


@final
class IncomingObject:
    """One parcel in flight: memory for its payload, and the decoding.

    Args:
        source: the rank that sent it.
        head: the parcel's.
        length: bytes of its payload.

    Raises: PayloadError, before any memory is allocated, unless the head is valid and fits ``length``.
    """

    __slots__ = ("_body", "_crc", "_form", "_tensors", "places", "source")

    def __init__(self, source: int, head: bytes, length: int) -> None:
        self.source: int = source
        try:
            form, kind, self._crc, count, size = _PREFIX.unpack_from(head)
            if form not in _FORMS or kind not in _SENDERS:
                raise ValueError(f"it is of no form that is known ({form}, {kind})")
            metas, at = _metas(head, count) if count else ([], _PREFIX.size)
            outside = bool(form & _OUT)
            nbytes = sum([math.prod(shape) * dtype.itemsize for dtype, shape in metas]) + (size if outside else 0)
            if nbytes != length or len(head) - at != (0 if outside else size):
                raise ValueError("its head does not fit its length")
            self._form = form & ~_OUT
            self._tensors: list[Tensor] = []
            if metas:
                with torch.inference_mode(False):  # ordinary tensors, also on a thread in inference mode
                    self._tensors = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in metas]
            #: buffers for the payload
            self.places: list[Tensor] = self._tensors
            self._body: bytes | bytearray
            if outside:
                self._body = bytearray(size)
                self.places = [torch.frombuffer(self._body, dtype=torch.uint8), *self._tensors]
            else:
                self._body = head[at:]
        except Exception as exc:
            raise _unreadable(source, exc) from exc

    def decode(self, *, weights_only: bool) -> Any:
        """The object, once the payload is in place. Raises: PayloadError."""
        try:
            if self._crc and zlib.crc32(self._body) != self._crc:
                raise ValueError("it is damaged")
            if self._form != _TORCH:
                plain = load_plain(self._body, self._tensors)
                if self._form == _PLAIN:
                    return plain
                nodes, root, saved = plain
                rest = () if saved is None else self._load(saved, weights_only)
                return rebuild(nodes, root, rest)
        except PayloadError:
            raise
        except Exception as exc:
            raise _unreadable(self.source, exc) from exc
        return self._load(self._body, weights_only)

    def _load(self, data: bytes | bytearray, weights_only: bool) -> Any:
        try:
            return torch.load(io.BytesIO(data), weights_only=weights_only, map_location="cpu")
        except Exception as exc:
            if not weights_only:
                raise PayloadError(
                    f"the object from rank {self.source} cannot be unpickled: {type(exc).__name__}: {exc}"
                ) from exc
            raise PayloadError(
                f"the object from rank {self.source} is refused: {_reason(exc)}; pass weights_only=False if you trust "
                f"that rank with running any code here, or allow its types by torch.serialization.add_safe_globals()"
            ) from exc


def _metas(head: bytes, count: int) -> tuple[list[tuple[torch.dtype, tuple[int, ...]]], int]:
    """Dtypes and shapes of ``count`` tensors, and the offset in ``head`` of their end."""
    at = _PREFIX.size
    metas = []
    for _ in range(count):
        code, dimensions = head[at], head[at + 1]
        shape = struct.unpack_from(f"<{dimensions}Q", head, at + 2)
        at += 2 + 8 * dimensions
        metas.append((DTYPES[code], shape))
    return metas, at


def _reason(exc: Exception) -> str:
    """The reason of torch's safe loader for refusing, without its page of advice."""
    text = str(exc)
    found = re.search(r"unsupported .*?(?= was not| whose| is not|$)", text, re.IGNORECASE | re.MULTILINE)
    if found is not None:
        return found[0]
    lines = [line.strip() for line in text.splitlines() if line.strip() and "Weights only load failed" not in line]
    return f"{type(exc).__name__}: {lines[0] if lines else text}"


def clone_out(rank: int, parcel: Parcel) -> IncomingObject:
    """The copy of its own parcel that a sending rank keeps, made as if received."""
    incoming = IncomingObject(rank, parcel.head, parcel.nbytes)
    for place, tensor in zip(incoming.places, parcel.tensors, strict=True):
        place.copy_(tensor)
    return incoming
