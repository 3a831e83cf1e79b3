"""Objects as parcels, readable without trusting the sender.

The sender chooses one of two forms.

- PLAIN: None, bools, numbers, strings, bytes, lists, tuples, dicts and sets, of exactly these types, and dense tensors.
  The body is a pickle that names no class or function except complex. Tensors travel outside of the pickle, as the
  parcel's payload, and are received straight into their memory. A tensor that occurs several times in the object is one
  tensor on the receiver, too.
- TORCH: all other objects, by ``torch.save``. The receiver reads them with ``torch.load(weights_only=True)`` unless its
  caller trusts the sender.

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
import pickle
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

INLINE: Final = 64 << 10  # largest body, in bytes, that is part of the head

DTYPES: Final = (  # a dtype's code is its index: append only
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}

_PLAIN, _TORCH, _OUT = 1, 2, 0x80  # forms, and the flag of a body in the payload
_FORMS: Final = {_PLAIN, _TORCH, _PLAIN | _OUT, _TORCH | _OUT}
_PREFIX: Final = struct.Struct("<BBIIQ")  # form, kind, CRC-32 of the body, number of tensors, bytes of the body
_SEAL: Final = struct.Struct("<BBI")  # form, kind, CRC-32 of the rest


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


# -- plain pickles ----------------------------------------------------------------------------------------------------


class NotPlainError(TypeError):
    """An object cannot be written in the form PLAIN."""


class _FoundTensor(Exception):
    """The object contains tensors: the slower pickler has to write it."""


class _Pickler(pickle.Pickler):
    """Pickles objects without classes and functions; runs in C except for unsupported types."""

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is complex or obj is complex:
            return NotImplemented  # default pickling: a call of the one class that the reader accepts
        raise _FoundTensor if _is_plain(obj) else NotPlainError(type(obj).__name__)


class _TensorPickler(pickle.Pickler):
    """Like `_Pickler`, with tensors as numbers. Slow: a Python call for each object."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if type(obj) is not Tensor:
            return None
        number = self._numbers.get(id(obj))
        if number is None:
            if not _is_plain(obj):
                raise NotPlainError("Tensor")
            number = self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return number

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is complex or obj is complex:
            return NotImplemented
        raise NotPlainError(type(obj).__name__)


def _is_plain(obj: object) -> bool:
    return (
        type(obj) is Tensor
        and not obj.requires_grad
        and obj.layout is torch.strided
        and obj.dtype in _CODES  # quantized dtypes have no code
        and not obj.is_nested
        and obj.device.type != "meta"
    )


class _Unpickler(pickle.Unpickler):
    """Reads the output of `_Pickler`, and refuses all classes and functions except complex."""

    def __init__(self, data: bytes | bytearray, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> type[complex]:
        if (module, name) == ("builtins", "complex"):
            return complex
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, number: object) -> Tensor:
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise pickle.UnpicklingError(f"it has no tensor {number!r}")
        return self._tensors[number]


def dump_plain(obj: object) -> bytes:
    """A plain pickle of an object without tensors. Raises: NotPlainError."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, 5).dump(obj)
    except _FoundTensor:
        raise NotPlainError("Tensor") from None
    return buffer.getvalue()


def load_plain(data: bytes | bytearray, tensors: Sequence[Tensor] = ()) -> Any:
    """The object of a plain pickle. Raises any exception: see :func:`reading`."""
    return _Unpickler(data, tensors).load()


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


def encode(kind: PayloadKind, obj: object, name: str = "obj") -> Parcel:
    """``obj`` as a parcel, which shares the memory of tensors on the CPU.

    Raises: TypeError, naming the argument ``name``, if it cannot be pickled; ValueError if it has too many tensors, or
        one without memory.
    """
    buffer = io.BytesIO()
    form = _PLAIN
    tensors: list[Tensor] = []
    try:
        _Pickler(buffer, 5).dump(obj)
    except _FoundTensor:
        buffer = io.BytesIO()
        pickler = _TensorPickler(buffer)
        try:
            pickler.dump(obj)
            tensors = pickler.tensors
        except NotPlainError:
            form, buffer = _TORCH, _torch_saved(obj, name)
        except Exception as exc:
            raise _cannot_pickle(name, exc) from exc
    except NotPlainError:
        form, buffer = _TORCH, _torch_saved(obj, name)
    except Exception as exc:  # usually too deep
        raise _cannot_pickle(name, exc) from exc
    return _parcel(form, kind, buffer, tensors, name)


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
    return struct.pack(f"<BB{len(shape)}Q", _CODES[tensor.dtype], len(shape), *shape)


def _torch_saved(obj: object, name: str) -> io.BytesIO:
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
    except Exception as exc:
        raise _cannot_pickle(name, exc) from exc
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


def dtype_code(tensor: Tensor) -> int | None:
    """The code of a tensor's dtype; None if a parcel cannot hold the dtype."""
    return _CODES.get(tensor.dtype)


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
        self.source = source
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
            if self._form == _PLAIN:
                return load_plain(self._body, self._tensors)
        except Exception as exc:
            raise _unreadable(self.source, exc) from exc
        try:
            return torch.load(io.BytesIO(self._body), weights_only=weights_only, map_location="cpu")
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
